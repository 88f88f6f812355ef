"""Messages of libraries, of containers and of Slurm that were read as another kind, or as no failure at all. The
excerpts are our own, after messages in public issues of these libraries.
"""

import pytest
from made_tracebacks import kind_of, trace

from rlhf_core.diagnosis.classify import read_log
from rlhf_core.diagnosis.logs.search import find_error
from rlhf_core.schemas.failures import FailureKind as Kind

SITE = "/opt/conda/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("RuntimeError: can't start new thread", Kind.UNKNOWN),
        ("OpenBLAS blas_thread_init: pthread_create failed for thread 7 of 64", Kind.UNKNOWN),
        ("Unable to determine the device handle for GPU0000:4E:00.0: Unknown Error", Kind.GPU_HARDWARE),
        ("nvidia-container-cli: initialization error: nvml error: driver not loaded", Kind.GPU_HARDWARE),
        ("Message: The node was low on resource: memory.", Kind.HOST_OOM),
        ("The node was low on resource: ephemeral-storage.", Kind.DISK_FULL),
        ("n1:7:9 [0] misc/ibvwrap.cc:190 NCCL WARN Call to ibv_reg_mr failed: Cannot allocate memory", Kind.NETWORK),
        ("slurmstepd: error: pyxis: failed to import docker image", Kind.UNKNOWN),
        ("srun: fatal: Can not execute train.sh", Kind.UNKNOWN),
        ("docker: Error response from daemon: OCI runtime create failed: exit status 1", Kind.UNKNOWN),
        ("srun: error: Invalid --distribution specification", Kind.CONFIG),
        ("sbatch: fatal: --mem and --mem-per-cpu are mutually exclusive.", Kind.CONFIG),
        ("Could not append to config. An item is already at 'trainer.logger'.", Kind.CONFIG),
        ("ValueError: You must specify exactly one of input_ids or inputs_embeds", Kind.CONFIG),
        ("ValueError: You can't train a model that has been loaded in 8-bit precision with FSDP", Kind.CONFIG),
        ("Exception: data did not match any variant of untagged enum ModelWrapper at line 9", Kind.IMPORT_ERROR),
        ("AttributeError: 'SFTArguments' object has no attribute 'packing'", Kind.IMPORT_ERROR),
        ("/usr/bin/ld: cannot find -lcuda: No such file or directory", Kind.IMPORT_ERROR),
        ("main.c:4:10: fatal error: Python.h: No such file or directory", Kind.IMPORT_ERROR),
        (
            "subprocess.CalledProcessError: Command '['/usr/bin/gcc', 'main.c', '-O3']' had non-zero exit status 1.",
            Kind.IMPORT_ERROR,
        ),
        ("RuntimeError: Failed to update weights: 7 of 8 engines answered", Kind.ENGINE),
    ],
)
def test_a_message_is_known_by_what_it_says_is_wrong(line: str, kind: Kind) -> None:
    assert kind_of(line) is kind


@pytest.mark.parametrize(
    ("frames", "error", "kind"),
    [
        # A file that could not be written says nothing about the checkpoints that were.
        (
            ((f"{SITE}/safetensors/torch.py", "save_file"),),
            "safetensors_rust.SafetensorError: Error while serializing: IoError(Os { code: 5, kind: Uncategorized })",
            Kind.FILE_SYSTEM,
        ),
        # Only the process that fetched samples ended; the samples may be fine.
        (
            ((f"{SITE}/torch/utils/data/dataloader.py", "_try_get_data"),),
            "RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly",
            Kind.UNKNOWN,
        ),
        (
            (("proj/rewards/maths.py", "score"),),
            "TypeError: score() got an unexpected keyword argument 'trainer_state'",
            Kind.REWARD_FUNCTION,
        ),
        (
            ((f"{SITE}/requests/adapters.py", "send"), (f"{SITE}/trl/extras/vllm_client.py", "reset_prefix_cache")),
            "requests.exceptions.ReadTimeout: the read operation timed out",
            Kind.ENGINE,
        ),
        (((f"{SITE}/trl/extras/vllm_client.py", "generate"),), "Exception: Request failed: 500", Kind.ENGINE),
        (
            ((f"{SITE}/ray/_private/worker.py", "put_object"),),
            "ray.exceptions.ObjectStoreFullError: Failed to put object 7 in object store",
            Kind.HOST_OOM,
        ),
    ],
)
def test_a_traceback_is_known_by_where_its_error_was_raised(
    frames: tuple[tuple[str, str], ...], error: str, kind: Kind
) -> None:
    assert kind_of(trace(*frames, error=error)) is kind


def test_an_error_in_samples_that_a_worker_fetched_is_still_one_of_the_data() -> None:
    frames = ((f"{SITE}/torch/utils/data/dataloader.py", "__next__"), ("proj/data/my_dataset.py", "__getitem__"))
    assert kind_of(trace(*frames, error="RuntimeError: 7")) is Kind.DATA


@pytest.mark.parametrize("line", ["OSError: [Errno 12] Cannot allocate memory", "fork: Cannot allocate memory"])
def test_memory_that_a_process_lacks_is_still_that_of_the_host(line: str) -> None:
    assert kind_of(line) is Kind.HOST_OOM


def test_the_error_of_nccl_is_quoted_rather_than_what_torch_says_after_it() -> None:
    error = "[rank4]: ncclRemoteError: A call failed possibly due to a network error"
    after = "[rank4]: [E ProcessGroupNCCL.cpp:1182] [Rank 4] Some NCCL operations have failed or timed out."
    for log in (f"{error}\n{after}\n", f"{after}\n{error}\n"):
        found = read_log(log)
        assert found is not None
        assert "ncclRemoteError" in found.message
    assert kind_of(after) is Kind.NETWORK


CUDA_ERROR = "unhandled cuda error\nncclUnhandledCudaError: x"


@pytest.mark.parametrize(
    ("brief", "last", "kind"),
    [
        (CUDA_ERROR, "Failed to CUDA calloc async 608 bytes", Kind.CUDA_OOM),
        (CUDA_ERROR, "Cuda failure 700 'an illegal memory access was encountered'", Kind.ILLEGAL_ACCESS),
        (CUDA_ERROR, "Cuda failure 7", Kind.NETWORK),
        ("invalid usage\nncclInvalidUsage: x", "Duplicate GPU detected : rank 1 and rank 0 both on CUDA", Kind.CONFIG),
    ],
)
def test_what_nccl_says_last_explains_its_error(brief: str, last: str, kind: Kind) -> None:
    """In an outcome, which is one text, as in a log, which is read line by line."""
    message = f"NCCL error in: NCCLUtils.cpp:77, {brief}.\nLast error:\n{last}"
    frames = trace(("train.py", "step"), error=f"torch.distributed.DistBackendError: {message}")
    assert find_error("torch.distributed.DistBackendError", message, frames).kind is kind
    assert kind_of(frames) is kind


def test_an_error_of_slurm_about_an_option_is_no_other_start_of_the_command() -> None:
    """Only those of argparse are: a file may hold several starts."""
    slurm = "srun: error: Invalid --gpu-bind specification: 7\n"
    other = "train.py: error: unrecognized arguments: --x\n"
    error = trace(("train.py", "main"), error="KeyboardInterrupt")
    assert kind_of(slurm + error) is Kind.CONFIG
    assert kind_of(other + error) is Kind.USER_CANCEL


def test_the_limit_of_threads_is_quoted_rather_than_what_it_did_to_other_ranks() -> None:
    closed = "[rank1]: ncclRemoteError: A call failed possibly due to a network error\n"
    assert kind_of(closed + "RuntimeError: can't start new thread\n") is Kind.UNKNOWN
    assert kind_of(closed) is Kind.NETWORK


def test_steps_of_mmengine_show_that_an_error_was_survived() -> None:
    step = "07/08 10:00:0{0} - mmengine - INFO - Epoch(train) [1][{0}/100] lr: 1e-05 loss: 0.{0}\n"
    error = trace(("proj/hooks.py", "upload"), error="ConnectionResetError: [Errno 104] Connection reset by peer")
    assert kind_of(error + "".join(step.format(i) for i in range(3))) is None
    assert kind_of(error) is Kind.NETWORK
