"""Phrases of the set-up of training: engines and services, packages, data and settings.

Rows are tried from top to bottom; see :mod:`rlhf_core.diagnosis.logs.signatures.table`. Error classes are in
:mod:`rlhf_core.diagnosis.logs.exceptions`.
"""

from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.diagnosis.logs.signatures.row import Signature, row
from rlhf_core.schemas.failures import FailureKind as Kind

ROOT, SYMPTOM, CASCADE = EvidencePart.ROOT, EvidencePart.SYMPTOM, EvidencePart.CASCADE
_GENERAL = r"\b(?:Value|Assertion|Type|NotImplemented|Runtime|Key|Attribute|OS|Environment)Error\W{1,3}"

ENGINES: tuple[Signature, ...] = (
    row(
        Kind.CONFIG,
        ROOT,
        "To serve one request of this length 18.35 GiB KV cache is needed, which is larger than what there is",
        r"can be stored in KV cache|KV cache is needed, which is larger",
        r"User-specified max_model_len .{0,60}greater than",
    ),
    row(
        Kind.ENGINE,
        CASCADE,
        "ERROR [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
        r"Engine(?:Dead|Core)\w{0,20}Error|EngineCore\w{0,20} (?:encountered|failed|died|hit)",
        r"Engine ?[Cc]ore( proc\w{0,10})? \S{0,40} ?(?:died|init)",
        r"[Ee]ngine (?:process|loop) (?:failed|died|crashed|is dead)",
        r"Background loop (?:has errored|is not running)|VllmWorker\w{0,20} (?:rank=\d+ )?pid[ =]\d+ died",
        r"WorkerProc (?:hit an exception|initialization failed)|RPC call to \w+ timed out|sample_tokens timed out",
        r"Failed to update (?:parameter|weights)|[Ww]eights? (?:update|sync(?:hronization)?|transfer)s? failed",
        r"Error in memory profiling\. Initial free memory|vLLM server can't be reached at",
        r"Server error '5\d\d .{0,200}(?:generate|completions|/v1/|weights|communicator)",
        r"(?i:(?:vllm|sglang|rollout|inference|generation|lmdeploy) (?:server|engine|worker)s? .{0,60}"
        r"(?:died|crashed|exited|not (?:up|ready|reachable|responding|healthy)|dead\b|failed to start|"
        r"did not (?:start|come up)))",
    ),
    row(
        Kind.ENGINE,
        CASCADE,
        "[TP1] Scheduler hit an exception: Traceback (most recent call last):",
        r"Scheduler hit an exception|DetokenizerManager hit an exception|TokenizerManager hit an exception",
        r"get a response from detokenizer|Watchdog timeout \(self\.|[Ss]cheduler watchdog timeout",
        r"(?i:\b(?:scheduler|(?:de)?tokenizer|(?:cache|data)?_?manager|router) (?:process )?(?:died|crashed))",
        r"[Rr]eceived sigquit from a child|SIGQUIT received|one of the subprocesses exited",
        r"[Ss]ubprocess .{0,60}exited with code -?[1-9]",
        r"Server (?:\S+ )?(?:failed to start|process exited)|Initialization failed\. warmup error",
        r"(?i:KV ?(?:cache|pool).{0,60}(?:exhaust|out of slots|leak detected)|token_to_kv_pool.{0,40}leak)",
        r"(?i:Prefill out of memory|Decode out of memory)",
    ),
)

_LOCAL = r"(?:localhost|127\.0\.0\.1|0\.0\.0\.0|10\.\d+\.\d+\.\d+|192\.168\.\d+\.\d+)"

SERVICES: tuple[Signature, ...] = (
    row(
        Kind.ENGINE,
        CASCADE,
        "ConnectionError: HTTPConnectionPool(host='localhost', port=8000): Max retries exceeded with url: /health/",
        rf"(?:host='|https?://){_LOCAL}.{{0,200}}(?:Max retries|timed out|refused|Connection)",
    ),
    row(
        Kind.UNKNOWN,
        SYMPTOM,
        "OSError: We couldn't connect to 'https://huggingface.co' to load this file",
        r"couldn't connect to 'https|Max retries exceeded with url|Read timed out\.|HTTPS?ConnectionPool\(host='",
        r"(?i:check your (?:internet|network )?\s?connection)",
        r"(?i:error happened while trying to locate the file on the hub)",
        r"\b(?:429|500|502|503|504) (?:Client|Server) Error",
        r"(?:429|502|503|504) (?:Too Many Requests|Bad Gateway|Service|Gateway)",
        r"Run initialization has timed out|wandb.{0,60}(?:timed out|CommError)|rate limit",
    ),
)
"""Services: an engine started by the job itself, or a service outside the job, which has no kind of its own."""

PACKAGES: tuple[Signature, ...] = (
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "python: No module named rlhf_core",
        r"ModuleNotFoundError|\bImportError\b|PackageNotFoundError|No module named ",
        r"Failed to import |CUDA Setup failed|cannot import name",
    ),
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        r"undefined symbols?\b|version `?(?:GLIBC|CXXABI)|cannot open shared object file",
        r"symbol lookup error|(?:Library|image) not found\b.{0,80}\.so|dlopen.{0,80}fail",
    ),
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
        r"\w\(\) got an unexpected keyword argument|got multiple values for (?:keyword )?argument",
        r"takes (?:from )?\d+(?: to \d+)? positional arguments? but \d+ (?:was|were) given",
        # torch.load since 2.6: the file is whole.
        r"Weights only load failed\. This file can still be loaded|require users to upgrade torch",
    ),
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "AttributeError: module 'torch.library' has no attribute 'register_fake'",
        r"(?:partially initialized )?module '[^']{1,100}' has no attribute",
        r"'\w+(?:Config|Model|ForCausalLM|ForConditionalGeneration|Tokenizer(?:Fast)?|Processor|Trainer|Cache|LLM|Engine|Arguments)'"
        r" object has no attribute",
        r"does not exist or is not currently imported|Version mismatch: The cluster was started with",
        r"type object '\w+' has no attribute|does not recognize this architecture|Tried to instantiate class '_\w+",
        r"did not match any variant of untagged enum \w+Wrapper",
        r"[Mm]odel architectures? \[.{1,100}\] (?:are|is) not supported|'_OpNamespace' '\w+' object has no attribute",
    ),
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        r"no kernel image is available|(?:driver (?:on your system )?is too old|device kernel image is invalid)",
        r"[Oo]perator \S+::\S+ does not exist|No such operator",
        r"CUDA driver version is insufficient|compiled with an unsupported toolchain|invalid device function",
        r"mismatches the version that was used to compile|Torch not compiled with CUDA",
        r"not compiled with (?:\w+ )?support",
        r"compiled using NumPy 1|Numpy is not available|numpy\.dtype size changed|binary incompatibility",
        r"forward compatibility was attempted",
        r"(?:build|wheel|binary|installation)s? (?:does|do|did|was) not (?:built |compiled )?(?:support|with)",
        r"is not compatible with the current PyTorch installation",
        r"requires? (?:a )?(?:GPU|device)s? with compute capability|only supports? (?:Ampere|Hopper) GPUs",
        r"Could not run '\w+::\S+' with arguments from the|NPU function error|aclnn\w+ failed",
    ),
    row(
        Kind.IMPORT_ERROR,
        ROOT,
        "MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
        r"CUDA_HOME (?:does not exist|environment variable is not set)|Error building extension",
        r"Failed to find C compiler|Ninja is required|Unable to JIT load the",
        r"No such file or directory: '(?:ninja|nvcc|gcc|g\+\+|cc|c\+\+|cmake|git|hipcc)\'|ninja: build stopped",
        r"nvcc fatal|\bld: cannot find -l|fatal error: \S+\.h(?:pp)?: No such file",
        r"Command '\['(?:[\w./-]*/)?(?:gcc|g\+\+|cc|c\+\+|clang(?:\+\+)?|nvcc|hipcc|ninja)'"
        r".{0,3000}non-zero exit status",
        r"(?i:(?:is|are) (?:required|not installed)\b.{0,200}\bpip install)|ptxas (?:fatal|exited|error)",
        r"PassManager::run failed",
        r"requires? .{0,200}\b(?:to be|is not) installed|\b(?<!-)(?!(?:git|conda|mamba): )[\w.]+: command not found$",
        r"(?:please|try) (?:pip )?install\b|(?:Please|need to) upgrade\b",
        r"\w+[<>=]=[\d.]+\S* is required|[Ii]ncompatible version",
        r"FlashAttention2? .{0,80}(?:not installed|cannot be used)",
        r"[Ff]lash-?[Aa]ttn? .{0,60}not (?:installed|available)",
    ),
)

DATA: tuple[Signature, ...] = (
    row(
        Kind.DATA,
        ROOT,
        "TemplateError: Conversation roles must alternate user/assistant/user/assistant/...",
        r"chat_template is not set|[Nn]o chat template|Tokenization mismatch|JSONDecodeError|Error tokenizing data",
        r"Error: .{0,200}[Cc]hat[_ ]template|Conversation roles must alternate|Couldn't cast",
    ),
    row(
        Kind.DATA,
        ROOT,
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
        r"does not have a padd?ing token|Can't load tokenizer|Tokenizer class \S+ does not exist",
        r"no pad(?:ding)? token|Cannot handle batch sizes > 1 if no padding",
        r"instantiate the backend tokenizer|Couldn't find (?:a |any )?(?:data|dataset)|Converting from \w+ failed",
        r"activate truncation and/or padding|num_samples should be a positive",
        r"[Cc]olumn(?:s|\(s\))?\b.{0,200}(?:not (?:found|in|present)|missing|do(?:es)? not exist)",
        r"column names don't match|(?i:(?:data ?set|dataloader|train_data\w*) is empty|empty data ?set)",
        r"(?i:No (?:valid )?(?:samples|examples|rows) (?:found|left|remain))",
        r"(?i:(?:data ?set|parquet|jsonl?|csv)(?: file| directory| folder| path)? \S{1,200} (?:not found|does not"
        r" exist|is missing|is malformed))",
        r"No such file or directory: '[^']{0,300}\."
        r"(?:jsonl?|parquet|csv|tsv|arrow|txt|tar|bin\.idx|idx|npy|npz|h5|hdf5|tfrecord)'",
        r"Directory \S{1,300} (?:not found|is neither a .{0,40}[Dd]ataset)|[Ff]eature type '\w+' not found",
    ),
    row(
        Kind.DATA,
        SYMPTOM,
        "RuntimeError: Caught IndexError in DataLoader worker process 0.",
        r"Caught (?:Index|Key|Value|Type|Attribute|Assertion)Error in DataLoader worker",
        r"index out of range in self|Invalid key: \d+ is out of bounds|Token id \d+ is out of vocabulary",
        r"(?<!estimated )maximum (?:context|model) length (?:is|of) \d+",
        r"^(?!.{0,200}(?i:filter|dropp|truncat)).{0,200}(?:prompt|input|sequence|Prompt)s? .{0,60}(?:is|are) "
        r"(?:too long|longer than)",
        r"exceeds (?:the )?(?:model's )?(?:maximum|max) (?:model |context |prompt |sequence )?(?:length|len)",
        r"KeyError: '(?:prompts?|messages|conversations?|text|input_ids|labels?|chosen|rejected|question|answer|instr"
        r"uction|input|output|completion|content|role|images?|data_source|ground_truth|solution)'",
        r"KeyError: \W?Column",
    ),
)

_WRONG = "|".join(
    (
        r"not (?:yet )?(?:supported|compatible|divisible|allowed|recognized)|incompatible with",
        r"(?:does|do)(?:es)? not support|not implemented for|unsupported",
        r"(?:must|should|has to|needs to|have to) be (?:\w+ )?(?:one"
        r" of|divisible|set|specified|provided|greater|less|smaller|equal|in \[|>|<)",
        r"(?:must|should|has to|needs to) be (?:larger|at least|positive|a multiple|either|between|the same as|evenly)",
        r"not equal to|can only be (?:used|set|specified|enabled)",
        r"can ?not be (?:both|used|combined|set|specified|enabled|greater|None)|mutually exclusive",
        r"is not a valid|not a valid|(?:cannot|can't) (?:use|train\b|perform fine-tuning)",
        r"(?:must|should|has to|needs to|have to|need to) (?:specify|provide|define|choose|supply)\b",
        r"invalid (?:value|choice|option|argument|config|combination|\w+ (?:name|type))",
        r"unknown (?:keys?|model|optimizer|scheduler|option|argument|config|\w+ type)",
        r"unrecognized (?:model|configuration|argument|keys?)|could not find|couldn't find|mismatch",
        r"requires? (?:--|the\b|an?\b|\w+ strategy)|is required\b",
        r"please (?:set|specify|provide|use|make sure|pass|choose)|undefined (?:data ?set|model|template)",
        r"(?:is|was) not (?:set|specified|provided|defined) in|not found in|smaller than|is larger than",
        r"greater than|(?:is|are) not divisible|must (?:evenly )?divide|only supports? \w",
        r"only supported (?:with|on|for|by|in)\b|does not require grad and does not have a grad_fn",
        r"has parameters that were not used in producing loss|(?:must|should) equal\b",
    )
)
"""Libraries' words for unsuitable settings, after the error class."""

SETTINGS: tuple[Signature, ...] = (
    row(
        Kind.CONFIG,
        ROOT,
        "train.py: error: argument --lr_scheduler_type: invalid choice: 'cosin'",
        r": error: (?:argument|unrecognized arguments|the following arguments are required|ambiguous option|one of"
        r" the arguments)",
        r"Some specified arguments are not used by|Error: (?:No such option|Missing option|Invalid value for)",
    ),
    row(
        Kind.CONFIG,
        ROOT,
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=[2, 3], input_type=list]",
        r"\d+ validation errors? for|\[type=(?:extra_forbidden|missing|\w+_parsing|literal_error|value_error)",
        r"extra fields not permitted|Key '\S+' is not in struct|Could not override '|MissingMandatoryValue",
        r"Missing mandatory value|Could not (?:append to|delete from) config",
        r"Error parsing override|Error merging override|Could not find '[^']{1,100}'\s*$",
        r"In '[^']{1,80}': Could not find",
    ),
    row(
        Kind.CONFIG,
        ROOT,
        "RuntimeError: histc_cuda does not have a deterministic implementation, but you set 'torch.use_determ",
        r"does not have a deterministic implementation, but you set",
    ),
    row(
        Kind.CONFIG,
        ROOT,
        "ValueError: FSDP2 is not compatible with save_only_model=True",
        rf"(?i:{_WRONG})",
        after=_GENERAL,
    ),
    row(
        Kind.CONFIG,
        ROOT,
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
        r"Please correct the following .{0,100} config values|forward only supports",
        r"invalid device ordinal|: --\S+: command not found",
        r"(?:job submission failed|Unable to allocate resources): (?:Invalid|Requested|.{0,100} limit)",
        r"Batch job submission failed",
        r"Unable to create step for job \d+: (?:More|Requested|Invalid|Memory required)",
        r"^(?:srun|sbatch|salloc): (?:fatal|error): .{0,200}"
        r"(?:mutually exclusive|[Ii]nvalid .{0,60}(?:option|specification))",
        r"pyxis: .{0,80}\[ERROR\] (?:mount: .{0,200}does not exist|.{0,400}returned error code: 40[134])",
        r"could not open image \S|error: Batch script contains DOS|Hostfile is not formatted correctly",
        r"Error: No slot '\S+' specified on host",
        r"api_key not configured|is not a local folder and is not a valid model|Unauthorized for url",
        r"Error: remaining_argv: |401 Client Error|gated repo|outgoing traffic has been disabled",
        r"does not appear to have a file named|Bfloat16 is only supported on GPUs",
        r"Total available GPUs .{0,60}less than|Error no file named",
        r"(?:The number of required|Ray does not have enough|more (?:CPUs|GPUs) than|No available node types can"
        r" fulfill|cannot be scheduled|infeasible)",
    ),
    row(
        Kind.CONFIG,
        SYMPTOM,
        "FileNotFoundError: [Errno 2] No such file or directory: 'model.conf'",
        # A symptom too: shell profiles load modules and conda in passing, scripts name a revision of git, and libraries
        # ask programs through sh. Jobs may run without them.
        r"module\(s\) are unknown|Unable to locate a modulefile|Could not find conda environment",
        r"CondaError: Run 'conda|\b(?:git|conda|mamba): command not found$",
        r"^(?:[\w./-]*/)?(?:sh|[\w-]+\.sh): (?:\d+: )?[\w.]+: not found$",
        r"No such file or directory|Permission denied|execve\(\): \S+|can't open file '|Operation not permitted",
    ),
)
"""The last row also matches a file system that lags behind, so any more specific row wins."""
