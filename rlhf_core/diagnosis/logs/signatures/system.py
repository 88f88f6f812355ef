"""Phrases of the system: schedulers, launchers, the kernel, drivers, GPUs and file systems.

Rows are tried from top to bottom; see :mod:`rlhf_core.diagnosis.logs.signatures.table`.
"""

from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.diagnosis.logs.signatures.row import Signature, row
from rlhf_core.schemas.failures import FailureKind as Kind

ROOT, SYMPTOM, CASCADE, TEARDOWN = EvidencePart.ROOT, EvidencePart.SYMPTOM, EvidencePart.CASCADE, EvidencePart.TEARDOWN
_NODE = r"(?P<node>[\w.-]+)"

SCHEDULER: tuple[Signature, ...] = (
    row(
        Kind.NODE_LOST,
        ROOT,
        "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO NODE FAILURE ***",
        r"DUE TO NODE FAILURE",
        r"\b(?:NODE|BOOT)_FAIL\b",
        r"[Nn]ode .{0,80}marked dead",
        r"NodeNotReady|NodeLost\b|NodeShutdown|TaintManagerEviction",
        r"because its node has died|[Tt]he (?:actor's )?node .{0,80}(?:was terminated unexpectedly|has died|is dead)",
        r"missing too many heartbeats|[Nn]ode \S+ (?:is|was) (?:down|lost|unreachable|not responding)",
        r"Kernel panic - |(?i:host (?:was )?rebooted unexpectedly)",
    ),
    row(Kind.NODE_LOST, ROOT, "srun: error: Node failure on n3", rf"[Nn]ode failure on {_NODE}"),
    row(
        Kind.NODE_LOST,
        ROOT,
        "srun: error: Task launch for StepId=7.0 failed on node n3: Communication connection failure",
        rf"Task launch for \S+ failed on node {_NODE}",
        rf"error: Node {_NODE}: (?:Prolog|Epilog) failed|Unable to confirm allocation .{{0,60}}Prolog error",
    ),
    row(
        Kind.NODE_LOST,
        ROOT,
        "srun: error: Nodes n3 are still not ready",
        rf"error: Nodes? {_NODE}\S* (?:(?:is|are) )?(?:still )?not (?:ready|responding)",
        rf"error: .{{0,40}}lost (?:contact|communication) with (?:node )?{_NODE}",
    ),
    row(
        Kind.PREEMPTION,
        ROOT,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO PREEMPTION ***",
        r"DUE TO (?:PREEMPTION|JOB REQUEUE)",
        r"\bPREEMPTED\b",
        r"(?i:\b(?:job|run|task|worker|instance|vm|node|pod)s? (?:is|was|were|has been|will be|got) preempted)",
        r"(?i:spot (?:instance )?(?:interruption|termination|reclaim)|preemption (?:notice|signal|detected|event))",
        r"(?i:instance (?:was )?reclaimed|(?:received|got|caught) (?:a )?preempt)",
    ),
    row(
        Kind.TIME_LIMIT,
        ROOT,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 DUE TO TIME LIMIT ***",
        r"DUE TO TIME ?LIMIT",
        r"exceeded (?:its|the|their) (?:time|walltime|wall-clock|wall clock) ?limit|walltime \d+ exceeded",
        r"(?:^|\s|=)TIMEOUT(?:\s+\d|\s*$)",
        r"(?:^|\s|=)DEADLINE(?:\s+\d|\s*$)",
        r"job killed: walltime|DeadlineExceeded",
        r"TERM_RUNLIMIT",
    ),
    row(
        Kind.USER_CANCEL,
        SYMPTOM,
        "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-01-01T00:00:00 ***",
        r"\*\*\* ?(?:JOB|STEP) \S+ (?:ON \S+ )?CANCELLED AT (?!.{0,60}DUE TO)",
        r"\bCANCELLED by [1-9]",
    ),
    row(
        Kind.USER_CANCEL,
        SYMPTOM,
        "WARNING:torch.distributed.elastic.agent.server.api:Received 2 death signal, shutting down workers",
        r"(?i:\b(?:got|received|caught|by) (?:[12] death signal|signal\W{0,3}[12]\b|"
        r"(?:signals?\W{0,3})?SIG(?:INT|HUP)\b))",
        r"return code = -2\b",
        r"(?i:\b(?:interrupted|aborted|cancell?ed|stopped|killed) (?:by|from) (?:the )?(?:user|keyboard|operator))",
        r"(?i:program interrupted|\^C(?:\s|$)|\bscancel(?:led)?\b.{0,30}\bby (?:me|us|hand)\b)",
        # Not advice such as "use keyboard interrupt to stop", after which every failure would be its consequence.
        r"(?i:(?:^|(?:got|received|caught|detected|by) (?:an? )?)keyboard ?interrupt\b|"
        r"\bkeyboard ?interrupt (?:was )?(?:received|caught|detected))",
        r"srun: (?:interrupt|forcing job termination)|sending Ctrl-C",
    ),
)
"""Actions of users and schedulers. They count at every log level, because some are logged as warnings."""

NOISE: tuple[Signature, ...] = (
    row(Kind.UNKNOWN, TEARDOWN, "Sending process 17 closing signal SIGTERM", r"closing signal SIG"),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        "destroy_process_group() was not called before program exit, which can leak resources.",
        r"destroy_process_group\(\) was not called",
        r"There appear to be \d+ leaked",
        r"CUDA_LAUNCH_BLOCKING|TORCH_USE_CUDA_DSA|CUDA kernel errors might be asynchronously",
    ),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
        r"Force Terminated|Job step aborted: Waiting|^Killing subprocess \d+|: Terminated$",
        r": Terminating (?:Step|Job)",
        r"ChildFailedError|SignalException: Process \d+ got signal: (?!1\b|2\b)",
    ),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        "'(ProtocolError('Connection reset by peer'))' thrown while requesting HEAD config.json",
        r"(?i:\bretrying\b|\bretry \d+/\d+|will (?:be )?retr(?:y|ied)|thrown while requesting|retry loop)",
        r"(?i:\battempt \d+(?:/| of )\d+ failed|succeeded (?:after|on) (?:\d+ )?(?:retr|attempt))",
    ),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        "FlashAttention is not there (ImportError: No module named 'flash_attn'), falling back to sdpa",
        r"(?i:fall(?:ing|s)? ?back to|\bskipp(?:ing|ed) (?:it|this|the|iter|step|batch|sample)|(?:is|are) optional)",
        r"(?i:\b(?:not|install\w*)\b.{0,80}\bfor (?:better|the best|faster|improved|optimal) (?:performance|speed))",
        r"(?i:\b(?:not|no such)\b.{0,200}\bstart(?:ing|s)? (?:from scratch|fresh))",
        r"(?i:can be (?:safely )?ignored|safe(?:ly)? (?:to )?ignored?\b|^Exception ignored|\bharmless\b|\bcosmetic\b)",
        r"(?i:\b(?:this|that|which|it) is (?:normal|expected|benign)\b|\bnot an error\b|\bbenign\b)",
        r"(?i:\b(?:training|run|job) (?:continued|continues|went on|recovered|survived)\b)",
        r"(?i:false alarm|(?:is|are) not fatal|non-fatal|training (?:is )?(?:not affected|unaffected))",
    ),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        "Could not load dynamic library 'libcudart.so.11.0'; dlerror: cannot open shared object file",
        r"Could not load dynamic library|cudart_stub|NUMA node read from SysFS",
        r"Unable to register \w+ factory|Failed to (?:open|load) libibverbs|No plugin found \(libnccl",
        r"misc/ibvwrap\.cc(?!.{0,60}ibv_(?:reg|create|modify|alloc)_)|ras/client_support\.cc",
        r"Token indices sequence length is longer",
        r"Failed to import from \S+ with",
        # Drivers and libraries that a container or a node lacks and the program can do without.
        r"^libibverbs: Warning: |from LD_PRELOAD cannot be preloaded|component_repository_open: unable to open",
        r"\bld: cannot find -l(?:aio|cufile)\b",
        # Called in passing by DeepSpeed, by launch scripts and by shell profiles.
        r"^(?:cat|df|find|grep|ls|rm|tput): .{0,200}(?:No such file|denied|cannot)|\bmodule: command not found$",
        r"\bulimit: .{0,80}cannot modify limit",
    ),
    row(
        Kind.UNKNOWN,
        TEARDOWN,
        'completion: if not x: raise ValueError("must be positive")',
        r"\b(?:raise|except) (?:\w+\.)*\w+(?:Error|Exception)\b",
    ),
)
"""Lines that only sound like a failure."""

MACHINE: tuple[Signature, ...] = (
    # Memory of the host before that of the GPU, because Ray calls both OutOfMemoryError.
    row(
        Kind.HOST_OOM,
        ROOT,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        r"oom[-_]kill|OOM[ -]?[Kk]illed",
        r"Out of memory: Kill(?:ed)? process|[Cc]group out of memory|Memory cgroup out of memory",
        r"oom_reaper",
        r"\bOUT_OF_ME(?:MORY\b|\+)",
        r"Killed signal terminated program",
        r"(?i:\b(?:host|system|cpu|node|main) (?:ram|memory) (?:is )?(?:exhausted|full|ran out))",
    ),
    row(Kind.HOST_OOM, ROOT, "srun: error: n3: task 0: Out Of Memory", rf"error: {_NODE}: tasks? \S+ Out Of Memory"),
    row(
        Kind.HOST_OOM,
        ROOT,
        "slurmstepd: error: StepId=7.batch exceeded memory limit (734003200 > 52428800), being killed",
        r"(?i:exceeded (?:job |step |its |the )?memory limit)|TERM_MEMLIMIT",
    ),
    row(
        Kind.HOST_OOM,
        ROOT,
        "Task was killed due to the node running low on memory.",
        r"killed due to (?:the node|memory pressure)|running low on memory|exceeds the memory usage threshold",
        r"was low on resource: memory",
        r"ray\.exceptions\.OutOfMemoryError",
    ),
    row(
        Kind.HOST_OOM,
        ROOT,
        "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.",
        r"insufficient shared memory|out of shared memory",
        r"(?i:(?:unable|failed|error|could not|cannot)\b.{0,30}\b(?:open|mmap|allocat|creat|extend|attach)\w* .{0,20}"
        r"(?:shared memory|/dev/shm))|unable to write to file </torch_",
        r"killed by signal: (?:Killed|Bus error)",
    ),
    row(
        Kind.HOST_OOM,
        ROOT,
        "Unable to allocate 23.8 GiB for an array with shape (3200000000,)",
        # A device that cannot register memory lacks the limit of locked memory, not memory.
        r"std::bad_alloc|^(?!.{0,300}\bibv_).{0,900}\bCannot allocate memory\b",
        r"Unable to allocate [\d.]+ \w?i?B for an array",
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory|CPU out of memory",
        r"(?:cudaHostAlloc|cudaHostRegister|pin(?:ned)?_memory).{0,60}out of memory",
    ),
    # Limits of threads and processes: no memory is missing, and no file system is at fault.
    row(
        Kind.UNKNOWN,
        SYMPTOM,
        "RuntimeError: can't start new thread",
        r"can't start new thread|pthread_create failed|[Tt]hread creation failed",
        r"\b(?:thread|fork): Resource temporarily unavailable",
    ),
    # Memory of the GPU.
    row(
        Kind.CUDA_OOM,
        ROOT,
        "RuntimeError: CUDA error: out of memory",
        r"(?i:\b(?:CUDA|HIP|NPU|XPU|GPU|NCCL|NVML|cuBLAS)( driver)?( error| failure)?(?: \d+)?:?"
        r" '?(?:device )?(?:ran )?out of memory)",
        r"(?i:RESOURCE_EXHAUSTED|(?:^|[\s`])(?:\w+\.)*\w*Error: .{0,200}\bout of memory)",
        r"Triton Error.{0,60}out of memory|torch(?:\.cuda)?\.OutOfMemoryError",
        r"Tried to allocate [\d.]+ \w?i?B",
    ),
    row(
        Kind.CUDA_OOM,
        ROOT,
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|hipErrorOutOfMemory|ACL_ERROR_RT_MEMORY_ALLOCATION",
        r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED",
    ),
    row(
        Kind.CUDA_OOM,
        ROOT,
        "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
        r"No available memory for the cache blocks|Not enough memory\. Please try",
        r"[Ff]ree memory on device .{0,80}is less than desired",
        r"out of (?:device|video|gpu) memory|OOM (?:when|while) allocating|insufficient (?:gpu|device) memory",
    ),
    # A symptom: NCCL says so of any error of the allocation, also one of a kernel before it.
    row(
        Kind.CUDA_OOM,
        SYMPTOM,
        "Failed to CUDA calloc async 608 bytes",
        r"Failed to CUDA (?:calloc|malloc)",
    ),
    # Hardware.
    row(
        Kind.GPU_HARDWARE,
        ROOT,
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        r"(?i:uncorrectable (?:NVLink|ECC)|ECCUncorrectable|NvlinkUncorrectable|double[- ]bit ECC error)",
        r"(?i:ECC error encountered|(?:volatile|aggregate) uncorr\w* ecc|cudaErrorHardwareStackError)",
        r"(?i:(?<!\bno )uncorrectable memory errors?\b(?!(?: count| detected| found| total)?\W{1,3}(?:0|none)\b))",
        r"(?i:\bDBE\b.{0,40}\b(?:error|ECC)|(?:remapped|retired) (?:rows?|pages?).{0,20}(?:fail|pending: yes))",
    ),
    row(
        Kind.GPU_HARDWARE,
        ROOT,
        "NVRM: Xid (PCI:0000:10:1c): 64, pid=17, name=python",
        r"Xid (?:\(\S+\): ?|error:? |code:? |=)?(?:48|61|62|63|64|74|79|8[78]|9[245]|109|11[09]|12\d|13[67]|14\d|15[0"
        r"-8])\b",
    ),
    row(
        Kind.GPU_HARDWARE,
        ROOT,
        "NVRM: GPU has fallen off the bus and is not responding to commands.",
        r"(?i:fall(?:en|s|ing)? off the bus|\bGPU (?:is|has been|was) lost\b|row remap)",
        r"(?i:GPU (?:\S+ )?(?:requires?|needs?|likely needs) (?:a |to be )?reset)",
        r"(?i:RmInitAdapter failed|rm_init_adapter failed|uncorrect\w+\s*:\s*[1-9])",
        r"(?i:NVRM: .{0,80}(?:GSP|RPC).{0,60}(?:error|timeout))",
        r"(?i:PCIe Bus Error: severity=Uncorrected|Unable to determine the device handle for (?:the )?gpu)",
    ),
    row(
        Kind.GPU_HARDWARE,
        ROOT,
        "RuntimeError: Unexpected error from cudaGetDeviceCount(). Error 802: system not yet initialized",
        r"(?i:error in the Fabric Manager|NVSwitch.{0,40}(?:fatal|error))",
        r"(?i:NVLink.{0,30}(?:fatal|link (?:is )?down|failure))",
        r"(?i:system not yet initialized|hardware (?:error|exception|failure)|HW Exception by GPU)",
        r"(?i:gpu (?:core |memory )?(?:dump|hang) (?:detected|error)|GPU Hang\b|aicore (?:error|exception))",
        r"(?i:HSA_STATUS_ERROR_EXCEPTION|heartbeat lost.{0,30}device)",
    ),
    row(
        Kind.GPU_HARDWARE,
        SYMPTOM,
        "RuntimeError: No CUDA GPUs are available",
        r"No (?:CUDA|HIP) GPUs are available|No devices were found|Found no NVIDIA driver",
        r"CUDA unknown error - |no (?:CUDA|ROCm)-capable device",
        r"Failed to initialize NVML|NVML Shared Library Not Found|Unable to determine the device handle",
        r"[Dd]river/library version mismatch|NVRM: API mismatch|nvidia-container-cli: initialization error",
        r"CUDA driver initialization failed|cudaGetDeviceCount\(\).{0,150}Error (?:3|803|999):",
    ),
    # Failed kernels. A symptom, because broken hardware causes them too and is reported in another line.
    row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "RuntimeError: CUDA error: an illegal memory access was encountered",
        r"(?i:\b(?:CUDA|HIP|NPU|GPU)\b.{0,40}\berror:? .{0,40}\b(?:assert|illegal|misaligned|launch failure|trap|"
        r"program counter|address space|aborted))",
        r"an illegal (?:memory access|instruction) was encountered|[Mm]isaligned address|illegal memory access",
        r"unspecified launch failure|invalid program counter|cudaErrorIllegalAddress|cudaErrorLaunchFailure",
        r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|LAUNCH_FAILED|MISALIGNED_ADDRESS|ASSERT)",
        r"Memory access fault by GPU|HSA_STATUS_ERROR_MEMORY_APERTURE_VIOLATION|MMU fault",
        r"aborting with error : HSA_STATUS|the launch timed out and was terminated",
    ),
    row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "Indexing.cu:1308: block: [58,0,0], thread: [1,0,0] Assertion `srcIndex < srcSelectDimSize` failed.",
        r"device-side assert|\.cu(?:h)?:\d+: .{0,200}Assertion .{0,200} failed",
        r"(?:CUBLAS|CUDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING|NOT_INITIALIZED)",
        r"invalid configuration argument",
    ),
    row(
        Kind.ILLEGAL_ACCESS,
        SYMPTOM,
        "NVRM: Xid (PCI:0000:ca:00): 31, pid=17, MMU Fault: ENGINE GRAPHICS",
        r"NVRM: Xid \(\S+\): (?:13|31|43|45|68|69)\b",
    ),
    # Disks and files.
    row(
        Kind.DISK_FULL,
        ROOT,
        "OSError: [Errno 28] No space left on device: 'step_100'",
        r"[Nn]o space left|[Qq]uota exceeded|exceeded .{0,20}quota\b|[Nn]ot enough (?:free )?(?:disk )?space",
        r"\bENOSPC\b|\bEDQUOT\b|StorageFull|(?i:disk (?:is )?(?:full|at 100%))",
        r"(?i:out of disk space|no free inodes|inode exhaustion)|was low on resource: ephemeral-storage",
    ),
    row(
        Kind.DISK_FULL,
        ROOT,
        "RuntimeError: [enforce fail at inline_container.cc:445] . PytorchStreamWriter failed writing file data/176",
        r"inline_container\.cc:\d+\] \. (?:unexpected pos|PytorchStreamWriter failed writing)",
        r"PytorchStreamWriter failed writing",
        r"basic_ios::clear: iostream error|file write failed",
    ),
    row(
        Kind.FILE_SYSTEM,
        ROOT,
        "OSError: [Errno 116] Stale file handle: 'cache.arrow'",
        r"[Ss]tale (?:NFS )?file handle|[Rr]ead-only file ?system|\bEROFS\b|\bESTALE\b",
        r"[Tt]ransport endpoint|Input/output error|Remote I/O error|Bad message|Structure needs cleaning",
        r"Error while serializing: I/?[Oo] ?[Ee]rror",
        r"Too many open files|No locks available|Resource temporarily unavailable: '|Directory not empty",
    ),
    row(
        Kind.FILE_SYSTEM,
        ROOT,
        "LustreError: 11-0: scratch-OST0012: operation ost_read failed with -107",
        r"LustreError|nfs: server \S+ not responding|blocked for more than \d+ seconds",
        r"GPFS.{0,60}(?:unmounted|panic)|mmfs: .{0,60}error|XFS .{0,60}(?:corruption|shutdown)|EXT4-fs error",
        r"ceph: .{0,60}hung",
        r"(?i:(?:storage|file ?system|nfs|lustre|mount|gpfs|weka) (?:is |was |has )?"
        r"(?:stall\w*|hung|unavailable|frozen|went away))",
        r"(?i:stalled (?:network )?file ?system)",
    ),
    row(
        Kind.FILE_SYSTEM,
        ROOT,
        "sqlite3.OperationalError: database is locked",
        r"database is locked|disk I/O error|Tried reading schema message, was null|unable to open database file",
        r"(?:Error: |^)(?:Destination|Output|Checkpoint|Path|Directory|Folder|File|Output"
        r" directory)\W.{0,200}already exists",
        r"Could not acquire (?:a |the )?lock|lock file .{0,80}(?:held|timed out|exists)",
    ),
    row(
        Kind.FILE_SYSTEM,
        SYMPTOM,
        "PermissionError: [Errno 13] Permission denied: '/shared/hub/.locks/models--google--gemma'",
        r"Permission denied: '[^']{0,200}(?:\.cache|/cache|_cache|/\.locks|/tmp/|\.lock\b)",
        r"No such file or directory: '[^']{0,300}(?:\.triton/|torchinductor_)",
        r"Error: .{0,20}No usable temporary directory",
        r"(?i:\bf?lock(?:ing|s|ed)?\b.{0,120}Function not implemented)",
    ),
)
"""Memory, GPUs, kernels, disks and files."""

NETWORK: tuple[Signature, ...] = (
    # Before the rows for the errors of NCCL that quote it.
    row(
        Kind.CONFIG,
        ROOT,
        "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 50000",
        r"Duplicate GPU detected|ncclInvalidUsage",
    ),
    # The rows below tell of connections, whose other end may be at fault. A symptom, too: ports recover.
    row(
        Kind.NETWORK,
        SYMPTOM,
        "n2:5776:5902 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error",
        r"NET/\w+ ?:.{0,60}(?:async event ?: (?:port|local catastrophic) error|async fatal event: )",
        r"(?i:\b(?:link|port) (?:is |went )?down\b.{0,40}\b(?:mlx|ib|eth|roce))",
        r"(?i:\b(?:mlx|ib|eth|roce)\w*.{0,60}\b(?:link|port) (?:is |went )?down\b)",
        is_local=True,
    ),
    row(
        Kind.NETWORK,
        SYMPTOM,
        "n2:5776:5902 [0] NCCL WARN NET/IB : Got completion from peer 10.2.0.5<33092> with error 12, vendor err 129",
        r"NET/\w+ ?: ?(?:\S+ )?[Gg]ot completion|\bibv_\w+ failed|NET/\w+.{0,60}(?:async|fatal) (?:event|error)",
        r"transport retry counter|retry count(?:er)? exceeded|IBV_WC_\w*ERR|vendor err \d+|local QP operation error",
        r"(?i:rdma.{0,80}(?:fail|error)|mlx5_\w+.{0,60}(?:error|fatal|flap))",
    ),
    row(
        Kind.NETWORK,
        SYMPTOM,
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.",
        r"NCCL WARN .{0,200}[Cc]onnect to \S+ (?:failed|returned)|ncclSystemError|unhandled system error",
        r"No route to host|Network is (?:unreachable|down)|[Ss]ocket (?:recv|send|poll)\w* failed",
        r"(?:socketProgress|Call to (?:recv|send|connect) .{0,60}failed)"
        r"(?!.{0,80}(?:Connection (?:closed|refused|reset)|Broken pipe))",
        r"\buc[pst]_\w+ failed|\bUCX +ERROR\b",
        r"HCCL.{0,60}(?:error|fail)|hcom_\w+ failed",
    ),
    row(
        Kind.NETWORK,
        CASCADE,
        "RuntimeError: [pair.cc:534] Connection closed by peer [127.0.0.1]:40213",
        r"Connection ?(?:reset|closed|refused|timed out|aborted|lost|Reset|Closed|Refused|Aborted)",
        r"Broken pipe|Socket closed|connection was closed|connection abort|\bEOFError$",
    ),
    row(
        Kind.NETWORK,
        CASCADE,
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely.",
        r"ncclRemoteError|ncclInternalError|NCCL communicator was aborted",
        r"remote process exited or there was a network error",
        r"Application timeout caused pair closure",
        # A call of the CUDA driver failed, for a reason in another line.
        r"NCCL error|ncclUnhandledCudaError|unhandled cuda error",
    ),
)
"""A symptom if a device reports itself or a connection, otherwise usually a consequence of a dead rank."""

ENDS: tuple[Signature, ...] = (
    row(
        Kind.NETWORK,
        CASCADE,
        "[Rank 4] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels",
        r"Some NCCL operations have failed",
    ),
    row(
        Kind.UNKNOWN,
        CASCADE,
        "slurmstepd: error: pyxis: failed to import docker image",
        r"pyxis: (?:failed to|couldn't|container start failed)|\bOCI runtime \w+ failed|Error response from daemon: ",
        r"container creation failed|root filesystem extraction failed",
        r"^(?:srun|sbatch|salloc): fatal: ",
    ),
    row(
        Kind.UNKNOWN,
        CASCADE,
        "srun: error: n3: task 1: Exited with exit code 1",
        rf"error: {_NODE}: tasks? [\d,-]+: Exited with exit code [1-9]",
        rf"error: {_NODE}: tasks? [\d,-]+: (?:Killed|Bus error|Segmentation fault|Aborted|Illegal instruction)",
    ),
    row(
        Kind.UNKNOWN,
        CASCADE,
        "/var/spool/slurmd/job7/slurm_script: line 46: 2113061 Killed                  python3 train.py",
        r"^Killed$|line \d+: +\d+ Killed\b|exit ?code\s*:? \(?(?:-9|137)\b|return code = -9\b",
        r"(?i:\bexit(?:ed)?(?: with)? (?:code|status)(?: is)? 137\b|\bexited \(137\)|\bexit_?code=137\b)",
        r"Signal 9 \(SIGKILL\)|died with <Signals.SIGKILL",
        r"Segmentation fault|core dumped|exit ?code\s*:? (?!-?0|-9\b|-15\b|-2\b)-?\d+",
        r"\bCheck failed: ",
        r"DUE TO TASK FAILURE|return code = -?[1-9]|returned non-zero exit status|Fatal Python error|^terminate called",
        r"Signal \d+ \(SIG(?:SEGV|ABRT|BUS|FPE|ILL)\)|died with <Signals|[Ww]orker died or was killed",
        r"FAILED \(non-zero exit code|[Ss]ee (?:the )?stack ?trace.{0,40}root cause|Failed core proc",
        r"died unexpectedly|unexpectedly exits|exit(?:s|ed)? unexpectedly|The actor (?:is|died)",
        r"(?:CUDA|HIP|NPU|ROCm|XLA|cuBLAS|cuDNN) error: ",
        r"Abort\(\d+\)|MPI_ABORT|PMIX ERROR|mpi(?:run|exec) noticed that process rank",
        r"SIGSEGV|SIGABRT|SIGBUS|double free or corruption|stack smashing|corrupted size vs",
    ),
)
"""Rows that only report that something ended; a log does not show the sender of a SIGKILL."""
