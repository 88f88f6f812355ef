"""SGLang's HTTP server in a child process of the engine, reachable only from this host.

Written for SGLang 0.5.23 (``srt/entrypoints/http_server.py``, ``srt/managers/io_struct.py``). It has never been run
with SGLang itself, which needs GPUs: the tests use a stand-in with the same API.
"""

import json
import math
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rlhf_core.errors import WorkerError
from rlhf_core.files.private import write_new
from rlhf_core.schemas.rollouts import SglangSettings

PROGRAM = (sys.executable, "-P", "-m", "sglang.launch_server")
HOST = "127.0.0.1"
POLL_S = 0.2
ANSWER_TIMEOUT_S = 10.0
SPARE_TOKENS = 8
"""Context beyond the longest sequence. SGLang reserves some: it limits new tokens to ``max_req_len - len(prompt) - 1``,
where ``max_req_len`` is the context length - 1 (``Scheduler``), and refuses requests that would fill the context."""


class SglangServer:
    """The server and its API key. It ends with the processes of the engine."""

    def __init__(
        self, folder: Path, settings: SglangSettings, *, dtype: str, max_tokens: int, seed: int, scratch: Path
    ) -> None:
        """Start it with random weights; :meth:`wait` until it responds.

        Args:
            folder: Hugging Face folder with the configuration of the model.
            max_tokens: longest sequence, prompt and completion together.
            scratch: folder used only by this engine.
        """
        key, port = secrets.token_hex(16), _free_port()
        self.url, self.headers = f"http://{HOST}:{port}", {"Authorization": f"Bearer {key}"}
        arguments: dict[str, object] = {
            "model-path": str(folder),
            "load-format": "dummy",
            "skip-tokenizer-init": True,
            "dtype": dtype,
            "context-length": _context_length(folder, max_tokens),
            "mem-fraction-static": settings.gpu_memory_share,
            "disable-radix-cache": not settings.prefix_caching,
            # Without it SGLang ignores the seeds of requests.
            "enable-deterministic-inference": True,
            "random-seed": seed,
            "host": HOST,
            "port": port,
            "api-key": key,
            "log-level": "warning",
        }
        # In a file: other users of the host can read command lines. JSON is valid YAML.
        config = scratch / "sglang.yaml"
        config.unlink(missing_ok=True)
        write_new(config, json.dumps(arguments))
        self._process = subprocess.Popen([*PROGRAM, "--config", str(config)])

    def wait(self, beat: Callable[[], None]) -> None:
        """Wait until it responds.

        Raises:
            WorkerError: it has ended.
        """
        while True:
            beat()
            if self.exit_code is not None:
                raise WorkerError("the SGLang server ended before it responded; see its log")
            try:
                answer = httpx.get(
                    f"{self.url}/health", headers=self.headers, timeout=ANSWER_TIMEOUT_S, trust_env=False
                )
            except httpx.HTTPError:
                pass
            else:
                if answer.status_code == httpx.codes.OK:
                    return
            time.sleep(POLL_S)

    @property
    def exit_code(self) -> int | None:
        """Exit code of its process, negative for a signal; None while it is running."""
        return self._process.poll()


def _context_length(folder: Path, max_tokens: int) -> int:
    """Context length for the longest sequence; SGLang refuses more than the model has positions for."""
    positions = json.loads((folder / "config.json").read_text()).get("max_position_embeddings") or math.inf
    return int(min(max_tokens + SPARE_TOKENS, positions))


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as taken:
        port: int = taken.getsockname()[1]
        return port
