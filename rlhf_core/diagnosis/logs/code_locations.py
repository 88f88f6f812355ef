"""Activity of a program at its failure, from the frames of a traceback.

An error of a general class, such as ``KeyError``, says little; its location in a tokenizer, a reward function or an
import says most. The innermost known location decides.
"""

import re
from dataclasses import dataclass

from rlhf_core.diagnosis.logs.tracebacks import Frame, Raised
from rlhf_core.schemas.failures import FailureKind as Kind

_INSTALLED = re.compile(r"(?:site|dist)-packages/(?P<name>\w+)")
_STDLIB = re.compile(r"/lib/python3[\w.]*/\w+|^<frozen \w+")
_CHECKOUTS = (
    "verl|openrlhf|swift|trl|megatron|sglang|vllm|deepspeed|transformers|accelerate|slime|nemo_rl|nemo|areal|roll|llamafactory|"
    "llmtuner|axolotl|torchtune|torchtitan|dlrover|ray|fairseq|colossalai|lmdeploy|datasets|peft|unsloth"
)
_CHECKOUT = re.compile(rf"/(?P<name>{_CHECKOUTS})/(?!.*/(?:{_CHECKOUTS})/)")
USER, STDLIB = "user code", "standard library"

ENGINES = frozenset({"vllm", "sglang", "lmdeploy", "tensorrt_llm", "vllm_ascend", "sgl_kernel", "aphrodite"})
"""Packages that generate text in a separate process."""
ENGINE_PROCESSES = re.compile(r"EngineCore|[Vv]llm|vLLM|SGLang|sglang|Worker_[DTP]P\d")
"""Labels of processes of an engine."""
ENGINE_CLIENTS = re.compile(r"/\w*(?:vllm|sglang|lmdeploy)\w*_(?:client|server|engine)\w*\.py$")
"""Modules of trainers that send requests to an engine of the job."""
SERVICES = frozenset((
    "wandb", "swanlab", "mlflow", "comet_ml", "neptune", "clearml", "openai", "anthropic", "huggingface_hub",
    "modelscope", "urllib3", "requests", "httpx", "httpcore", "aiohttp", "botocore", "boto3", "s3transfer", "gcsfs",
    "fsspec", "urllib",
))  # fmt: skip
"""Packages that connect to services outside the job."""
CACHES = frozenset((
    "huggingface_hub", "transformers", "datasets", "torch", "triton", "filelock", "modelscope", "diskcache",
    "matplotlib", "vllm", "sglang", "flashinfer", "fsspec", "wandb", "jieba", "nltk", "numba", "joblib", "hydra", "ray",
))  # fmt: skip
"""Packages with their own cache folders, often shared with other users."""


def package_of(frame: Frame) -> str:
    """Name the package of a frame: an installed one, the standard library, a framework's checkout, or user code."""
    installed = _INSTALLED.search(frame.path)
    if installed is not None:
        return installed["name"]
    if _STDLIB.search(frame.path) is not None:
        return STDLIB
    checkout = _CHECKOUT.search(frame.path)
    return checkout["name"] if checkout is not None else USER


def raised_in(raised: Raised) -> str:
    """Name the package whose code raised an error, with the standard library attributed to its caller; empty without
    frames."""
    packages = [package_of(frame) for frame in raised.frames]
    return next((package for package in reversed(packages) if package != STDLIB), packages[-1] if packages else "")


@dataclass(frozen=True)
class CodeLocation:
    """Row of the table: a kind of code, and the kind of a failure there."""

    kind: Kind
    example: str
    """Frame or line of code, as a traceback prints it."""
    path: str = ""
    function: str = ""
    code: str = ""
    errors: str = ""
    """Classes of errors it applies to; empty for all general ones."""
    reach: int = 8
    """Number of frames examined, from the innermost."""

    def fits(self, frame: Frame, error: str) -> bool:
        """Return True if the frame is such a location, for this class of error."""
        return (
            (not self.errors or re.fullmatch(self.errors, error) is not None)
            and (not self.path or re.search(self.path, frame.path) is not None)
            and (not self.function or re.search(self.function, frame.function) is not None)
            and (not self.code or re.search(self.code, frame.code) is not None)
        )


_LOOKUPS = "KeyError|IndexError|TypeError|ValueError|AttributeError"
_SAMPLES = (
    r"inputs?|batch|examples?|samples?|docs?|documents?|items?|rows?|features?|records?|entry|data|"
    r"messages?|msg|conv\w*"
)

CODE_LOCATIONS: tuple[CodeLocation, ...] = (
    CodeLocation(
        Kind.REWARD_FUNCTION,
        'File "rewards/maths.py", line 7, in score',
        path=r"(?:^|/)[^/]*reward(?!_?(?:trainer|model|modeling|manager))[^/]*(?:/[^/]*)?$|/(?:math_verify|graders?)[/.]",
        reach=12,
    ),
    CodeLocation(
        Kind.REWARD_FUNCTION,
        'File "train.py", line 7, in compute_score',
        function=r"compute_score|reward_f|_rewards?$|^reward_\w+$|^_calculate_rewards$",
        reach=12,
    ),
    CodeLocation(
        Kind.REWARD_FUNCTION,
        "scores = reward_fn(prompts, completions)",
        code=r"\b(?:reward_fn|reward_funcs?|reward_function|compute_score)\(",
        reach=12,
    ),
    CodeLocation(
        Kind.CHECKPOINT_CORRUPT,
        'File "trainer.py", line 7, in load_checkpoint',
        function=r"^_?(?:load|restore|resume)_?(?:from_)?(?:\w{0,20}_)?(?:checkpoint|ckpt|state_dict|parameter_state|optimizer)\w*$|_load_plan$",
        errors="(?!FileNotFound|Permission|OSError|NotImplemented|Connection|Timeout).*",
    ),
    CodeLocation(
        Kind.IMPORT_ERROR,
        'File "site-packages/vllm/_core_ext.py", line 182, in <module>',
        # Programs are excluded, because the code that they run is not an import.
        path=r"(?:site|dist)-packages/(?!.*(?:/workers?/|(?:__main__|main|run|cli|launch\w*|default_worker)\.py))",
        function=r"^<module>$",
        errors="(?!FileNotFound|Permission|OSError|KeyboardInterrupt|SystemExit).*",
    ),
    CodeLocation(
        Kind.IMPORT_ERROR,
        'File "site-packages/triton/compiler/compiler.py", line 284, in compile',
        path=r"/triton/(?:compiler|backends|runtime/(?:build|driver))|torch/utils/cpp_extension|op_builder/"
        r"|jax/_src/compiler|tilelang/|flashinfer/jit|deep_gemm/jit",
        reach=4,
    ),
    CodeLocation(
        Kind.DATA,
        'File "torch/utils/data/_utils/fetch.py", line 54, in fetch',
        path=r"utils/data/_utils/(?:fetch|collate)\.py|/datasets/(?:builder|arrow_dataset|iterable_dataset|load|table)\.py"
        r"|datasets/packaged_modules/|/sentencepiece/|/tokenizers/|/tiktoken/|/jinja2/|/pandas/io/|/pyarrow/",
        reach=12,
    ),
    CodeLocation(
        Kind.DATA,
        'File "finetune/data_utils.py", line 7, in build',
        path=r"(?:tokenization_\w+|collator\w*|data_utils|\w*dataset\w*|preprocess\w*|template\w*|data_loader|(?<!torch/utils/data/)dataloader)\.py$"
        r"|/(?:templates?|datasets?|tokenizers?|preprocess\w*)/\w+\.py$",
        function=r"^(?!__init__$|main$)",
        errors=_LOOKUPS + "|AssertionError|RuntimeError",
        reach=4,
    ),
    CodeLocation(
        Kind.DATA,
        'File "prepare.py", line 34, in tokenize_function',
        function=r"tokenize|preprocess|collate|encode_(?:example|row|sample)|format_(?:prompt|example|sample|row)|apply_chat_template"
        r"|load_(?:data|dataset|jsonl?|examples|samples|parquet)\b|read_(?:jsonl?|csv|parquet|table)|process_(?:example|sample|row)",
        errors=_LOOKUPS + "|AssertionError",
        reach=4,
    ),
    CodeLocation(
        Kind.DATA,
        'labels = inputs.pop("label").to(model.device)',
        code=rf"\b(?:{_SAMPLES})\b ?(?:\[|\.pop\(|\.get\()['\"]?\w",
        errors="KeyError|TypeError",
        reach=1,
    ),
    CodeLocation(
        Kind.CONFIG,
        'File "hparams/data_args.py", line 86, in init_for_training',
        path=r"(?:hparams|arguments?|args|arg_utils|config\w*|\w+_config|\w+_args|hf_argparser|options|cli_args)(?:/\w+)?\.py$"
        r"|/(?:argparse|omegaconf|hydra|pydantic|jsonargparse|draccus|tyro|click|yaml)\b",
        errors="ValueError|AssertionError|TypeError|KeyError|AttributeError|NotImplementedError|RuntimeError|Exception",
        reach=2,
    ),
    CodeLocation(
        Kind.CONFIG,
        'File "train.py", line 7, in validate_args',
        function=r"^__post_init__$|(?:validate|check|verify|parse|sanity_check)_?\w*(?:args|arguments|config|configs|options|params)\b|^post_init$",
        errors="ValueError|AssertionError|TypeError|KeyError|AttributeError|NotImplementedError|RuntimeError|Exception",
        reach=3,
    ),
    CodeLocation(
        Kind.CONFIG,
        'File "site-packages/vllm/v1/core/kv_cache_utils.py", line 7, in check_enough_kv_cache_memory',
        path=r"(?:site|dist)-packages/(?!torch/)",
        function=r"^_{0,2}(?:validate|check|verify|sanity_check|ensure)_\w*(?<!inputs)(?<!prompt)(?<!checkpoint)$",
        errors="ValueError|AssertionError|TypeError|NotImplementedError",
        reach=2,
    ),
    CodeLocation(
        Kind.RENDEZVOUS,
        'File "torch/distributed/rendezvous.py", line 174, in _create_c10d_store',
        path=r"torch/distributed/(?:rendezvous|elastic/rendezvous/\w+)\.py$",
        reach=3,
    ),
    CodeLocation(
        Kind.ENGINE,
        'File "site-packages/vllm/v1/engine/core.py", line 872, in run_engine_core',
        path=r"/(?:vllm|sglang|lmdeploy|tensorrt_llm)/",
        errors="(?!FileNotFound|Permission|KeyboardInterrupt).*",
        reach=3,
    ),
    CodeLocation(
        Kind.ENGINE,
        'File "site-packages/trl/extras/vllm_client.py", line 233, in init_communicator',
        path=ENGINE_CLIENTS.pattern,
        errors="Exception|KeyError|RuntimeError",
        reach=3,
    ),
)
"""Searched for every frame from the innermost outwards; the first match decides."""

GENERAL = re.compile(
    r"\w*?(?:Key|Value|Type|Attribute|Assertion|Index|Runtime|NotImplemented|Name|UnboundLocal|Recursion|ZeroDivision|OS|IO|Lookup|"
    r"Arithmetic|System|Inductor|Compilation|Stop)\w*(?:Error|Exception|Iteration)|Exception|_?queue\.Empty|InductorError|AcceleratorError"
)
"""Classes that imply no kind by themselves."""


def location_of(raised: Raised) -> CodeLocation | None:
    """Find the innermost known location of an error of a general class; None if there is none."""
    if GENERAL.fullmatch(raised.error) is None:
        return None
    for distance, frame in enumerate(reversed(raised.frames)):
        for place in CODE_LOCATIONS:
            if distance < place.reach and place.fits(frame, raised.error):
                return place
    return None
