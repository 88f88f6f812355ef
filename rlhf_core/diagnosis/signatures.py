"""What failures look like in text: one table of regular expressions, from log lines to kinds of failure.

A line may be the root of a failure, a symptom of one that shows itself elsewhere (a collective that timed out), a
cascade (the connection to a rank that died before) or tear-down. Roots win over symptoms and symptoms over cascades,
wherever they stand; tear-down and warnings say nothing. Within the same part the earlier line wins.

Each row holds a line in the form in which the runtime prints it; the tests hold every row to its line, and
docs/failures.md shows them. The table errs on the side of a retry: a kind that stops a run asks for words that say so.
"""

import re
from dataclasses import dataclass, replace
from enum import IntEnum

from rlhf_core.diagnosis import metric_lines
from rlhf_core.schemas.failures import FailureKind as Kind


class Part(IntEnum):
    """Which part a line plays in a failure. Lower decides over higher."""

    ROOT = 0
    SYMPTOM = 1
    CASCADE = 2
    TEARDOWN = 3
    CONTEXT = 4
    """Where in the code it was: decides only about an error that no other row knows."""


@dataclass(frozen=True)
class Signature:
    """One row of the table."""

    kind: Kind
    part: Part
    pattern: re.Pattern[str]
    """Searched in the line without its prefix (rank, process, time). A group ``node`` names the node to blame."""
    example: str
    """A line that this row knows and no earlier one does."""


@dataclass(frozen=True)
class Match:
    """A line that a signature knows."""

    kind: Kind
    part: Part
    line: str
    node: str = ""
    """Node that the line blames; empty when it names none."""


def _row(kind: Kind, part: Part, example: str, *patterns: str) -> Signature:
    return Signature(kind, part, re.compile("|".join(patterns)), example)


ROOT, SYMPTOM, CASCADE, TEARDOWN, CONTEXT = Part.ROOT, Part.SYMPTOM, Part.CASCADE, Part.TEARDOWN, Part.CONTEXT
_NODE = r"(?P<node>[\w.-]+)"
_ERROR = r"^(?:\w+\.)*"
"""Begin of the line that Python prints last: the class with its module."""

_COLUMNS = (
    "prompts?|messages|conversations?|text|input_ids|labels|chosen|rejected|question|answer|instruction|input|output|"
    "completion|content|role|images?"
)
_WRONG_SETTING = "|".join(
    (
        r"not (yet )?(supported|compatible|divisible)|incompatible with|(does|do)(es)? not support|not implemented for",
        r"(must|should|has to|needs to) be (\w+ )?(one of|divisible|set|specified|provided|greater|less|smaller)",
        r"(must|should|has to|needs to) be (larger|at least|positive|a multiple|either|between|the same as)",
        r"can ?not be (both|used|combined|set|specified|enabled)|mutually exclusive|is not a valid",
        r"invalid (value|choice|option|argument|config)|unknown (model|optimizer|scheduler|option|argument|config)",
        r"unrecognized (model|configuration|argument)|could not find|mismatch|requires? \S*(--|the|a|strategy)",
        r"please (set|specify|provide|use)",
    )
)
"""What libraries say of settings that do not fit, after the class of the error."""

SIGNATURES: tuple[Signature, ...] = (
    # What users and schedulers do. Before the noise, because some of it comes dressed as a warning.
    _row(
        Kind.NODE_LOST,
        ROOT,
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***",
        r"DUE TO NODE FAILURE|\b(NODE|BOOT)_FAIL\b|NodeDiedError|node .*marked dead|NodeNotReady",
    ),
    _row(
        Kind.NODE_LOST,
        ROOT,
        "srun: error: Node failure on n3",
        rf"error: Node failure on {_NODE}",
    ),
    _row(
        Kind.NODE_LOST,
        ROOT,
        "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection failure",
        rf"Task launch for \S+ failed on node {_NODE}",
    ),
    _row(
        Kind.NODE_LOST,
        ROOT,
        "srun: error: Nodes n3 are still not ready",
        rf"error: Nodes? {_NODE}\S* (is|are) (still )?not (ready|responding)",
    ),
    _row(
        Kind.PREEMPTION,
        ROOT,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
        r"DUE TO (PREEMPTION|JOB REQUEUE)|\bPREEMPTED\b|job (is|was|has been|will be) preempted",
        r"(?i:spot (instance )?interruption|preemption notice)",
    ),
    _row(
        Kind.TIME_LIMIT,
        ROOT,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        r"DUE TO TIME ?LIMIT|exceeded its time limit|(^|\s|=)TIMEOUT(\s+\d|\s*$)|\bDEADLINE\b(?!_)",
    ),
    _row(
        Kind.USER_CANCEL,
        SYMPTOM,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
        r"\*\*\* ?(JOB|STEP) \S+ ON \S+ CANCELLED AT|\bCANCELLED by [1-9]",
    ),
    _row(
        Kind.USER_CANCEL,
        SYMPTOM,
        "KeyboardInterrupt",
        rf"{_ERROR}KeyboardInterrupt\b",
    ),
    _row(
        Kind.USER_CANCEL,
        SYMPTOM,
        "WARNING:torch.distributed.elastic.agent.server.api:Received 2 death signal, shutting down workers",
        r"Received 2 death signal|got signal: 2\b|return code = -2\b|[Ii]nterrupted by (the )?user",
    ),
    # Tear-down: these lines hold words that would otherwise match below.
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "Sending process 17 closing signal SIGTERM",
        r"closing signal SIG",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "destroy_process_group() was not called before program exit, which can leak resources.",
        r"destroy_process_group\(\) was not called",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "resource_tracker: There appear to be 6 leaked semaphore objects to clean up at shutdown",
        r"There appear to be \d+ leaked",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
        r"CUDA_LAUNCH_BLOCKING|CUDA kernel errors might be asynchronously",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        r"Force Terminated|Job step aborted: Waiting|^Killing subprocess \d+|: Terminated$",
        r": Terminating (Step|Job)",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:",
        r"ChildFailedError|SignalException: Process \d+ got signal",
    ),
    # Warnings, and what was tried again.
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "[W socket.cpp:601] [c10d] The IPv6 addresses of (n1, 53821) cannot be retrieved (Name or service not known).",
        r"^\[?W\d* |^\[W\b|^\[?(WARN|WARNING)\b|\bWARNING[ :\]|]|\w+Warning: |\[WARN(ING)?\]",
        r"\blevel=warn",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "'(ProtocolError('Connection reset by peer'))' thrown while requesting HEAD config.json",
        r"(?i:\bretrying\b|\bretry \d+/\d+|will (be )?retr(y|ied)|thrown while requesting|retry loop)",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "FlashAttention is not there (ImportError: No module named 'flash_attn'), falling back to sdpa",
        r"(?i:fall(ing|s)? ?back to|\bskipping (it|this|the) |(is|are) optional)",
        r"(?i:can be (safely )?ignored|^Exception ignored)",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "n1:185:1027 [7] NCCL INFO [Service thread] Connection closed by localRank 0",
        r"^(INFO|DEBUG)\b|[\[|] ?(INFO|DEBUG) ?[\]|]|NCCL INFO\b| - (INFO|DEBUG) - ",
        r"\d (INFO|DEBUG)[: ]",
    ),
    _row(
        Kind.UNKNOWN,
        TEARDOWN,
        "Could not load dynamic library 'libcudart.so.11.0'; dlerror: cannot open shared object file",
        r"Could not load dynamic library|cudart_stub|NUMA node read from SysFS",
        r"Unable to register \w+ factory",
    ),
    # Memory of the host, before that of the GPU: Ray calls both OutOfMemoryError.
    _row(
        Kind.HOST_OOM,
        ROOT,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        r"oom[-_]kill|OOM[ -]?Killed|Out of memory: Killed process|[Cc]group out of memory",
        r"oom_reaper|\bOUT_OF_ME(MORY\b|\+)|Killed signal terminated program",
    ),
    _row(
        Kind.HOST_OOM,
        ROOT,
        "srun: error: n3: task 0: Out Of Memory",
        rf"error: {_NODE}: tasks? \S+ Out Of Memory",
    ),
    _row(
        Kind.HOST_OOM,
        ROOT,
        "slurmstepd: error: StepId=7.batch exceeded memory limit (734003200 > 52428800), being killed",
        r"(?i:exceeded (job |step )?memory limit)",
    ),
    _row(
        Kind.HOST_OOM,
        ROOT,
        "ray.exceptions.OutOfMemoryError: Task was killed due to the node running low on memory.",
        r"killed due to (the node running low on memory|memory pressure)",
    ),
    _row(
        Kind.HOST_OOM,
        ROOT,
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
        r"insufficient shared memory|out of shared memory",
        r"unable to (open|mmap) shared memory object|unable to write to file </torch_",
        r"killed by signal: (Killed|Bus error)",
    ),
    _row(
        Kind.HOST_OOM,
        ROOT,
        "numpy._ArrayMemoryError: Unable to allocate 23.8 GiB for an array with shape (3200000000,)",
        r"std::bad_alloc|\bCannot allocate memory\b",
        rf"{_ERROR}_?(Array)?MemoryError\b",
        r"DefaultCPUAllocator: (can't allocate|not enough) memory",
    ),
    # Memory of the GPU.
    _row(
        Kind.CUDA_OOM,
        ROOT,
        "RuntimeError: CUDA error: out of memory",
        r"(?i:\b(CUDA|HIP|NPU)( driver)?( error| failure)?:? '?(device )?out of memory)",
        r"(?i:RESOURCE_EXHAUSTED|^(\w+\.)*\w*Error: .*\bout of memory)",
    ),
    _row(
        Kind.CUDA_OOM,
        ROOT,
        "torch.OutOfMemoryError: Tried to allocate 2.00 GiB.",
        r"\bOutOfMemoryError\b",
    ),
    _row(
        Kind.CUDA_OOM,
        ROOT,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation",
        r"(CUBLAS|CUDNN|CUSOLVER)_STATUS_ALLOC_FAILED",
    ),
    _row(
        Kind.CUDA_OOM,
        ROOT,
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        r"No available memory for the cache blocks|Not enough memory\. Please try",
        r"RuntimeError: Triton Error.*out of memory",
        r"[Ff]ree memory on device .* is less than desired",
    ),
    # Hardware.
    _row(
        Kind.GPU_HARDWARE,
        ROOT,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        r"(?i:uncorrectable (NVLink|ECC)|ECCUncorrectable|NvlinkUncorrectable|double[- ]bit ECC error)",
        r"(?i:ECC error encountered)",
    ),
    _row(
        Kind.GPU_HARDWARE,
        ROOT,
        "NVRM: Xid (PCI:0000:10:1c): 64, pid=17, name=python",
        r"NVRM: Xid \(\S+\): (48|61|62|63|64|74|79|8[78]|9[245]|109|11[09]|12\d|13[67]|14\d|15[0-8])\b",
    ),
    _row(
        Kind.GPU_HARDWARE,
        ROOT,
        "NVRM: GPU has fallen off the bus and is not responding to commands.",
        r"(?i:fallen off the bus|\bGPU (is|has been) lost\b|GPU requires (a )?reset|row remap)",
        r"(?i:RmInitAdapter failed|uncorrect\w+\s*:\s*[1-9])",
    ),
    _row(
        Kind.GPU_HARDWARE,
        ROOT,
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        r"Unable to determine the device handle for (the )?gpu|(?i:error in the Fabric Manager)",
        r"system not yet initialized|hardware error|HW Exception by GPU",
    ),
    _row(
        Kind.GPU_HARDWARE,
        SYMPTOM,
        "RuntimeError: No CUDA GPUs are available",
        r"No CUDA GPUs are available|No devices were found|Found no NVIDIA driver",
        r"no CUDA-capable device|Failed to initialize NVML",
        r"CUDA(-capable device\(s\) is/are| error: .*device\(s\) is/are) busy",
    ),
    # Kernels that went wrong. A symptom, because broken hardware shows itself so too and says so in another line.
    _row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        r"an illegal (memory access|instruction) was encountered|misaligned address",
        r"unspecified launch failure",
        r"CUDA_ERROR_(ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|MISALIGNED_ADDRESS)",
        r"Memory access fault by GPU",
    ),
    _row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "Indexing.cu:1308: block: [58,0,0], thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        r"device-side assert|\.cu(h)?:\d+: .*Assertion .* failed",
        r"(CUBLAS|CUDNN)_STATUS_(EXECUTION_FAILED|INTERNAL_ERROR|MAPPING)",
        r"invalid configuration argument",
    ),
    _row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "NVRM: Xid (PCI:0000:ca:00): 31, pid=17, MMU Fault: ENGINE GRAPHICS",
        r"NVRM: Xid \(\S+\): (13|31|43|45|68|69)\b",
    ),
    # Disks and files.
    _row(
        Kind.DISK_FULL,
        ROOT,
        "OSError: [Errno 28] No space left on device: 'step_100'",
        r"No space left on device|[Qq]uota exceeded|[Nn]ot enough (free )?(disk )?space",
        r"\[Errno (28|122)\]|\bENOSPC\b|\bEDQUOT\b|StorageFull|disk is full",
    ),
    _row(
        Kind.DISK_FULL,
        ROOT,
        "RuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter failed writing file data/176",
        r"inline_container\.cc:\d+\] \. (unexpected pos|PytorchStreamWriter failed writing)",
    ),
    _row(
        Kind.FILE_SYSTEM,
        ROOT,
        "OSError: [Errno 116] Stale file handle: 'cache.arrow'",
        r"Stale (NFS )?file handle|Read-only file system|\[Errno (5|30|107|108|116|121)\]",
        r"[Tt]ransport endpoint|Input/output error|Remote I/O error|Bad message",
        r"Structure needs cleaning",
    ),
    _row(
        Kind.FILE_SYSTEM,
        ROOT,
        "LustreError: 11-0: scratch-OST0012: operation ost_read failed with -107",
        r"LustreError|nfs: server \S+ not responding|blocked for more than \d+ seconds",
        r"GPFS.*(unmounted|panic)",
    ),
    _row(
        Kind.FILE_SYSTEM,
        ROOT,
        "FileExistsError: [Errno 17] File exists: 'cache'",
        r"database is locked|FileExistsError: \[Errno 17\]|Tried reading schema message, was null",
        r"\[Errno 39\] Directory not empty|Resource temporarily unavailable: '|No locks available",
        r"\[Errno 37\]",
    ),
    _row(
        Kind.CHECKPOINT_CORRUPT,
        ROOT,
        "_pickle.UnpicklingError: pickle data was truncated",
        r"UnpicklingError|invalid load key|pickle data was truncated|PytorchStreamReader failed",
        r"SafetensorError|failed finding central directory|EOFError: Ran out of input",
        r"unexpected EOF|might be corrupted|is corrupted|storage has wrong size",
    ),
    _row(
        Kind.CHECKPOINT_CORRUPT,
        ROOT,
        "RuntimeError: Error(s) in loading state_dict for Model:",
        r"Error\(s\) in loading state_dict|^\s*(- )?size mismatch for \S+: copying a param",
        r"(Missing|Unexpected) key\(s\) in state_dict|doesn't match the (model|optimizer) state",
        r"Missing key in checkpoint|[Ss]ize mismatch between saved|KeyError: MetadataIndex",
        r"CheckpointException|loaded state dict contains a parameter group",
    ),
    _row(
        Kind.CHECKPOINT_CORRUPT,
        ROOT,
        "ValueError: checkpoint step_100 is corrupt",
        r"(?i:(checkpoint|shard|weights?)( file| folder)? \S* ?(is|are|may be) (corrupt|damaged|truncated))",
        r"(?i:corrupt(ed)? (checkpoint|safetensors)|checksum mismatch)",
    ),
    # Collectives.
    _row(
        Kind.COLLECTIVE_MISMATCH,
        ROOT,
        "RuntimeError: Detected mismatch between collectives on ranks.",
        r"Detected mismatch between collectives",
        r"(?i:mismatch\w* (between )?collective|collectives? mismatch)",
        r"(TYPE|DTYPE|SYNTAX|STATE)_MISMATCH|Message truncated : received",
        r"op\.preamble\.length <= op\.nbytes|DDP expects same model across all ranks",
    ),
    _row(
        Kind.COLLECTIVE_HANG,
        SYMPTOM,
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out",
        r"[Nn]ot all ranks (are )?join",
    ),
    _row(
        Kind.COLLECTIVE_HANG,
        SYMPTOM,
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        r"Timed out waiting \d+ms for (recv|send|all)|\bWait timeout\b",
        r"Timeout at (NCCL work|collective)|lagging/dead/mismatched ranks|monitoredBarrier",
        r"heartbeat monitor.* (timed out|stuck)|watchdog got stuck",
    ),
    # Finding each other.
    _row(
        Kind.RENDEZVOUS,
        ROOT,
        "OSError: [Errno 98] Address already in use",
        r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address",
        r"\[Errno (98|99)\]|Cannot assign requested address",
        r"[Pp]ort \d+ is (already )?(in use|used|occupied)",
    ),
    _row(
        Kind.RENDEZVOUS,
        ROOT,
        "socket.gaierror: [Errno -2] Name or service not known",
        r"Name or service not known|[Nn]ame resolution|gaierror|getaddrinfo failed",
        r"nodename nor servname|No address associated",
    ),
    _row(
        Kind.RENDEZVOUS,
        SYMPTOM,
        "torch.distributed.elastic.rendezvous.api.RendezvousConnectionError: see the inner exception",
        r"Rendezvous(Timeout|Connection|Closed|State|Graceful)\w*Error",
        r"connection to the C10d store has failed",
    ),
    _row(
        Kind.RENDEZVOUS,
        SYMPTOM,
        "RuntimeError: connect() timed out. Original timeout was 60000 ms.",
        r"connectFullMesh failed|client socket has (timed out|failed to connect)",
        r"wait timeout after \d+ms, keys|waiting for (clients|workers)\. |connect\(\) timed out",
        r"Error: Socket Timeout",
    ),
    # Engines. What they say about the GPU's memory is above.
    _row(
        Kind.ENGINE,
        ROOT,
        "ValueError: The model's max seq len (8192) is larger than what can be stored in KV cache (2400).",
        r"can be stored in KV cache|KV cache is needed, which is larger",
    ),
    _row(
        Kind.ENGINE,
        SYMPTOM,
        "ERROR [core_client.py:605] Engine core proc EngineCore_DP0 died unexpectedly, shutting down client.",
        r"Engine(Dead|Core)\w*Error|EngineCore\w* (encountered|failed|died|hit)",
        r"Engine ?[Cc]ore( proc\w*)? \S* ?(died|init)|Engine process failed",
        r"Background loop (has errored|is not running)|VllmWorker\w* pid \d+ died",
        r"WorkerProc (hit an exception|initialization failed)|RPC call to \w+ timed out",
        r"Server error '5\d\d .*(generate|completions|/v1/|weights|communicator)",
    ),
    _row(
        Kind.ENGINE,
        SYMPTOM,
        "[TP1] Scheduler hit an exception: Traceback (most recent call last):",
        r"Scheduler hit an exception|DetokenizerManager hit an exception",
        r"get a response from detokenizer|Watchdog timeout \(self\.",
        r"[Rr]eceived sigquit from a child|SIGQUIT received",
    ),
    # What came in from outside: packages, data, settings, user code.
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "ModuleNotFoundError: No module named 'torch'",
        r"ModuleNotFoundError|ImportError|PackageNotFoundError|No module named ",
        r"DistributionNotFound|VersionConflict|Failed to import |CUDA Setup failed",
    ),
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi",
        r"undefined symbol|version `?(GLIBC|CXXABI)|cannot open shared object file",
        r"symbol lookup error",
    ),
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'",
        r"(__init__|from_pretrained|forward|generate|\w)\(\) got an unexpected keyword argument",
    ),
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "AttributeError: module 'torch.library' has no attribute 'register_fake'",
        r"AttributeError: (partially initialized )?module '[^']+' has no attribute",
        r"does not recognize this architecture",
    ),
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "RuntimeError: CUDA error: no kernel image is available for execution on the device",
        r"no kernel image is available|driver (on your system )?is too old",
        r"CUDA driver version is insufficient|compiled with an unsupported toolchain",
        r"mismatches the version that was used to compile|Torch not compiled with CUDA",
        r"compiled using NumPy 1|Numpy is not available|numpy\.dtype size changed",
        r"forward compatibility was attempted",
    ),
    _row(
        Kind.IMPORT_ERROR,
        ROOT,
        "MissingCUDAException: CUDA_HOME does not exist, unable to compile CUDA op(s)",
        r"CUDA_HOME (does not exist|environment variable is not set)|Error building extension",
        r"operation \w+ could not be compiled|found no C\+\+ compiler",
        r"(?i:(is|are) (required|not installed)\b.*\bpip install)",
        r"requires? .*\b(to be|is not) installed|\b(?<!-)[\w.]+: command not found$",
        r"\w+[<>=]=[\d.]+\S* is required|[Ii]ncompatible version",
    ),
    _row(
        Kind.DATA,
        ROOT,
        "json.decoder.JSONDecodeError: Extra data: line 64 column 2 (char 27826)",
        r"JSONDecodeError|UnicodeDecodeError|DatasetGeneration\w*Error|Dataset(s)?NotFoundError",
        r"DataFilesNotFoundError|EmptyDatasetError|ArrowInvalid|ArrowTypeError",
        r"UnidentifiedImageError|CastError|Couldn't cast|ParserError: Error tokenizing",
    ),
    _row(
        Kind.DATA,
        ROOT,
        "jinja2.exceptions.TemplateError: Conversation roles must alternate user/assistant/user/assistant/...",
        rf"{_ERROR}(TemplateError|UndefinedError|TemplateSyntaxError|TemplateRuntimeError): ",
        r"chat_template is not set|[Nn]o chat template|Tokenization mismatch",
        r"Error: .*[Cc]hat[_ ]template|Conversation roles must alternate",
    ),
    _row(
        Kind.DATA,
        ROOT,
        "ValueError: num_samples should be a positive integer value, but got num_samples=0",
        r"does not have a padd?ing token|Can't load tokenizer|Tokenizer class \S+ does not exist",
        r"instantiate the backend tokenizer|Couldn't find (a |any )?(data|dataset)",
        r"num_samples should be a positive|[Cc]olumn(s)? .*not (found|in the dataset|present)",
        r"column names don't match|(?i:dataset is empty|empty dataset)",
    ),
    _row(
        Kind.DATA,
        SYMPTOM,
        "KeyError: 'messages'",
        r"Caught (Index|Key|Value|Type|Attribute|Assertion)Error in DataLoader worker",
        r"index out of range in self|Invalid key: \d+ is out of bounds",
        rf"KeyError: '({_COLUMNS})'$",
    ),
    _row(
        Kind.NON_FINITE,
        ROOT,
        "ValueError: Loss is nan, stopping training",
        r"(?i:\b(loss|grad(ient)?s?([ _]norm)?) (is|are|became|was|contains?) :?(not )?(nan|inf|finite))",
    ),
    _row(
        Kind.NON_FINITE,
        ROOT,
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        r"Detected inf/nan|[Cc]urrent loss scale already at minimum|Minimum loss scale reached",
        r"returned nan values in its|contains either `?inf`?, `?nan`?",
        r"(?i:found (nan|inf) in (local )?(forward|grad|loss))|NaN or Inf found in \w+ loss",
        r"non-finite (loss|grad|norm)|(?i:encountered (nan|inf)\w* in (loss|grad))",
    ),
    _row(
        Kind.SHAPE,
        ROOT,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5480x1536 and 1024x2048)",
        r"size of tensor a \(\d+\) must match|shapes cannot be multiplied",
        r"Sizes of tensors must match|expanded size of the tensor|shape of the mask",
        r"Expected input batch_size|split_with_sizes expects|[Vv]iew size is not compatible",
        r"stack expects each tensor|shape '\[[^]]*\]' is invalid for input",
    ),
    _row(
        Kind.SHAPE,
        ROOT,
        "RuntimeError: shape mismatch: value tensor of shape [1024, 4096] does not fit",
        r"(?i:\bshapes? mismatch\b|size mismatch|(could|can)not be broadcast|could not be broadcast)",
        r"(?i:shapes? .*(do(es)? not|don't|doesn't) match)",
        r"(?i:must have (the )?same (shape|size|number of dimensions|dtype)|Expected reduction dim)",
        r"(?i:expected input\[|Dimension out of range|expected scalar type|have the same dtype)",
        r"(?i:Expected \d-?D|expects? \d-?D)",
    ),
    # The user's code.
    _row(
        Kind.REWARD_FUNCTION,
        ROOT,
        "NotImplementedError: Reward function is not implemented for data_source='mine'",
        r"(?i:reward function .*(not implemented|failed|raised|error)|Error in reward function)",
    ),
    # Settings.
    _row(
        Kind.CONFIG,
        ROOT,
        "train.py: error: argument --lr_scheduler_type: invalid choice: 'cosin'",
        r": error: (argument|unrecognized arguments|the following arguments are required)",
        r": error: (ambiguous option|one of the arguments)",
    ),
    _row(
        Kind.CONFIG,
        ROOT,
        "  Extra inputs are not permitted [type=extra_forbidden, input_value=[2, 3], input_type=list]",
        r"\d+ validation errors? for",
        r"\[type=(extra_forbidden|missing|\w+_parsing|literal_error|value_error)",
        r"extra fields not permitted",
    ),
    _row(
        Kind.CONFIG,
        ROOT,
        "omegaconf.errors.ConfigAttributeError: Key 'lr' is not in struct",
        r"(Config(Attribute|Key|Type|Composition)|MissingConfig|OverrideParse|Interpolation\w*|Validation)(Error|Exception)\b",
        r"Key '\S+' is not in struct|Could not override '|MissingMandatoryValue",
    ),
    _row(
        Kind.CONFIG,
        ROOT,
        "yaml.scanner.ScannerError: while scanning a simple key",
        rf"{_ERROR}(Scanner|Parser|Composer|Constructor|TOMLDecode|DeepSpeedConfig|Config|Configuration)Error\b",
        rf"{_ERROR}(BadConfig|MisconfigurationException)\b",
        rf"{_ERROR}(HFValidation|Argument|RepositoryNotFound|GatedRepo|EntryNotFound)Error\b",
    ),
    _row(
        Kind.CONFIG,
        ROOT,
        "ValueError: FSDP2 is not compatible with save_only_model=True",
        rf"{_ERROR}(Value|Assertion|Type|NotImplemented|Runtime)Error: .*(?i:{_WRONG_SETTING})",
    ),
    _row(
        Kind.CONFIG,
        ROOT,
        "Please correct the following DeepSpeed config values that mismatch TrainingArguments values:",
        r"Please correct the following .* config values|forward only supports",
        r"invalid device ordinal|Duplicate GPU detected|: --\S+: command not found",
        r"(job submission failed|Unable to allocate resources): (Invalid|Requested|.* limit)",
        r"api_key not configured|is not a local folder and is not a valid model",
        r"does not appear to have a file named",
    ),
    # Also what a file system does that lags behind: so anything more telling wins.
    _row(
        Kind.CONFIG,
        SYMPTOM,
        "FileNotFoundError: [Errno 2] No such file or directory: 'train.jsonl'",
        rf"{_ERROR}(FileNotFoundError|PermissionError|NotADirectoryError|IsADirectoryError)",
        r"\[Errno (2|13)\]|Permission denied|execve\(\): \S+ No such file|can't open file '",
    ),
    # The network: a root where a device says so, otherwise most often the echo of a rank that died.
    _row(
        Kind.NETWORK,
        SYMPTOM,
        "n2:5776:5902 [0] NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, vendor err 129",
        r"NET/\w+ ?: ?(\S+ )?[Gg]ot completion|\bibv_\w+ failed|NET/IB.*(async|fatal) (event|error)",
        r"transport retry counter",
    ),
    _row(
        Kind.NETWORK,
        SYMPTOM,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        r"NCCL WARN .*Connect to \S+ (failed|returned)|ncclSystemError|unhandled system error",
        r"No route to host|Network is (unreachable|down)|\[Errno (100|101|110|113)\]",
    ),
    _row(
        Kind.NETWORK,
        CASCADE,
        "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:40213",
        r"Connection ?(reset|closed|refused|timed out|aborted|Reset|Refused|Aborted)|MaxRetryError",
        r"(Connect|Read) ?[Tt]imeout(Error)?\b|Broken pipe|Socket closed|connection was closed",
        r"connection abort|RemoteDisconnected|\bEOFError$",
    ),
    _row(
        Kind.NETWORK,
        CASCADE,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        r"ncclRemoteError|ncclInternalError|NCCL communicator was aborted",
        r"Some NCCL operations have failed|remote process exited or there was a network error",
        r"Application timeout caused pair closure",
    ),
    _row(
        Kind.RENDEZVOUS,
        SYMPTOM,
        "torch.distributed.DistNetworkError: the peer has another address family",
        rf"{_ERROR}Dist(Network|Store)Error",
    ),
    # Ends that say no more than that they are ends.
    _row(
        Kind.AGENT_KILLED,
        CASCADE,
        "srun: error: n3: task 2: Killed",
        rf"error: {_NODE}: tasks? [\d,-]+: (Killed|Bus error|Segmentation fault|Aborted)",
    ),
    _row(
        Kind.WORKER_KILLED,
        CASCADE,
        "/var/spool/slurmd/job7/slurm_script: line 46: 2113061 Killed                  python3 train.py",
        r"^Killed$|line \d+: +\d+ Killed\b|exit ?code\s*:? (-9|137)\b|return code = -9\b",
        r"Signal 9 \(SIGKILL\)|died with <Signals.SIGKILL",
    ),
    _row(
        Kind.UNKNOWN,
        CASCADE,
        "srun: error: n3: task 1: Exited with exit code 1",
        rf"error: {_NODE}: tasks? [\d,-]+: Exited with exit code [1-9]",
    ),
    _row(
        Kind.UNKNOWN,
        CASCADE,
        "Fatal Python error: Segmentation fault",
        r"Segmentation fault|core dumped|exit ?code\s*:? (?!-?0|-9\b|-15\b|-2\b)-?\d+",
        r"return code = -?[1-9]|returned non-zero exit status|Fatal Python error|^terminate called",
        r"Signal \d+ \(SIG(SEGV|ABRT|BUS|FPE|ILL)\)|died with <Signals|[Ww]orker died or was killed",
        r"FAILED \(non-zero exit code",
    ),
    _row(
        Kind.UNKNOWN,
        CASCADE,
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one.",
        r"^\W{0,3}(\w+\.)*[A-Z]\w*(Error|Exception)(\(\w+\))?(: |:?$)|CUDA error: ",
    ),
    # Where it was.
    _row(
        Kind.UNKNOWN,
        CONTEXT,
        "Traceback (most recent call last):",
        r"^Traceback \(most recent call last\)",
    ),
    _row(
        Kind.REWARD_FUNCTION,
        CONTEXT,
        '  File "rewards/math.py", line 7, in score',
        r'File "[^"]*reward(?!_?(trainer|model))[^"/]*(/[^"]*)?", line \d+, in ',
        r'File "[^"]*", line \d+, in \w*(compute_score|reward_f|_rewards?\b)',
        r'File "[^"]*/(math_verify|graders?)[/.]',
        r"^\s+.*\b(reward_fn|reward_funcs?|reward_function|compute_score)\(",
    ),
    _row(
        Kind.CHECKPOINT_CORRUPT,
        CONTEXT,
        '  File "trainer.py", line 7, in load_checkpoint',
        r'File "[^"]*", line \d+, in _?(load|restore|resume)_?(from_)?(checkpoint|state_dict|parameter_state)\w*$',
        r'File "[^"]*", line \d+, in \w*_load_plan$',
    ),
    _row(
        Kind.DATA,
        CONTEXT,
        '  File "torch/utils/data/_utils/fetch.py", line 54, in fetch',
        r'File "[^"]*utils/data/_utils/(fetch|collate)\.py", line \d+',
        r'File "[^"]*/datasets/(builder|arrow_dataset|iterable_dataset)\.py", line \d+',
        r'File "[^"]*(tokenization_utils\w*|collator|data_utils|dataset|preprocess\w*)\.py", line \d+',
    ),
)
"""Looked through from top to bottom; the first row that matches a line decides about that line."""

_PREFIX = re.compile(
    r"^(\[(rank|default|[\w.-]+:)?\d+\]:? ?(?!loss)|\(\w[^()]*\bpid=\d+[^()]*\) |(ERROR|CRITICAL) \d\d-\d\d [\d:]+ "
    r"\[?[\w./]+:\d+\] |\[?\d{4}-\d\d-\d\d[T ][\d:.,]+( \w+)*\]? |\d+: |│ ?| *what\(\): +)+"
)
"""Who printed the line and when: launchers, Ray, engines and boxes put it before what the runtime says."""
GOING_ON = 3
"""So many steps after a complaint show that it was survived. Fewer may come from a buffer that is emptied at exit."""
_FRAME = re.compile(r'^\s*File "[^"]*", line \d+')


def match_line(line: str) -> Match | None:
    """What the table knows about one line; None when nothing."""
    signature = _signature(line)
    if signature is None:
        return None
    kind, part, pattern = signature.kind, signature.part, signature.pattern
    found = pattern.search(_bare(line))
    node = (found.groupdict().get("node") or "") if found is not None else ""
    return Match(kind, part, line.strip(), node)


def find(text: str) -> Match | None:
    """The line of a text that decides: roots before symptoms before cascades, then the first; None when there is none.

    A cancellation says something only where nothing failed before it: Slurm prints it about every step that it ends,
    also about one that failed by itself. What is no root counts only if no training step follows it, and a root only if
    not several do.
    """
    found = [match for match in _telling(text.splitlines()) if match.part is not Part.TEARDOWN]
    telling = [match for match in found if match.part is not Part.CONTEXT]
    failures = [match for match in telling if match.kind is not Kind.USER_CANCEL]
    if failures and telling[0].kind is not Kind.USER_CANCEL:
        telling = failures
    best = min(telling, key=lambda match: match.part, default=None)
    if best is None:
        # A traceback whose last line is cut off.
        return next((replace(match, part=Part.CASCADE) for match in found if match.kind is Kind.UNKNOWN), None)
    if best.kind is not Kind.UNKNOWN:
        return best
    # Ray prints the last line of an error once more before its traceback: so the frames may stand after it.
    last = max(number for number, match in enumerate(found) if match.kind is Kind.UNKNOWN and match in telling)
    frames = (match for match in found[:last] if match.part is Part.CONTEXT and match.kind is not Kind.UNKNOWN)
    context = next(frames, None)
    return best if context is None else replace(best, kind=context.kind, part=Part.SYMPTOM)


def _telling(lines: list[str]) -> list[Match]:
    found: list[Match] = []
    steps = 0
    for number, line in enumerate(lines):
        if metric_lines.is_progress(line):
            steps += 1
            gone_on = steps >= GOING_ON or metric_lines.is_end(line)
            found = [] if gone_on else [match for match in found if match.part is Part.ROOT]
            continue
        match = match_line(line)
        if match is not None and (match.kind is Kind.REWARD_FUNCTION or not _is_source(lines, number)):
            steps = 0 if match.part is Part.ROOT else steps
            found.append(match)
    diverged = metric_lines.divergence(lines)
    if diverged is not None:
        found.append(Match(Kind.NON_FINITE, Part.ROOT, diverged.strip()))
    return found


def _is_source(lines: list[str], number: int) -> bool:
    """A line of code that a traceback quotes: its words are not what happened."""
    line = _bare(lines[number])
    return number > 0 and line.startswith("    ") and _FRAME.match(_bare(lines[number - 1])) is not None


def _signature(line: str) -> Signature | None:
    bare = _bare(line)
    return next((signature for signature in SIGNATURES if signature.pattern.search(bare)), None)


def _bare(line: str) -> str:
    return _PREFIX.sub("", line.rstrip())
