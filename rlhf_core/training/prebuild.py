"""The one C++ operation that DeepSpeed compiles on CPU, built before a rank needs it.

DeepSpeed builds ``deepspeed_shm_comm`` when it joins a process group on CPU: half a minute to two minutes the first
time. torch guards such builds with a lock file that nobody removes when its owner is killed, and the next rank then
waits for ever. So the operation is built once, here, and a lock without an owner is removed first. Importing this
module costs no torch.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import io
import json
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.errors import WorkerError

_OPERATION = "deepspeed_shm_comm"
_STAMP = "built_for.json"


def prebuild() -> str:
    """Build the operation unless it is there already; returns the folder it lies in.

    Idempotent, and safe when several processes of this machine call it at once: one builds, the others wait. Every rank
    calls it before it touches DeepSpeed; when all is built it costs about a millisecond. The folder is
    ``TORCH_EXTENSIONS_DIR`` if set, else one in the user's cache; on a cluster it should be local to the node, because
    the owner of a lock can be seen only on its own machine.

    Raises:
        WorkerError: there is no C++ compiler, or the compilation failed.
    """
    use_own_scripts()
    folder = extensions_dir() / _OPERATION
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder.parent / f".{_OPERATION}.prebuild"):
        clear_stale_lock(folder / "lock")
        if not _is_built(folder):
            _build(folder)
    return str(folder)


def extensions_dir() -> Path:
    """Where torch keeps compiled operations; made explicit in the environment, so that all processes agree on it.

    One folder for each Python environment. ninja compares whole command lines, paths and its own version included: two
    environments that shared a folder would compile the operation again at every change of hands, inside a rank.
    """
    if not os.environ.get("TORCH_EXTENSIONS_DIR"):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        environment = hashlib.sha256(sys.prefix.encode()).hexdigest()[:8]
        python = f"py{sys.version_info.major}{sys.version_info.minor}"
        tag = f"{python}_torch{importlib.metadata.version('torch')}_{environment}"
        os.environ["TORCH_EXTENSIONS_DIR"] = str(cache / "torch_extensions" / tag)
    return Path(os.environ["TORCH_EXTENSIONS_DIR"])


def use_own_scripts() -> None:
    """Put this interpreter's scripts on PATH, where torch looks for ``ninja``: started by its full path it has not."""
    scripts = sysconfig.get_path("scripts")
    folders = os.environ.get("PATH", "").split(os.pathsep)
    if scripts not in folders:
        os.environ["PATH"] = os.pathsep.join([scripts, *folders])


def clear_stale_lock(lock: Path) -> bool:
    """Remove torch's lock file if no process of this machine holds it open; True when one was removed.

    A living owner always has the file open, and a file that is no longer open is never opened again (it is only ever
    created), so what was seen cannot become wrong afterwards.
    """
    try:
        found = lock.stat()
    except FileNotFoundError:
        return False
    if _has_owner(found.st_dev, found.st_ino):
        return False
    with contextlib.suppress(FileNotFoundError):
        now = lock.stat()
        if (now.st_dev, now.st_ino) == (found.st_dev, found.st_ino):
            lock.unlink()
            return True
    return False


def _has_owner(device: int, inode: int) -> bool:
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    found = descriptor.stat()
                    if (found.st_dev, found.st_ino) == (device, inode):
                        return True
    return False


@contextlib.contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a lock that the operating system frees when its owner dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}


def _is_built(folder: Path) -> bool:
    if not (folder / f"{_OPERATION}.so").is_file():
        return False
    try:
        return bool(json.loads((folder / _STAMP).read_bytes()) == _versions())
    except (OSError, ValueError):
        return False


def _build(folder: Path) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise WorkerError(
            f"DeepSpeed compiles one small operation on CPU and found no C++ compiler ({compiler}); "
            f"install one (Debian, Ubuntu: apt-get install g++) or name it in CXX"
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

            ShareMemCommBuilder().load(verbose=False)
    except (RuntimeError, ImportError, OSError) as error:
        raise WorkerError(
            f"DeepSpeed's operation {_OPERATION} could not be compiled in {folder}: {error}\n{said.getvalue()[-2000:]}"
        ) from error
    (folder / _STAMP).write_text(json.dumps(_versions()), encoding="utf-8")
