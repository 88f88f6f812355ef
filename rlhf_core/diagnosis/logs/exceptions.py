"""Kinds of failure by error class and error number, independent of the message.

A class is looked up by its full name, then by its own name, then by its library. General classes (``ValueError``,
``RuntimeError`` ...) are not included: their message and location decide.
"""

import re
from dataclasses import dataclass

from rlhf_core.diagnosis.logs.events import EvidencePart, FailureEvent
from rlhf_core.schemas.failures import FailureKind as Kind


@dataclass(frozen=True, slots=True)
class Meaning:
    """Meaning of a class or number: kind and part."""

    kind: Kind
    part: EvidencePart

    def event(self, rule: str) -> FailureEvent:
        """Make the event of a line that shows it."""
        return FailureEvent(self.kind, self.part, rule)


def _all(kind: Kind, part: EvidencePart, names: str) -> dict[str, Meaning]:
    return {name: Meaning(kind, part) for name in names.split()}


CLASSES: dict[str, Meaning] = {
    # Packages that are missing, too old, or built for something else.
    **_all(
        Kind.IMPORT_ERROR,
        EvidencePart.ROOT,
        "ImportError ModuleNotFoundError PackageNotFoundError DistributionNotFound VersionConflict UnknownExtra "
        "ContextualVersionConflict MissingCUDAException CUDAMismatchException CompilationError PTXASError "
        "OutOfResources",
    ),
    # Data and tokenizers.
    **_all(
        Kind.DATA,
        EvidencePart.ROOT,
        "JSONDecodeError UnicodeDecodeError DatasetGenerationError DatasetGenerationCastError DatasetNotFoundError "
        "DatasetsNotFoundError DataFilesNotFoundError EmptyDatasetError ArrowInvalid ArrowTypeError "
        "ArrowNotImplementedError UnidentifiedImageError CastError EmptyDataError TemplateError UndefinedError "
        "TemplateSyntaxError TemplateRuntimeError SchemaInferenceError NonMatchingSplitsSizesError "
        "ExpectedMoreSplitsError DecompressionBombError DataError BadGzipFile pandas.errors.ParserError",
    ),
    **_all(Kind.SHAPE, EvidencePart.ROOT, "EinopsError ShapeError ShapeMismatchError BroadcastError"),
    # Settings.
    **_all(
        Kind.CONFIG,
        EvidencePart.ROOT,
        "ValidationError ConfigAttributeError ConfigKeyError ConfigTypeError ConfigIndexError ConfigValueError "
        "ConfigCompositionException MissingConfigException OverrideParseException InterpolationKeyError "
        "InterpolationResolutionError MissingMandatoryValue ScannerError yaml.parser.ParserError ComposerError "
        "ConstructorError TOMLDecodeError DeepSpeedConfigError ConfigError ConfigurationError InvalidConfigError "
        "BadConfig MisconfigurationException HFValidationError ArgumentError ArgumentTypeError RepositoryNotFoundError "
        "GatedRepoError EntryNotFoundError RevisionNotFoundError OfflineModeIsEnabled UsageError AuthenticationError "
        "BadParameter MissingParameter NoSuchOption UnsupportedOperation",
    ),
    **_all(Kind.CONFIG, EvidencePart.SYMPTOM, "FileNotFoundError PermissionError NotADirectoryError IsADirectoryError"),
    # Memory.
    **_all(
        Kind.HOST_OOM,
        EvidencePart.ROOT,
        "MemoryError _ArrayMemoryError ArrayMemoryError ray.exceptions.OutOfMemoryError ObjectStoreFullError",
    ),
    **_all(Kind.CUDA_OOM, EvidencePart.ROOT, "OutOfMemoryError CudaOutOfMemoryError OutOfMemoryException"),
    # Files.
    **_all(Kind.DISK_FULL, EvidencePart.ROOT, "OutOfDiskError DiskFullError"),
    **_all(
        Kind.FILE_SYSTEM, EvidencePart.ROOT, "FileExistsError BlockingIOError filelock.Timeout filelock._error.Timeout"
    ),
    **_all(
        Kind.CHECKPOINT_CORRUPT,
        EvidencePart.ROOT,
        "UnpicklingError SafetensorError CheckpointingException",
    ),
    # Numbers.
    **_all(Kind.NON_FINITE, EvidencePart.ROOT, "FloatingPointError NonFiniteLossError NanLossDuringTrainingError"),
    # Rendezvous of ranks, and connections between them.
    **_all(Kind.RENDEZVOUS, EvidencePart.ROOT, "gaierror"),
    **_all(
        Kind.RENDEZVOUS,
        EvidencePart.SYMPTOM,
        "RendezvousTimeoutError RendezvousConnectionError RendezvousClosedError RendezvousStateError "
        "RendezvousGracefulExitError RendezvousError DistNetworkError DistStoreError",
    ),
    **_all(Kind.NODE_LOST, EvidencePart.ROOT, "NodeDiedError NodeNotReadyError"),
    **_all(
        Kind.NETWORK,
        EvidencePart.CASCADE,
        "ConnectionResetError ConnectionAbortedError ConnectionRefusedError BrokenPipeError EOFError ConnectionError "
        "DistBackendError RemoteDisconnected RpcError IncompleteReadError",
    ),
    # Engines.
    **_all(
        Kind.ENGINE,
        EvidencePart.CASCADE,
        "EngineDeadError EngineCoreError AsyncEngineDeadError MQEngineDeadError EngineGenerateError VLLMException",
    ),
    # Actions of the user.
    **_all(Kind.USER_CANCEL, EvidencePart.SYMPTOM, "KeyboardInterrupt"),
}
"""Kinds by full class name, or by the class alone."""

# fmt: off
WRAPPERS = frozenset((
    "RayTaskError", "RayActorError", "ActorDiedError", "ActorUnavailableError", "WorkerCrashedError",
    "ChildFailedError", "ProcessRaisedException", "ProcessExitedException", "CalledProcessError", "SignalException",
    "BrokenProcessPool", "RemoteTraceback", "InstantiationException", "SystemExit", "ExceptionGroup",
    "TimeoutExpired", "RayError", "LocalRayletDiedError", "OwnerDiedError", "TaskCancelledError",
    "UserCodeException", "CheckpointException",
))
# fmt: on
"""Classes that wrap another error; the inner error decides, wherever it was printed."""

SERVICE_ERRORS = re.compile(
    r"(?:wandb|swanlab|mlflow|comet_ml|openai|anthropic|huggingface_hub|urllib3|requests|httpx|httpcore|aiohttp|botocore|urllib)\."
    r"|(?:MaxRetryError|ConnectTimeout(?:Error)?|ReadTimeout(?:Error)?|NewConnectionError|SSLError|ProxyError|HTTPError"
    r"|ProtocolError|NameResolutionError|LocalEntryNotFoundError|CommError|HfHubHTTPError|RateLimitError|APIConnectionError"
    r"|ServerTimeoutError|ClientConnectorError|ClientError|APITimeoutError|InternalServerError|RemoteProtocolError|ConnectError)$"
)
"""Errors of a service outside the job (a hub, a tracker, a model's API): not one of the kinds, so ``unknown``."""

_ERRNO = re.compile(r"\[Errno (-?\d+)\]|\berrno: (-?\d+)|\(os error (\d+)\)|\bcode: (\d+), kind:")
_NUMBERS: tuple[tuple[Kind, EvidencePart, tuple[int, ...]], ...] = (
    (Kind.DISK_FULL, EvidencePart.ROOT, (28, 122)),
    (Kind.FILE_SYSTEM, EvidencePart.ROOT, (5, 11, 17, 23, 24, 30, 37, 39, 70, 107, 108, 116, 117, 121)),
    # A file system without locks (Lustre), or no shared memory for those of multiprocessing.
    (Kind.FILE_SYSTEM, EvidencePart.SYMPTOM, (38,)),
    (Kind.HOST_OOM, EvidencePart.ROOT, (12,)),
    (Kind.RENDEZVOUS, EvidencePart.ROOT, (98, 99, -2, -3, -5)),
    (Kind.NETWORK, EvidencePart.SYMPTOM, (100, 101, 110, 113)),
    (Kind.NETWORK, EvidencePart.CASCADE, (32, 103, 104, 111)),
    (Kind.CONFIG, EvidencePart.SYMPTOM, (1, 2, 13, 20, 21, 36)),
)
NUMBERS: dict[int, Meaning] = {number: Meaning(kind, part) for kind, part, numbers in _NUMBERS for number in numbers}
"""Kinds by Linux error number, and by number of the resolver (negative)."""


_STATUS = re.compile(
    r"(?i:\b(?:error code|status(?:[_ ]code)?|http(?:/[\d.]+)?)[:=\" ]{1,3})(?P<after>4\d\d)\b"
    r"|\b(?P<before>4\d\d) (?:Client Error|Bad Request|Unauthorized|Forbidden|Not Found|Unprocessable)"
)
STATUSES: dict[int, Meaning] = {
    **dict.fromkeys((400, 413, 422), Meaning(Kind.DATA, EvidencePart.SYMPTOM)),
    **dict.fromkeys((401, 403, 404), Meaning(Kind.CONFIG, EvidencePart.SYMPTOM)),
}
"""HTTP statuses of permanently rejected requests. With all others, the service may be busy or broken."""


def of_class(name: str) -> FailureEvent | None:
    """Look up a class, given with or without its module; None if it is unknown."""
    for key in (name, name.rpartition(".")[2]):
        if key in CLASSES:
            return CLASSES[key].event(f"class {key}")
    # With only the end of its module, such as "parser.ParserError" of yaml.
    ends = (key for key in CLASSES if "." in name and key.endswith(f".{name}"))
    return next((CLASSES[key].event(f"class {key}") for key in ends), None)


def of_number(message: str) -> FailureEvent | None:
    """Look up the error number in a message."""
    found = _ERRNO.search(message)
    if found is None:
        return None
    number = int(next(group for group in found.groups() if group))
    meaning = NUMBERS.get(number)
    return meaning.event(f"errno {number}") if meaning is not None else None


def of_status(message: str) -> FailureEvent | None:
    """Look up the HTTP status in the message of a service's error."""
    found = _STATUS.search(message)
    if found is None:
        return None
    status = int(found["after"] or found["before"])
    meaning = STATUSES.get(status)
    return meaning.event(f"HTTP status {status}") if meaning is not None else None
