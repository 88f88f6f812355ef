"""A trainer rank's connection to one engine."""

import contextlib
from collections.abc import AsyncIterator, Iterator

import httpx
from pydantic import BaseModel

from rlhf_core.errors import StaleWeights, WeightSyncFailed
from rlhf_core.schemas.engines import (
    CommitRequest,
    Committed,
    EngineAddress,
    EngineHealth,
    EngineRefusal,
    SampledPrompt,
    SampleRequest,
    WeightsId,
    WeightsRefused,
)
from rlhf_core.schemas.weight_sync import Offer, Receipt
from rlhf_core.training.rollouts.http_clients import response_lines
from rlhf_core.training.rollouts.weight_probe import VersionCheck, WeightProbe

CONNECT_TIMEOUT_S = 5.0
JSON = {"content-type": "application/json"}


class EngineUnusable(Exception):
    """An engine is gone, hangs, or refuses a request; the request then goes to others."""


def engine_name(rank: int) -> str:
    """Name of an engine in messages, and in the links of a weight sync."""
    return f"engine-{rank}"


class EngineClient:
    """Client of one start of an engine; calls fail if another start has replaced it."""

    def __init__(self, address: EngineAddress, token: bytes, answer_timeout_s: float) -> None:
        self.address = address
        self._headers = {"authorization": f"Bearer {token.decode()}"}
        self._url = f"http://{address.host}:{address.port}"
        self._timeout = httpx.Timeout(answer_timeout_s, connect=min(CONNECT_TIMEOUT_S, answer_timeout_s))

    @property
    def name(self) -> str:
        """Name of the engine."""
        return engine_name(self.address.rank)

    @property
    def start(self) -> tuple[int, int]:
        """Rank of the engine, and the number of this start of it."""
        return self.address.rank, self.address.generation

    # -----------------------------------------------------------------------------------------------------------------
    # Sampling

    async def health(self, http: httpx.AsyncClient) -> EngineHealth:
        """State of the engine.

        Raises:
            EngineUnusable: it does not respond in time, or has been replaced.
        """
        with self._usable("does not respond"):
            response = await http.get(f"{self._url}/health", headers=self._headers, timeout=self._timeout)
            self._require_ok(response)
            health = EngineHealth.model_validate_json(response.content)
        if (health.rank, health.generation) != (self.address.rank, self.address.generation):
            raise EngineUnusable(f"start {health.generation} of engine {health.rank} responds instead of {self.name}")
        return health

    async def sample(self, http: httpx.AsyncClient, request: SampleRequest) -> AsyncIterator[SampledPrompt]:
        """Yield completions of prompts, each as soon as it is ready.

        Raises:
            EngineUnusable: it refuses the request, or is lost while serving it.
        """
        url, body = f"{self._url}/sample", request.model_dump_json()
        # No timeout: health checks detect an engine that no longer works.
        unlimited = httpx.Timeout(None, connect=self._timeout.connect)
        with self._usable("was lost"):
            async with http.stream(
                "POST", url, content=body, headers={**self._headers, **JSON}, timeout=unlimited
            ) as response:
                if response.status_code != httpx.codes.OK:
                    await response.aread()
                self._require_ok(response)
                async for line in response_lines(response):
                    yield _sampled(line, self.name)

    @contextlib.contextmanager
    def _usable(self, loss: str) -> Iterator[None]:
        """Name errors in the block as those of this engine; one of the connection is such a loss."""
        try:
            yield
        except (httpx.HTTPError, OSError) as error:
            raise EngineUnusable(f"{self.name} {loss}: {_shown(error)}") from error
        except ValueError as error:
            raise EngineUnusable(f"{self.name} sent an answer that is not valid: {_shown(error)}") from error

    def _require_ok(self, response: httpx.Response) -> None:
        if response.status_code != httpx.codes.OK and (refusal := _refusal_of(response)) is not None:
            raise EngineUnusable(f"{self.name} refuses: {refusal.error}")

    # -----------------------------------------------------------------------------------------------------------------
    # Weights

    def request(self, http: httpx.Client, method: str, path: str, body: str | None = None) -> str:
        """Send a request; while a slow one is processed, the engine sends heartbeats.

        Raises:
            OSError: the engine is gone or does not respond.
            WeightSyncFailed: it refuses the request.
        """
        url, headers = f"{self._url}{path}", self._headers if body is None else {**self._headers, **JSON}
        try:
            response = http.request(method, url, content=body, headers=headers, timeout=self._timeout)
        except httpx.HTTPError as error:
            raise ConnectionError(f"{self.name} does not respond: {_shown(error)}") from error
        refusal = _refusal_of(response)
        if refusal is not None:
            raise WeightSyncFailed(f"{self.name}: {refusal.error}", refusal.peer or self.name)
        return response.text


class HttpEngineControl:
    """Control channel to one engine while a version is synced (``weight_sync.base.EngineControl``)."""

    def __init__(
        self,
        client: EngineClient,
        http: httpx.Client,
        weights: WeightsId,
        probe: WeightProbe,
        base: str,
        check: VersionCheck,
    ) -> None:
        """Args:
        base: digest of the adapter's base model; empty for full weights.
        """
        self._client = client
        self._http = http
        self._weights = weights
        self._probe = probe
        self._base = base
        self._check = check
        self._digest = ""
        self.is_stale = False
        """True if it has acknowledged weights that its outputs do not match."""

    @property
    def name(self) -> str:
        """Name of the engine."""
        return self._client.name

    def receive(self, offer: Offer) -> Receipt:
        """Have the engine receive a version. It gives up by itself if the transfer stalls."""
        receipt = Receipt.model_validate_json(self._post("/weights/receive", offer))
        self._digest = receipt.digest
        return receipt

    def commit(self, version: int) -> float:
        """Have the engine load the staged weights, and let it serve once its outputs match them.

        Returns:
            Seconds of loading.

        Raises:
            WeightSyncFailed: its outputs do not match the weights; it does not serve.
        """
        request = CommitRequest(weights=self._weights, probe=self._probe.tokens)
        committed = Committed.model_validate_json(self._post("/weights/commit", request))
        try:
            self._require_match(committed)
        except StaleWeights as error:
            self.is_stale = True
            # An engine that is gone by now does not serve requests either.
            with contextlib.suppress(OSError, WeightSyncFailed):
                self._post("/weights/refuse", WeightsRefused(weights=self._weights, why=str(error)))
            raise WeightSyncFailed(str(error), self.name) from error
        self._post("/weights/confirm", self._weights)
        return committed.apply_s

    def _require_match(self, committed: Committed) -> None:
        """Refuse an engine whose outputs do not match the weights that it was sent.

        Raises:
            StaleWeights: its base model, adapter or outputs differ.
        """
        if committed.base != self._base:
            raise StaleWeights(
                f"{self.name} read a different base model than the trainer: the digest of its files is "
                f"{committed.base[:16] or 'none'}, expected {self._base[:16] or 'none'}. The model folder must be the "
                "same on all nodes and unchanged since the trainers started"
            )
        if committed.num_differing:
            raise StaleWeights(
                f"{self.name} has {committed.num_differing} tensors of the adapter that differ from those sent: it did "
                "not apply this version"
            )
        found = committed.probe_logprobs
        self._check.require_applied(self._client.start, self.name, self._digest, found, self._probe)

    def abort(self, version: int) -> None:
        """Have the engine drop its staged weights."""
        self._client.request(self._http, "POST", "/weights/abort", str(version))

    def _post(self, path: str, message: BaseModel) -> str:
        return self._client.request(self._http, "POST", path, message.model_dump_json())


def _sampled(line: bytes, name: str) -> SampledPrompt:
    try:
        return SampledPrompt.model_validate_json(line)
    except ValueError:
        with contextlib.suppress(ValueError):
            raise EngineUnusable(f"{name}: {EngineRefusal.model_validate_json(line).error}") from None
        raise


def _refusal_of(response: httpx.Response) -> EngineRefusal | None:
    """Refusal sent in place of the expected response; None if there is none."""
    with contextlib.suppress(ValueError):
        return EngineRefusal.model_validate_json(response.content)
    return (
        None if response.status_code == httpx.codes.OK else EngineRefusal(error=f"HTTP status {response.status_code}")
    )


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
