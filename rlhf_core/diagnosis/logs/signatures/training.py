"""Phrases of training: checkpoints, collectives, ranks, numbers, tensors and reward functions.

Rows are tried from top to bottom; see :mod:`rlhf_core.diagnosis.logs.signatures.table`. Error classes are in
:mod:`rlhf_core.diagnosis.logs.exceptions`.
"""

from rlhf_core.diagnosis.logs.events import EvidencePart
from rlhf_core.diagnosis.logs.signatures.row import Signature, row
from rlhf_core.schemas.failures import FailureKind as Kind

ROOT, SYMPTOM = EvidencePart.ROOT, EvidencePart.SYMPTOM

UNFIT_CHECKPOINT = row(
    Kind.CHECKPOINT_CORRUPT,
    ROOT,
    "RuntimeError: Error(s) in loading state_dict for Model:",
    r"Error\(s\) in loading state_dict|^\s*(?:- )?size mismatch for \S+: copying a param",
    r"(?:Missing|Unexpected) key\(s\) in state_dict|doesn't match the (?:model|optimizer) state",
    r"Missing key in checkpoint|[Ss]ize mismatch between saved|KeyError: '?MetadataIndex",
    r"loaded state dict (?:contains a parameter group|has a different number)",
    r"(?:is|are) missing from (?:the )?checkpoint|checkpoint being loaded used a DP world size",
)
"""Phrases of a checkpoint that is whole but was saved with another model, optimizer or number of ranks."""

MISSING_FILE_OF_RANK = row(
    Kind.CHECKPOINT_CORRUPT,
    ROOT,
    "FileNotFoundError: [Errno 2] No such file or directory: 'step8/zero_pp_rank_3_mp_rank_00_optim_states.pt'",
    r"No such file or directory: '[^']{0,300}(?:mp_rank_\d|zero_pp_rank_|optim_states|\.distcp|rng_state)",
)
"""Phrases of a file of one rank that is missing: it was not written, or the checkpoint is of fewer ranks."""

CHECKPOINTS: tuple[Signature, ...] = (
    row(
        Kind.CHECKPOINT_CORRUPT,
        ROOT,
        "EOFError: Ran out of input",
        r"EOFError: Ran out of input|invalid load key|pickle data was truncated|PytorchStreamReader failed",
        r"failed finding central directory|not a ZIP archive|File is not a zip file|storage has wrong size",
        r"unexpected EOF, expected|might be corrupted",
        r"(?:HeaderTooLarge|InvalidHeader\w*|MetadataIncompleteBuffer|incomplete metadata)",
        r"No such file or directory: '[^']{0,300}trainer_state",
    ),
    MISSING_FILE_OF_RANK,
    UNFIT_CHECKPOINT,
    row(
        Kind.CHECKPOINT_CORRUPT,
        ROOT,
        "ValueError: checkpoint step_100 is corrupt",
        r"(?i:(?:checkpoint|shard|weights?|model|optimizer)s?(?: files?| folder| states?)?[ -]\S{0,80} ?(?:is|are|may"
        r" be|was|were) (?:corrupt|damaged|truncated|incomplete))",
        r"(?i:corrupt(?:ed)? (?:checkpoint|safetensors|shard|weights)|checksum mismatch)",
        r"(?i:(?:0|zero)-byte (?:checkpoint|shard|file))",
        r"(?i:(?:checkpoint|adapter|provided path|folder)\b.{0,120}\b(?:does not|doesn't|do not) contain (?:a |any"
        r" )?\S{0,30} ?(?:weights?|checkpoint|model|adapter|optimizer))",
    ),
)

COLLECTIVES: tuple[Signature, ...] = (
    row(
        Kind.COLLECTIVE_MISMATCH,
        ROOT,
        "RuntimeError: Detected mismatch between collectives on ranks.",
        r"[Dd]etected mismatch between collectives",
        r"Rank \d+ is running (?:collective: )?\S+,? but [Rr]ank \d+ is running",
        r"(?i:mismatch\w* (?:between )?collective|collectives? mismatch)",
        r"(?:TYPE|DTYPE|SYNTAX|STATE|SIZE|COLLECTIVE)_MISMATCH|Message truncated : received",
        r"op\.preamble\.length <= op\.nbytes|DDP expects same model across all ranks",
        r"verify_params_across_processes|appears not to match strides",
        r"params? .{0,60}(?:sizes|shapes?) .{0,40}across (?:ranks|processes)",
    ),
    row(
        Kind.COLLECTIVE_HANG,
        SYMPTOM,
        "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE)",
        r"Watchdog caught collective operation timeout|ran for \d+ milliseconds before timing out",
        r"[Nn]ot all ranks (?:are )?join|collective (?:operation )?time-?d?[ -]?out",
        r"[Ll]ast enqueued (?:NCCL )?work: \d+|failure detected by watchdog at work sequence id",
        r"(?i:\b(?:hccl|rccl|oneccl|ucc)\b.{0,80}\btimed? ?-?out)",
        r"(?i:nccl (?:watchdog )?time-?out(?!\W{0,3}(?:is |was )?(?:set\b|\d))|nccl watchdog (?:fired|killed))",
    ),
    row(
        Kind.COLLECTIVE_HANG,
        SYMPTOM,
        "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 1800000ms for recv operation to complete",
        r"Timed out waiting \d+ms for (?:recv|send|all)|\bWait timeout\b",
        r"Timeout at (?:NCCL work|collective)|lagging/dead/mismatched ranks|[Mm]onitoredBarrier",
        r"heartbeat monitor.{0,80}(?:timed out|stuck)|watchdog (?:thread )?(?:got stuck|is stuck)",
        r"Rank \d+ (?:successfully reached|failed to (?:pass|reach)) (?:the )?monitoredBarrier",
    ),
)

FINDING_EACH_OTHER: tuple[Signature, ...] = (
    row(
        Kind.RENDEZVOUS,
        ROOT,
        "zmq.error.ZMQError: Address already in use (addr='tcp://127.0.0.1:29236')",
        r"EADDRINUSE|[Aa]ddress already in use|failed to listen on any local network address",
        r"Cannot assign requested address|[Pp]ort \d+ (?:is|was) (?:already )?(?:in use|used|occupied|taken|bound)",
        r"on port `?\d+`?, but another process is utilizing it",
    ),
    row(
        Kind.RENDEZVOUS,
        ROOT,
        "socket.gaierror: [Errno -2] Name or service not known",
        r"Name or service not known|[Nn]ame resolution|getaddrinfo failed",
        r"Unable to find (?:address|interface) for|no socket interface found|nodename nor servname",
        r"No address associated",
        r"[Cc]ould not resolve (?:host|hostname)",
    ),
    row(
        Kind.RENDEZVOUS,
        SYMPTOM,
        "RuntimeError: connect() timed out. Original timeout was 60000 ms.",
        r"connectFullMesh failed|client socket has (?:timed out|failed to connect)",
        r"wait timeout after \d+ms, keys|waiting for (?:clients|workers)\. |connect\(\) timed out|clients joined",
        r"store[- ]based barrier|Timed out initializing|Error: Socket Timeout|connection to the C10d store has failed",
        r"[Rr]endezvous\b.{0,60}(?:timed? ?out(?!\W{0,3}\d)|closed|failed)|[Tt]ime-?d? ?out\b.{0,60}\brendezvous",
        r"bootstrap\.cc.{0,80}(?:failed|error|timeout)",
        r"Timed out (?:after \d+ seconds )?waiting for .{0,40}(?:ranks|nodes|clients)",
        r"Only \d+/\d+ (?:nodes|ranks|workers)|failed to (?:recv|connect).{0,40}(?:TCPStore|store)",
        r"(?i:could not connect to (?:the )?ray|ray client connection timeout)",
        r"unable to reliably start one or more daemons|Host key verification failed",
        r"Connection to .{0,60}GCS.{0,40}(?:failed|timed out)|Failed to connect to GCS",
    ),
)

NUMBERS: tuple[Signature, ...] = (
    row(
        Kind.NON_FINITE,
        ROOT,
        "ValueError: Loss is nan, stopping training",
        r"(?i:\b(?:loss|grad(?:ient)?s?(?:[ _]norm)?|logits?|weights?|activations?|outputs?|rewards?|advantages?|log_"
        r"?probs?) (?:is|are|became|was|were|went|goes|turned|contains?|has) "
        r"(?:all )?(?:to )?:?(?:nan|inf|infinite|non-finite|not finite)s?\b)",
    ),
    row(
        Kind.NON_FINITE,
        ROOT,
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        r"Detected inf/nan|[Cc]urrent loss scale already at minimum|Minimum loss scale reached",
        r"returned nan values in its|contains either `?inf`?, `?nan`?|(?i:NaN detected|detected nan)",
        r"(?i:found (?:nan|inf)s? in|NaN or Inf (?:found|in))",
        r"(?i:(?:nan|inf) (?:value )?(?:in|for) (?:the )?(?:loss|grad|logit|weight))",
        r"(?i:non-?finite (?:loss|grad|norm|value|log)|(?i:encountered (?:nan|inf)\w* )|input contains NaN)",
        r"(?i:(?:loss|training) diverged)",
    ),
)

TENSORS: tuple[Signature, ...] = (
    row(
        Kind.SHAPE,
        ROOT,
        "RuntimeError: mat1 and mat2 shapes cannot be multiplied (5480x1536 and 1024x2048)",
        r"(?i:\btensors?\b.{0,40}\bmust (?:match|have the same|be (?:of|equal|the same)))",
        r"(?i:\bexpect(?:s|ed) (?:each|at least|input|tensors?|an? \w+-?dim).{0,60}\b(?:tensors?|dim))",
        r"(?i:\bnumber of (?:sizes|dim\w*) .{0,60}\b(?:must|should|do(?:es)? not)\b)",
        r"(?i:\b(?:size|shape|dim\w*)\b\W?.{0,40}\bmust (?:be equal|be the same|match))",
        r"IndexError: index -?\d+ is out of bounds for (?:dimension|axis)",
        r"(?i:\bexpected .{0,40}\b(?:size|shape|dim\w*)\b.{0,40}\bgot\b)",
        r"shapes cannot be multiplied|shape of the mask|inconsistent tensor size",
        r"expanded size of the tensor|mat1 and mat2 must have|self must be a matrix",
        r"Expected input batch_size|split_with_sizes expects|[Vv]iew size is not compatible|Expected hidden\[",
        r"shape '\[[^]]{0,100}\]' is invalid for input",
        r"zero-dimensional tensor .{0,40}cannot be concatenated|[Tt]ensors must have same number of dimensions",
        r"size of input tensor and input format are different",
    ),
    row(
        Kind.SHAPE,
        ROOT,
        "RuntimeError: shape mismatch: value tensor of shape [1024, 4096] does not fit",
        r"(?i:\bshapes? mismatch\b|size mismatch|(?:could|can)not be broadcast|could not be broadcast)",
        r"(?i:can't be broadcast)",
        r"(?i:shapes? .{0,100}(?:do(?:es)? not|don't|doesn't) match|mismatched (?:shapes?|sizes?|dim))",
        r"(?i:dimension mismatch|not broadcastable)",
        r"(?i:must have (?:the )?same (?:\w+ )?(?:shape|size|length|number of dimensions|dtype|leading dim))",
        r"(?i:Expected reduction dim)",
        r"(?i:expected input\[|Dimension out of range|expected scalar type|have the same dtype|too many indices for)",
        r"(?i:inhomogeneous shape)",
        r"(?i:Expected \d-?D|expects? \d-?D|Expected \d+ ?(?:or \d )?dim)",
        r"(?i:expected .{0,60}to have \d+ (?:channels|dim)|same number of elements)",
        r"(?:Image|Video|Audio) features and (?:image|video|audio) tokens do not match|Mismatch in `?\w+`? token count",
        r"(?:assert \S*\.(?:shape|size)|\.shape == |torch\.Size\(\[.{0,60}(?:!=|vs|but|must|does))",
    ),
)

USER_CODE: tuple[Signature, ...] = (
    row(
        Kind.REWARD_FUNCTION,
        ROOT,
        "NotImplementedError: Reward function is not implemented for data_source='mine'",
        r"(?:reward_?f\w+|compute_score)\(\) (?:missing|takes|got) ",
        r"(?i:reward[ _](?:function|fn|func|manager|worker|computation|loop)s?\b.{0,100}(?:not"
        r" implemented|failed|raised|error|crash|exception|timed out))",
        r"(?i:reward[ _](?:function|fn|func)s?\b.{0,60}(?:(?:must|did not) return|returned (?:None|nothing|wrong"
        r"|\d+ rewards)))",
        r"(?i:(?:error|exception|failed|failure) (?:in|while|during|when|computing|calling) (?:the )?(?:\w+ )?"
        r"(?:reward|compute_score|verifier))",
        r"(?i:(?:reward|compute_score|verifier)\w*\W{1,3}.{0,60}(?:Error|Exception):)",
    ),
)
