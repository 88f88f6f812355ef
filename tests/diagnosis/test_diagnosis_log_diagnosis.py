"""Logs of frameworks that no row was derived from: the kind of evidence decides. The excerpts are shortened and partly
reworded from public issues; the id of each case names its source.
"""

import io

import pytest
from made_tracebacks import kind_of, trace
from rich.console import Console
from rich.panel import Panel
from rich.table import Table

from rlhf_core.diagnosis.classify import read_log
from rlhf_core.diagnosis.logs import search
from rlhf_core.diagnosis.logs.search import events, find, find_error
from rlhf_core.schemas.failures import FailureKind as Kind

SITE = "/opt/conda/lib/python3.10/site-packages"


CASES = {
    "verl #1191: a setting, behind a wrapper of Ray": (Kind.CONFIG,
        "ray.exceptions.RayTaskError(AssertionError): ray::main_task() (pid=7)\n"
        + trace(("/verl/workers/fsdp_workers.py", "_build_rollout", "assert self.world_size % infer_tp == 0"),
              error="AssertionError: rollout world_size: 1 is not divisible by infer_tp: 2")),
    "verl #383: a worker that died, and Ray only guesses": (Kind.UNKNOWN,
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer.\n"),
    "NOVAglow646/Monet #17: a column that the data lacks": (Kind.DATA,
        trace(("Monet/RL/verl/utils/dataset.py", "_build_messages", "prompt_str: str = example[self.prompt_key]"),
              error="KeyError: 'problem'")),
    "TRL: a reward function on a completion that it did not expect": (Kind.REWARD_FUNCTION,
        trace((f"{SITE}/trl/trainer/grpo_trainer.py", "_calculate_rewards", "out = reward_func(prompts=prompts)"),
              ("train_grpo.py", "accuracy", "m = re.search(pattern, completion).group(1)"),
              error="AttributeError: 'NoneType' object has no attribute 'group'")),
    "verl: a reward function that raises a ValueError of its own": (Kind.REWARD_FUNCTION,
        trace(("/proj/rewards/geo.py", "compute_score", "return float(answer)"),
              error="ValueError: could not convert string to float: '3/4'")),
    "ms-swift #5737: Megatron's arguments": (Kind.CONFIG,
        trace(("Megatron-LM/megatron/training/arguments.py", "validate_args", "assert layers % size == 0"),
              error="AssertionError: 28 layers and 3 stages", prefix="[rank14]: ")),
    "DLRover #977: a checkpoint without what is looked for": (Kind.CHECKPOINT_CORRUPT,
        trace(("megatron/checkpointing.py", "load_checkpoint", "iteration = state_dict['iteration']"),
              error="KeyError: 'iteration'")),
    "DLRover #1175: ranks that do not come": (Kind.RENDEZVOUS, "TimeoutError: Timeout 5400s to complete rendezvous.\n"),
    "SGLang #8974: NCCL fails, the engine's death is a consequence": (Kind.NETWORK,
        trace(("sglang/srt/distributed/device_communicators/pynccl_wrapper.py", "NCCL_CHECK", "raise RuntimeError()"),
              error="RuntimeError: NCCL error: unhandled system error (run with NCCL_DEBUG=INFO for details)")
        + "[2025-08-08 09:09:09] Received sigquit from a child process. It usually means the child failed.\n"),
    "vLLM #3912: a library that was built for another version": (Kind.IMPORT_ERROR,
        "ImportError: flash_attn_2_cuda.so: undefined symbol: _ZN2at4_ops15sum_IntList\n"),
    "vLLM: a library that fails while it is imported": (Kind.IMPORT_ERROR,
        trace((f"{SITE}/vllm/_core_ext.py", "<module>", "ScalarType = torch.classes._core_C.ScalarType"),
              (f"{SITE}/torch/_classes.py", "__getattr__", "proxy = get(self.name, attr)"),
              error="RuntimeError: class 'ScalarType' was never registered")),
    "vLLM: an error that the engine's process printed": (Kind.ENGINE,
        "(EngineCore_DP0 pid=42) ERROR 01-21 04:15:38 [core.py:938] RuntimeError: index 1 is out of bounds for 0\n"
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"),
    "slime: Ray's word for the memory of the host": (Kind.HOST_OOM,
        "ray.exceptions.RayTaskError(OutOfMemoryError): ray::Actor.update_weights()\n"
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.\n"),
    "Ray: a node that is gone": (Kind.NODE_LOST,
        "ActorDiedError: The actor died because its node has died.\n"
        "the actor's node was terminated unexpectedly: health check failed due to missing too many heartbeats\n"),
    "huggingface_hub: a cache of another user": (Kind.FILE_SYSTEM,
        trace((f"{SITE}/huggingface_hub/file_download.py", "hf_hub_download", "os.makedirs(path)"),
              ("/opt/conda/lib/python3.10/os.py", "makedirs", "mkdir(name, mode)"),
              error="PermissionError: [Errno 13] Permission denied: '/shared/models'")),
    "datasets: a folder of data that is not there": (Kind.DATA,
        trace((f"{SITE}/datasets/load.py", "load_from_disk", "raise FileNotFoundError(path)"),
              error="FileNotFoundError: /data/part_0")),
    "a hub that does not answer is no connection between ranks": (Kind.UNKNOWN,
        trace((f"{SITE}/urllib3/connection.py", "_new_conn", "raise ConnectTimeoutError("),
              error="urllib3.exceptions.ConnectTimeoutError: 'Connection to cdn.example.org timed out.'")),
    "TRL: an engine of this job that does not answer": (Kind.ENGINE,
        "requests.exceptions.ConnectionError: HTTPConnectionPool(host='0.0.0.0', port=8000): Max retries exceeded "
        "with url: /update_named_param/\n"),
    "NVSentinel #155: a GPU that is gone, told over several lines": (Kind.GPU_HARDWARE,
        "[ 1843.308145] NVRM: The NVIDIA GPU 0000:b3:00.0\n"
        "               NVRM: fallen off the bus and is not responding to commands.\n"),
    "Soup #342: numbers that are none, noticed by a kernel": (Kind.NON_FINITE,
        "runs died at a device-side assert `probability tensor contains either inf, nan or element < 0`\n"),
    "notes: what was quoted counts as if it were printed": (Kind.IMPORT_ERROR,
        "- the server died with `ModuleNotFoundError: No module named 'x'`, seen only as a sigquit\n"),
    "a compiler that is not installed is no missing file": (Kind.IMPORT_ERROR,
        "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'\n"),
    "torchrun: a terminal that was closed": (Kind.USER_CANCEL,
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 7 got signal: 1\n"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_an_excerpt_is_read_by_its_kind_of_evidence(case: str) -> None:
    kind, log = CASES[case]
    assert kind_of(log) is kind


@pytest.mark.parametrize(
    "log",
    [
        # A library could not write a file, among the progress bars of a prediction that finishes.
        trace((f"{SITE}/jieba/__init__.py", "initialize", "_replace_file(a, b)"), error="PermissionError: [Errno 1] no")
        + "***** predict metrics *****\n",
        "n1:7:7 [0] ras/client_support.cc:160 NCCL WARN Call to bind failed: Address already in use\n",
        "Token indices sequence length is longer than the specified maximum (1201 > 1024)\n",
        'completion: def f(x): raise ValueError("must be positive")\n',
        "WARNING OOM at iter 1 (rank 0): CUDA out of memory. Tried to allocate 30.79 GiB.\n",
        "step 7 loss is finite\n",
        "initializing process group with backend nccl\n",
        "PermissionError is raised by open(); except ImportError: pass\n",
        "RuntimeError: Event loop is closed - harmless at shutdown\n",
        "Use keyboard interrupt to stop training gracefully\n",
        "Prompt: The project DEADLINE is Friday\n",
        "What is a kernel panic?\n",
        "NCCL timeout set to 1800 seconds\nNCCL timeout: 1800\nrendezvous timeout: 900\n",
        "`flash-attention` not found, consider installing for better performance: No module named 'flash_attn'.\n",
        "df: /root/.triton/autotune: No such file or directory\n",
        "bash: module: command not found\n",
        "No such file or directory: 'last_checkpoint', starting from scratch\n",
        "Filtered 12 prompts that are too long\n",
        "0 errors, 0 warnings\nmean squared error: 0.231\nerror_on_mismatch: False nccl_timeout: 600\n",
    ],
)
def test_what_only_sounds_like_a_failure_is_none(log: str) -> None:
    assert kind_of(log) is None


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("Keyboard interrupt received, exiting", Kind.USER_CANCEL),
        ("Detected KeyboardInterrupt, attempting graceful shutdown", Kind.USER_CANCEL),
        ("n3 kernel: Kernel panic - not syncing: Fatal machine check", Kind.NODE_LOST),
        ("JobState=DEADLINE", Kind.TIME_LIMIT),
        ("[rank3] NCCL timeout in all_reduce", Kind.COLLECTIVE_HANG),
        ("NCCL watchdog timeout on rank 3", Kind.COLLECTIVE_HANG),
        ("rendezvous timed out after 900 s", Kind.RENDEZVOUS),
        ("RuntimeError: Unable to find address for: eth0", Kind.RENDEZVOUS),
        ("n1:7:7 [0] NCCL WARN Bootstrap : no socket interface found", Kind.RENDEZVOUS),
        ("bash: python: command not found", Kind.IMPORT_ERROR),
        ("The prompt of 9000 tokens is longer than the maximum model length of 8192", Kind.DATA),
    ],
)
def test_what_sounds_alike_is_still_a_failure(line: str, kind: Kind) -> None:
    assert kind_of(line) is kind


def completions() -> str:
    """A table of completions as TRL prints it."""
    table = Table("Prompt", "Completion", "reward", expand=True)
    for _ in range(2):
        table.add_row("How do I fix it?\nModuleNotFoundError: No module named 'x'", "CUDA error: out of memory", "0.00")
        table.add_section()
    console = Console(file=io.StringIO(), width=100)
    console.print(Panel(table, expand=False, title="Step 3"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_errors_in_a_table_of_completions_are_none_and_those_after_it_are() -> None:
    assert "ModuleNotFoundError" in completions()
    assert kind_of(completions()) is None
    boxed = "╭─ Traceback (most recent call last) ─╮\n│ /app/train.py:18 in main │\n╰──────────╯\n"
    for log in (f"{boxed}OSError: [Errno 28] No space left on device", "torch.OutOfMemoryError: CUDA out of memory"):
        assert kind_of(completions() + log) is (Kind.DISK_FULL if boxed in log else Kind.CUDA_OOM)


def test_advice_about_the_keyboard_does_not_hide_what_follows() -> None:
    log = "To stop, use a keyboard interrupt.\nRuntimeError: CUDA error: out of memory\n"
    assert kind_of(log) is Kind.CUDA_OOM


def test_bars_that_go_on_show_that_an_error_was_survived_and_one_printed_again_does_not() -> None:
    bar = " {0}%|##        | {0}/100 [00:10<00:90, 1.00it/s]\n"
    error = trace(("helper.py", "cache", "write(x)"), error="TypeError: 7")
    going_on = bar.format(10) + error + "".join(bar.format(done) for done in (11, 12, 13))
    assert kind_of(going_on) is None
    assert kind_of(bar.format(10) + error + bar.format(10) * 3) is not None


@pytest.mark.parametrize(
    "prefix", ["", "[rank3]: ", "[default3]:", "(Worker pid=7) ", " 3: ", "trainer-1  | ", "2026-09-22T06:50:07.81Z "]
)
def test_steps_after_an_error_show_that_it_was_survived_whatever_the_prefix(prefix: str) -> None:
    error = trace(("proj/train.py", "ping", "send()"), error="ConnectionResetError: [Errno 104] reset by peer")
    step = "{'loss': 0.5, 'grad_norm': 1.2, 'learning_rate': 1e-05}\n"

    def kind(log: str) -> Kind | None:
        return kind_of("".join(f"{prefix}{line}" for line in log.splitlines(keepends=True)))

    assert kind(error) is Kind.NETWORK
    assert kind(error + step * 3) is None
    assert kind(error + "***** predict metrics *****\n") is None


@pytest.mark.parametrize("prefix", ["12: ", "[rank3]: ", "(WorkerDict pid=7, ip=10.0.0.3) ", "trainer-1  | "])
def test_the_label_of_an_engine_counts_behind_that_of_a_launcher(prefix: str) -> None:
    error = trace(
        ("proj/run.py", "step", "go()"), error="RuntimeError: it went wrong", prefix="(EngineCore_DP0 pid=42) "
    )
    assert kind_of("".join(f"{prefix}{line}" for line in error.splitlines(keepends=True))) is Kind.ENGINE


def test_numbers_of_tasks_that_srun_pads_are_prefixes() -> None:
    """``srun --label`` pads them to the width of the largest."""
    assert (
        kind_of(trace(("proj/train.py", "main", "train()"), error="KeyboardInterrupt", prefix=" 3: "))
        is Kind.USER_CANCEL
    )


def test_the_tracebacks_of_ranks_that_print_at_once_are_kept_apart() -> None:
    """The negative control: without their labels, the frame of one would explain the error of the other."""
    one = trace(("rewards/maths.py", "score", "x()"), error="KeyError: 7", prefix="[rank0]: ").splitlines()
    other = trace(("train.py", "main", "y()"), error="KeyError: 8", prefix="[rank1]: ").splitlines()
    mixed = "\n".join(line for pair in zip(one, other, strict=True) for line in pair)
    kinds = [event.kind for event in events(mixed)]
    assert kinds == [Kind.REWARD_FUNCTION, Kind.UNKNOWN]


RICH = """\
╭────────────── Traceback (most recent call last) ──────────────╮
│ /home/u/train.py:353 in <module>                              │
│                                                               │
│   350                                                         │
│ ❱ 353 │   main(get_args())                                    │
│                                                               │
│ /opt/conda/lib/python3.10/site-packages/some_library_of_other │
│ s/{file}:891 in                                               │
│ _{function}                                                   │
│                                                               │
│ ❱ 891 │   │   f"connection refused: {{host}}"                   │
╰───────────────────────────────────────────────────────────────╯
{error}: 64 and 4
"""
IPYTHON = """\
KeyError                                  Traceback (most recent call last)
---> 45 trainer.train()

File /venv/lib/python3.12/site-packages/transformers/trainer.py:2240, in Trainer.train(self)
   2238     x
File {file}:22, in {function}(completions)
---> 22 return a["x"]

{error}: 'x'
"""


@pytest.mark.parametrize("shape", [RICH, IPYTHON, "(Runner pid=7) " + RICH.replace("\n", "\n(Runner pid=7) ")])
@pytest.mark.parametrize(
    ("file", "function", "error", "kind"),
    [
        ("config.py", "batch_assertion", "AssertionError", Kind.CONFIG),
        ("rewards.py", "score", "KeyError", Kind.REWARD_FUNCTION),
        ("train.py", "step", "KeyError", Kind.UNKNOWN),
        ("rewards.py", "check_rewards", "ValueError", Kind.REWARD_FUNCTION),
    ],
)
def test_tracebacks_in_the_forms_of_others_have_frames_too(
    shape: str, file: str, function: str, error: str, kind: Kind
) -> None:
    """Code that is quoted in a box is not a line of the log: here it would look like a connection."""
    found = events(shape.format(file=file, function=function, error=error))
    assert [event.kind for event in found] == [kind]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        ("404 Client Error: Not Found for url", Kind.CONFIG),
        ("Error code: 400 - {'error': 'no'}", Kind.DATA),
        ("503 Server Error: Service Unavailable for url", Kind.UNKNOWN),
        ("429 Client Error: Too Many Requests for url", Kind.UNKNOWN),
        ("timed out after 404 s", Kind.UNKNOWN),
    ],
)
def test_a_service_that_refuses_for_good_is_told_from_one_that_is_busy(status: str, kind: Kind) -> None:
    assert (
        kind_of(trace((f"{SITE}/requests/models.py", "get", "raise x"), error=f"requests.HTTPError: {status}")) is kind
    )


def test_the_program_of_a_worker_is_no_library_that_is_imported() -> None:
    program = (f"{SITE}/ray/_private/workers/default_worker.py", "<module>", "worker.main_loop()")
    library = (f"{SITE}/vllm/_core_ext.py", "<module>", "x = y()")
    inner = (f"{SITE}/torch/lib.py", "f", "z()")
    kinds = [
        event.kind for first in (program, library) for event in events(trace(first, inner, error="RuntimeError: 7"))
    ]
    assert kinds == [Kind.UNKNOWN, Kind.IMPORT_ERROR]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("AttributeError: 'Qwen2Config' object has no attribute 'rope_theta'", Kind.IMPORT_ERROR),
        ("AttributeError: 'Batch' object has no attribute 'rope_theta'", Kind.UNKNOWN),
        ("einops.EinopsError:  Error while processing a pattern", Kind.SHAPE),
        ("RuntimeError: input.size(-1) must be equal to input_size. Expected 10, got 20", Kind.SHAPE),
        ("ValueError: hidden_size must be equal to num_heads * head_dim", Kind.CONFIG),
        ("RuntimeError: Expected all tensors to be on the same device, but found cuda:1 and cuda:0!", Kind.UNKNOWN),
        ("RuntimeError: HIP error: unspecified launch failure", Kind.ILLEGAL_ACCESS),
        ("RuntimeError: CUDA error: all devices are busy or unavailable", Kind.UNKNOWN),
        ("n1:9:9 [0] include/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-7", Kind.HOST_OOM),
        ("n1:9:9 [0] misc/alloc.cc:9 NCCL WARN Cuda failure 2 'out of memory'", Kind.CUDA_OOM),
        ("AssertionError: only support equal chunk. Got size of DataProto 15 and chunk 8.", Kind.CONFIG),
        ("slurmstepd: error: pyxis:     [ERROR] mount: /data does not exist", Kind.CONFIG),
        (
            "slurmstepd: error: pyxis: [ERROR] URL https://r/v2/manifests/9 returned error code: 404 Not Found",
            Kind.CONFIG,
        ),
        ("FATAL:   could not open image /img/x.sif: failed to retrieve path for /img/x.sif", Kind.CONFIG),
        ("srun: error: Unable to create step for job 7: More processors requested than permitted", Kind.CONFIG),
        ("srun: error: Node n7: Prolog failed", Kind.NODE_LOST),
        ('The following module(s) are unknown: "cuda/12.9"', Kind.CONFIG),
        ("EnvironmentNameNotFound: Could not find conda environment: rlhf", Kind.CONFIG),
        ("sbatch: error: Batch script contains DOS line breaks", Kind.CONFIG),
        ("ValueError: No slot '4' specified on host 'n1'", Kind.CONFIG),
        ("ValueError: Unknown keys ['num_procs'] in accelerate config", Kind.CONFIG),
        ("ORTE was unable to reliably start one or more daemons.", Kind.RENDEZVOUS),
        ("ConnectionError: launch on port `29500`, but another process is utilizing it.", Kind.RENDEZVOUS),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/home/u/.triton/cache/a/k.cubin'", Kind.FILE_SYSTEM),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", Kind.GPU_HARDWARE),
        ("OSError: [Errno 70] Communication error on send: '/beegfs/x'", Kind.FILE_SYSTEM),
        ("RuntimeError: CUDA error: the launch timed out and was terminated", Kind.ILLEGAL_ACCESS),
        ("AssertionError: vllm_num_engines * vllm_tensor_parallel_size must equal actor_num_nodes", Kind.CONFIG),
        ("RuntimeError: Version mismatch: The cluster was started with:", Kind.IMPORT_ERROR),
        ("RuntimeError: Ninja is required to load C++ extensions", Kind.IMPORT_ERROR),
        ("ConnectionError: The vLLM server can't be reached at http://0.0.0.0:8000 after 240.0 seconds.", Kind.ENGINE),
        ("ZeRORuntimeException: The checkpoint being loaded used a DP world size of 16", Kind.CHECKPOINT_CORRUPT),
        ("ValueError: remaining_argv: ['--num_generation', '8']", Kind.CONFIG),
        ("ValueError: Tokenizer class MyTokenizer does not exist or is not currently imported.", Kind.IMPORT_ERROR),
        ("RuntimeError: FlashAttention only support fp16 and bf16 data type", Kind.CONFIG),
        ("RuntimeError: element 0 of tensors does not require grad and does not have a grad_fn", Kind.CONFIG),
        ("RuntimeError: your module has parameters that were not used in producing loss.", Kind.CONFIG),
        ("ValueError: Reward function 'length' returned 8 rewards, expected 16", Kind.REWARD_FUNCTION),
        ("RuntimeError: [device.cc:84] ifa != nullptr. Unable to find interface for: [0.0.0.16]", Kind.RENDEZVOUS),
        (
            "FileNotFoundError: [Errno 2] No such file or directory: '/c/global_step9/mp_rank_00_model_states.pt'",
            Kind.CHECKPOINT_CORRUPT,
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: '/models/x/model.safetensors'", Kind.CONFIG),
        ("AssertionError: Error in memory profiling. Initial free memory 70.1 GiB, current 75.0 GiB.", Kind.ENGINE),
        ("mpirun noticed that process rank 3 with PID 0 on node n3 exited on signal 9 (Killed).", Kind.UNKNOWN),
        (
            "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find the requested files in the disk cache and "
            "outgoing traffic has been disabled.",
            Kind.CONFIG,
        ),
        ("[ERROR] HCCL: notify wait timeout, a rank is missing", Kind.COLLECTIVE_HANG),
        ("Exception: Capture failed", Kind.UNKNOWN),
        ("RuntimeError: Expected target size [4, 100], got [4, 99]", Kind.SHAPE),
        ("ValueError: reward function returned None for every sample", Kind.REWARD_FUNCTION),
        ("FileNotFoundError: checkpoint-100 is incomplete: optimizer.pt is missing", Kind.CHECKPOINT_CORRUPT),
        ("pkg_resources.DistributionNotFound: The 'trl' distribution was not found", Kind.IMPORT_ERROR),
        ("RuntimeError: operator torchvision::nms does not exist", Kind.IMPORT_ERROR),
        ("[2026-01-01 00:00:00] Detokenizer manager died", Kind.ENGINE),
        ("UCX  ERROR ucp_ep_create failed: Destination is unreachable", Kind.NETWORK),
        ("task_receiver.cc:219:  Check failed: objects_valid", Kind.UNKNOWN),
        ("ValueError: 9 GiB KV cache is needed, which is larger; the estimated maximum model length is 8", Kind.CONFIG),
    ],
)
def test_words_of_libraries_that_no_row_holds_are_known_by_their_kind(line: str, kind: Kind) -> None:
    assert kind_of(line) is kind


@pytest.mark.parametrize(
    ("end", "is_good"),
    [
        ("Job 'raysubmit_7' succeeded", True),
        ("Process finished with exit code 0", True),
        ("State: COMPLETED (exit code 0)", True),
        ("Process finished with exit code 1", False),
        ("worker 3 exited with code 0", False),
        ("JobState=TIMEOUT Reason=TimeLimit ExitCode=0:0", False),
    ],
)
def test_what_a_launcher_says_of_a_good_end_clears_what_was_before(end: str, is_good: bool) -> None:
    assert (kind_of(f"RuntimeError: odd\n{end}\n") is None) == is_good


REQUEUED = "*** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO JOB REQUEUE ***\n"


def test_a_job_that_saved_and_queued_itself_again_has_not_failed() -> None:
    for notice in ("checkpoint complete; requeueing Slurm job 7\n", "Requeued job 7 (3 remaining timeouts)\n"):
        assert kind_of("interrupted: got SIGUSR1\n" + notice + REQUEUED) is None
    # The event that ended it still counts, and a job that was requeued without a request was preempted.
    assert kind_of("requeueing job 7\n" + REQUEUED.replace("JOB REQUEUE", "TIME LIMIT")) is Kind.TIME_LIMIT
    assert kind_of(REQUEUED) is Kind.PREEMPTION


def test_the_first_step_shows_that_the_ranks_have_found_each_other() -> None:
    taken = "RuntimeError: Address already in use\n"
    step = "(TaskRunner pid=7) step:1 - actor/pg_loss:0.2 - critic/rewards/mean:0.2\n"
    assert kind_of(taken + step) is None
    assert kind_of(step + taken) is not None
    # Other roots may be printed before buffered output of the end of training.
    assert kind_of("RuntimeError: CUDA error: out of memory\n" + step) is not None


CANCELLED = "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***\n"


def test_what_follows_a_cancellation_is_its_consequence() -> None:
    counted = (
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.\n"
    )
    closed = "ConnectionResetError: [Errno 104] Connection reset by peer\n"
    for log, kind in ((CANCELLED + closed + counted, Kind.USER_CANCEL), (counted + CANCELLED, Kind.HOST_OOM)):
        assert kind_of(log) is kind
    # Slurm's message for a step that it ends because one of its tasks failed.
    assert kind_of(CANCELLED.replace(" ***\n", " DUE TO TASK FAILURE ***\n")) is Kind.UNKNOWN


def test_a_command_that_was_started_again_is_read_from_its_last_start() -> None:
    log = "train.py: error: argument --workers: expected one argument\n" + trace(error="KeyboardInterrupt")
    assert kind_of(log) is Kind.USER_CANCEL


def test_an_outcome_is_read_with_the_errors_that_it_was_raised_from() -> None:
    cause = trace(("save.py", "write", "f.write(x)"), error="OSError: [Errno 28] No space left on device")
    traceback = cause + "\nThe above exception was the direct cause of the following exception:\n\n"
    traceback += trace(("train.py", "main", "save()"), error="RuntimeError: it did not work")
    assert find_error("builtins.RuntimeError", "it did not work", traceback).kind is Kind.DISK_FULL
    assert find_error("builtins.RuntimeError", "it did not work", "").kind is Kind.UNKNOWN


def test_of_a_huge_log_the_beginning_and_the_end_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "HEAD", 1000)
    monkeypatch.setattr(search, "TAIL", 1000)
    filler = "one more request was answered\n" * 1000
    full = "OSError: [Errno 28] No space left on device\n"
    for log, seen in ((full + filler, True), (filler + full, True), (filler + full + filler, False)):
        assert (find(log) is not None) is seen


@pytest.mark.parametrize(
    "line", ["Error " * 50_000, "│ | # > - " * 50_000, "a" * 500_000, " " * 500_000, "(" * 100_000]
)
def test_no_line_slows_the_reader_down(line: str) -> None:
    """Only the start of a line is read; otherwise the test would hang."""
    assert find(line) is None


_AT_EXIT = trace(
    (f"{SITE}/vllm/entrypoints/llm.py", "__del__", "import os"),
    error="ImportError: sys.meta_path is None, Python is likely shutting down",
)


@pytest.mark.parametrize(
    "first", ["Exception ignored in: <function LLM.__del__ at 0x7f2a>", "Error in atexit._run_exitfuncs:"]
)
def test_an_error_that_python_ignores_is_no_cause(first: str) -> None:
    """Interpreters that shut down print such errors after the real one."""
    ignored = f"{first}\n{_AT_EXIT}"
    later = "\nDuring handling of the above exception, another exception occurred:\n\n"
    timeout = "[rank0]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n"
    assert kind_of(timeout + ignored) is Kind.COLLECTIVE_HANG
    assert kind_of(ignored + later + _AT_EXIT) is None
    assert kind_of(f"{first}\n") is None
    # The next one ends the program, also if the ignored one is cut off, or was not printed at all.
    lines = ignored.splitlines(keepends=True)
    for before in (ignored, "".join(lines[:-1]), f"{first}\nerror: no details\n"):
        assert kind_of(before + _AT_EXIT) is Kind.IMPORT_ERROR
    # What the machine lacks counts wherever it is noticed.
    assert kind_of(f"{first}\nOSError: [Errno 28] No space left on device\n") is Kind.DISK_FULL


@pytest.mark.parametrize(
    "line",
    [
        "libibverbs: Warning: couldn't load driver 'libhfi1verbs-rdmav34.so': libhfi1verbs-rdmav34.so: cannot open "
        "shared object file: No such file or directory",
        "ERROR: ld.so: object 'libtcmalloc.so.4' from LD_PRELOAD cannot be preloaded (cannot open shared object file): "
        "ignored.",
        "[n1:3311] mca_base_component_repository_open: unable to open mca_btl_openib: librdmacm.so.1: cannot open "
        "shared object file: No such file or directory (ignored)",
        "/usr/bin/ld: cannot find -laio: No such file or directory",
        "bash: line 1: ulimit: max locked memory: cannot modify limit: Operation not permitted",
        "cat: /sys/class/infiniband/mlx5_0/ports/1/rate: No such file or directory",
    ],
)
def test_what_a_node_lacks_at_the_start_does_not_hide_a_later_failure(line: str) -> None:
    """Ranks other than the first print no steps that would prove that it was survived."""
    assert (
        kind_of(f"{line}\n[rank3]: Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)\n")
        is Kind.COLLECTIVE_HANG
    )
    assert kind_of(line) is None


def test_a_checkpoint_that_torch_refuses_to_unpickle_is_not_damaged() -> None:
    frame = ("transformers/trainer.py", "_load_rng_state", "checkpoint_rng_state = torch.load(rng_file)")
    error = "_pickle.UnpicklingError: Weights only load failed. "
    refused = "This file can still be loaded, to do so you have two options, \x1b[1mdo those steps only if you trust it"
    assert kind_of(trace(frame, error=error + refused)) is Kind.IMPORT_ERROR
    assert kind_of(trace(frame, error=error + "In PyTorch")) is Kind.CHECKPOINT_CORRUPT


@pytest.mark.parametrize(
    ("frame", "error", "kind"),
    [
        (
            ("torch/distributed/checkpoint/filesystem.py", "write_data", "stream.write(data)"),
            "OSError: [Errno 28] No space left on device",
            Kind.DISK_FULL,
        ),
        (
            (
                "torch/distributed/checkpoint/default_planner.py",
                "create_default_local_load_plan",
                "raise RuntimeError(",
            ),
            "RuntimeError: Missing key in checkpoint state_dict: lm_head.weight.",
            Kind.CHECKPOINT_CORRUPT,
        ),
    ],
)
def test_an_error_of_distributed_checkpoints_has_the_cause_of_its_ranks(
    frame: tuple[str, str, str], error: str, kind: Kind
) -> None:
    outer = "torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])"
    inner = trace(frame, error=error).replace("last):", "last): (RANK 3)", 1)
    found = read_log(trace(("train.py", "main", "dcp.save(state)"), error=outer) + inner)
    assert found is not None
    assert (found.kind, found.message) == (kind, f"The log says: {error}")


@pytest.mark.parametrize("error", ["3: initialization error", "803: system has unsupported display driver", "999: x"])
def test_a_node_where_cuda_does_not_start_is_at_fault(error: str) -> None:
    """Other nodes may work: the run must not stop, and a retry must not come back to this one."""
    said = "Did you run some cuda functions before calling NumCudaDevices() that might have already set an error?"
    assert (
        kind_of(f"RuntimeError: Unexpected error from cudaGetDeviceCount(). {said} Error {error}\n")
        is Kind.GPU_HARDWARE
    )
