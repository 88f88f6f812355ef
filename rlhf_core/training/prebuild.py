"""The one C++ operation that DeepSpeed compiles on CPU, built before a rank needs it.

DeepSpeed builds ``deepspeed_shm_comm`` when it joins a process group on CPU: half a minute to some minutes the first
time. torch guards such builds with a lock file that nobody removes when its owner is killed, and the next process then
waits for ever. So the operation is built here: by one process of the machine, in a folder of its own that is put in
place when all is in it. Whoever is killed meanwhile leaves nothing that anybody waits for, and a folder that is there
is whole. Ranks load what is built from there (:func:`load_built`), without torch's lock and without asking ninja
whether it is new enough. Importing this module costs no torch.
"""

import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import psutil

from rlhf_core.errors import BuildTookTooLong, DiskFull, WorkerError

BUILD_LIMIT_S = 900.0
"""Longest time for one compilation, in seconds: ten times what a busy machine takes."""
BEAT_S = 0.2
"""How often whoever compiles or waits says so, in seconds."""

Progress = Callable[[str], None]
"""Called about every ``BEAT_S`` from the caller's thread, with what is being done: a sign of life."""

_OPERATION = "deepspeed_shm_comm"
_STAMP = "built_for.json"
_COMPILE = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder as B; B().load(verbose=False)"
_TELLING = re.compile(r"error\b|undefined reference|cannot find|No space left|quota exceeded|\bKilled\b", re.I)


def prebuild(progress: Progress = lambda doing: None) -> str:
    """Build the operation unless it is there already; returns the folder it lies in.

    Idempotent, and safe when several processes call it at once: one builds, the others wait. Every rank calls it before
    it touches DeepSpeed; when all is built it costs about a millisecond. The folder is ``TORCH_EXTENSIONS_DIR`` if set,
    else one in the user's cache.

    Args:
        progress: Told what is being done while it takes time.

    Raises:
        WorkerError: there is no C++ compiler, or the compilation failed; with the compiler's words.
        DiskFull: there is no room for it.
        BuildTookTooLong: the compilation, here or in the process that was waited for, took longer than
            ``BUILD_LIMIT_S``; it may well be there the next time.
    """
    use_own_scripts()
    folder = extensions_dir() / _OPERATION
    if _is_built(folder):
        return str(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _turn(folder.parent / f".{_OPERATION}.prebuild", progress):
        if not _is_built(folder):
            _build(folder, progress)
    return str(folder)


def load_built() -> None:
    """Give DeepSpeed the operation that is built, so that it neither compiles it nor looks whether it has to.

    To be called after :func:`prebuild`, before DeepSpeed joins a process group.
    """
    from deepspeed.ops.op_builder.builder import OpBuilder

    loaded = getattr(OpBuilder, "_loaded_ops", None)
    if loaded is None or _OPERATION in loaded:  # a DeepSpeed that keeps none finds what is built by itself
        return
    library = extensions_dir() / _OPERATION / f"{_OPERATION}.so"
    spec = importlib.util.spec_from_file_location(_OPERATION, library)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded[_OPERATION] = module


def extensions_dir() -> Path:
    """Where torch keeps compiled operations; made explicit in the environment, so that all processes agree on it.

    One folder for each Python environment: what one has compiled is not for the torch of another.
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


def _versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "deepspeed")}


def _is_built(folder: Path) -> bool:
    if not (folder / f"{_OPERATION}.so").is_file():
        return False
    try:
        return bool(json.loads((folder / _STAMP).read_bytes()) == _versions())
    except (OSError, ValueError):
        return False


# ---------------------------------------------------------------------------------------------------------------------
# One after the other


@contextlib.contextmanager
def _turn(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock that the operating system frees when its owner dies; who has it stands in the file.

    Where the file system has no locks, everybody builds: that costs time, and nothing else.
    """
    with path.open("a+") as file:
        if _acquire(file, progress):
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield


def _acquire(file: IO[str], progress: Progress) -> bool:
    holder, since_s = "", time.monotonic()
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        except OSError:
            return False
        file.seek(0)
        now = file.read()
        if now != holder:
            holder, since_s = now, time.monotonic()
        # It ends its own compilation by then; one that does not has been stopped.
        if time.monotonic() - since_s > BUILD_LIMIT_S + 60:
            raise BuildTookTooLong(
                f"{_OPERATION} was waited for longer than {BUILD_LIMIT_S:.0f} s: {holder or 'another process'} holds "
                f"{file.name} and does not finish; if it has been stopped, end it"
            )
        progress(f"waiting for {holder or 'another process'} to compile DeepSpeed's operation {_OPERATION}")
        time.sleep(BEAT_S)


# ---------------------------------------------------------------------------------------------------------------------
# Compiling


def _build(folder: Path, progress: Progress) -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise WorkerError(
            f"DeepSpeed compiles one small operation on CPU and found no C++ compiler ({compiler}); "
            f"install one (Debian, Ubuntu: apt-get install g++) or name it in CXX"
        )
    mark = f".{_OPERATION}.building-{socket.gethostname()}-"
    for left in folder.parent.glob(f"{mark}*"):
        owner = left.name.removeprefix(mark).partition("-")[0]
        if not owner.isdigit() or not _is_at_work(int(owner)):
            shutil.rmtree(left, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=f"{mark}{os.getpid()}-", dir=folder.parent))
    try:
        _compile(scratch, progress)
        built = scratch / _OPERATION
        (built / _STAMP).write_text(json.dumps(_versions()), encoding="utf-8")
        _put_in_place(built, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _is_at_work(pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False


def _compile(scratch: Path, progress: Progress) -> None:
    """Have DeepSpeed compile into a folder, in a process of its own: this one goes on saying that it is alive."""
    environment = os.environ | {"TORCH_EXTENSIONS_DIR": str(scratch), "DS_ACCELERATOR": "cpu"}
    deadline = time.monotonic() + BUILD_LIMIT_S
    with (scratch / "said.txt").open("w+b") as said:
        process = subprocess.Popen([sys.executable, "-P", "-c", _COMPILE], env=environment, stdout=said, stderr=said)
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise BuildTookTooLong(
                        f"DeepSpeed's operation {_OPERATION} was not compiled within {BUILD_LIMIT_S:.0f} s; "
                        f"is the machine overloaded, or {scratch.parent} on a file system that does not answer?"
                    )
                progress(f"compiling DeepSpeed's operation {_OPERATION}, once for this environment")
                time.sleep(BEAT_S)
        finally:
            _end(process)
        said.seek(0)
        words = said.read().decode(errors="replace")
    if process.returncode != 0 or not (scratch / _OPERATION / f"{_OPERATION}.so").is_file():
        raise _failure(scratch.parent, words)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End it with the compilers that it has started."""
    if process.poll() is None:
        with contextlib.suppress(psutil.Error):
            for child in psutil.Process(process.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    child.kill()
        process.kill()
        process.wait()


def _failure(place: Path, words: str) -> WorkerError:
    # Before it stand torch's own frames; behind it, what ninja and the compiler said.
    words = words.rpartition("Error building extension")[2]
    lines = [line.strip() for line in words.splitlines() if _TELLING.search(line)]
    first = next(iter(lines), "it ended without a word")
    message = f"DeepSpeed's operation {_OPERATION} could not be compiled: {first[:300]}\n"
    message += f"in {place}; the end of what was said:\n{words[-3000:]}"
    is_full = re.search(r"No space left on device|quota exceeded", words, re.I)
    return DiskFull(message) if is_full else WorkerError(message)


def _put_in_place(built: Path, folder: Path) -> None:
    """A folder appears whole. What was there before was for other versions, or never finished."""
    with contextlib.suppress(FileNotFoundError):
        folder.rename(built.parent / "old")
    try:
        built.rename(folder)
    except OSError:
        # Where there are no locks, another one may have been faster.
        if not _is_built(folder):
            raise
