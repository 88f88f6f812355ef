"""Known bad combinations of versions, each with the report that it is taken from.

Every row has a public report of a failed run; nothing is guessed. A row states the installed versions (all must match),
the failure, the requirement to install instead, and the source. Rows about an engine or algorithm that rlhf-flows
itself lacks are for external trainers (``only_commands``). The versions are those of the training environment.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from rlhf_core.schemas.run import RunSpec


@dataclass(frozen=True)
class Use:
    """Parts of other projects that a run uses."""

    engine: str = ""
    """Rollout engine."""
    launcher: str = ""
    """Launcher, as :mod:`rlhf_core.shell.launch_line` names it."""


@dataclass(frozen=True)
class KnownBad:
    """One combination. It is fatal for runs that meet the conditions, and at most a warning for others."""

    packages: Mapping[str, str]
    """Distribution (normalised) to versions; all of them must be installed and match."""
    happens: str
    """Failure that these versions cause."""
    instead: str
    """Requirement to install instead."""
    source: str
    """Report of the failure or of its fix."""
    algorithms: frozenset[str] = frozenset()
    """Affected algorithms; empty for all."""
    engine: str = ""
    """Affected rollout engine; empty for all."""
    launcher: str = ""
    """Launcher with affected commands, as launch lines name it; empty for all."""
    only_on_gpus: bool = False
    """True if only runs that use NCCL are affected."""
    only_many_ranks: bool = False
    """True if only runs with several ranks are affected."""
    certain: bool = True
    """True if every run that meets the conditions fails; otherwise only some do."""
    only_commands: bool = False
    """True if only external trainers can be affected."""

    def applies_to(self, spec: RunSpec) -> bool:
        """Return True if the row applies to runs with this kind of trainer."""
        return spec.trainer.kind == "command" or not self.only_commands

    def matches(self, installed: Mapping[str, str]) -> bool:
        """Return True if these versions are installed."""
        return all(is_version_in(installed.get(name, ""), versions) for name, versions in self.packages.items())

    def concerns(self, spec: RunSpec, use: "Use | None" = None) -> bool:
        """Return True if a run meets the conditions.

        Args:
            use: parts that an external trainer uses; those of the native trainer by default.
        """
        use = use or Use(engine=spec.rollout.engine)
        return (
            (not self.algorithms or spec.algorithm.lower() in self.algorithms)
            and (not self.engine or use.engine == self.engine)
            and (not self.launcher or use.launcher == self.launcher)
            and (not self.only_on_gpus or spec.resources.gpus_per_node > 0)
            and (not self.only_many_ranks or spec.num_ranks > 1)
        )


def is_version_in(installed: str, versions: str) -> bool:
    """True if an installed version, empty for none, is in a range such as ``>=2.6``."""
    try:
        # Local labels (2.6.0+cpu) do not count, and pre-releases of a good version are good.
        return bool(installed) and SpecifierSet(versions).contains(Version(installed), prereleases=True)
    except InvalidVersion:
        return False


def is_cpu_build(installed: str) -> bool:
    """True if the local label of a version, as in ``2.6.0+cpu``, says that it was built without support for GPUs."""
    try:
        return "cpu" in (Version(installed).local or "").split(".")
    except InvalidVersion:
        return False


def _built_for(vllm: str, torch: str, source: str) -> KnownBad:
    """Row for a version of vLLM, whose compiled code requires one exact version of torch."""
    return KnownBad(
        {"vllm": f"=={vllm}", "torch": f"!={torch}"},
        f"vllm {vllm} is compiled for torch {torch}; with other versions its code does not load (undefined symbol)",
        f"torch=={torch}",
        source,
        engine="vllm",
        only_commands=True,
    )


KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        {"trl": ">=0.14,<0.17"},
        "CPO, SimPO and ORPO gather logits of different lengths from the ranks and hang in the first step",
        "trl>=0.17",
        "https://github.com/huggingface/trl/issues/3068 (since #2474, fixed by #3069; 0.13 is unaffected: #2879)",
        algorithms=frozenset({"cpo", "simpo", "orpo"}),
        only_many_ranks=True,
        only_commands=True,
    ),
    KnownBad(
        {"trl": "==0.15.0"},
        "SFT gathers logits of different lengths from the ranks, and hangs when their lengths differ",
        "trl>=0.15.2",
        "https://github.com/huggingface/trl/issues/2879 (fixed by #2890)",
        algorithms=frozenset({"sft"}),
        only_many_ranks=True,
        only_commands=True,
    ),
    KnownBad(
        {"trl": "<1.14.1"},
        "its commands (`trl grpo` and others) accept but ignore --resume_from_checkpoint: after every failure "
        "the training silently restarts at step 0",
        "trl>=1.14.1",
        "https://github.com/huggingface/trl/issues/3179",
        launcher="trl",
        certain=False,
        only_commands=True,
    ),
    KnownBad(
        {"torch": "==2.7.0"},
        "NCCL hangs occasionally when the process group gets its device, as in rlhf-flows",
        "torch>=2.7.1",
        "https://github.com/pytorch/pytorch/issues/153960",
        only_on_gpus=True,
        only_many_ranks=True,
    ),
    KnownBad(
        {"nvidia-nccl-cu12": "==2.25.1"},
        "aborting a communicator hangs, so ranks do not exit after one of them has failed",
        "nvidia-nccl-cu12>=2.26.2",
        "https://github.com/pytorch/pytorch/issues/149153",
        only_on_gpus=True,
        only_many_ranks=True,
        certain=False,
    ),
    *(
        KnownBad(
            {nccl: "==2.29.2"},
            "a regression in NCCL 2.29.2 causes hangs; 2.29.3 was released only to fix it",
            f"{nccl}>=2.29.3",
            "https://github.com/pytorch/pytorch/pull/174338",
            only_on_gpus=True,
            only_many_ranks=True,
            certain=False,
        )
        for nccl in ("nvidia-nccl-cu12", "nvidia-nccl-cu13")
    ),
    KnownBad(
        {"deepspeed": ">=0.17.6,<0.18.3"},
        "gradients of ZeRO 2 are too small; there are no reports for the other stages",
        "deepspeed>=0.18.3",
        "https://github.com/deepspeedai/DeepSpeed/issues/7718",
        certain=False,
    ),
    KnownBad(
        {"vllm": "<0.19.1", "transformers": ">=5"},
        "vllm before 0.19.1 requires transformers 4; with 5 its tokenizer does not load",
        "vllm>=0.19.1",
        "https://github.com/runpod-workers/worker-vllm/pull/258 and https://github.com/vllm-project/vllm/issues/30466",
        engine="vllm",
        only_commands=True,
    ),
    KnownBad(
        {"trl": "<0.26", "vllm": ">=0.12"},
        "this trl is incompatible with vllm 0.12 and newer",
        "trl>=1",
        "https://github.com/huggingface/trl/pull/4633",
        engine="vllm",
        certain=False,
        only_commands=True,
    ),
    KnownBad(
        {"latex2sympy2-extended": "<1.0.9", "antlr4-python3-runtime": "!=4.13.2"},
        "math-verify's parser does not load, and neither does the reward function gsm8k_answer",
        "math-verify[antlr4_13_2]>=0.8",
        "https://github.com/huggingface/lighteval/pull/1321 and https://github.com/TideDra/lmm-r1/issues/45",
        certain=False,
    ),
    _built_for("0.8.5", "2.6.0", "https://github.com/LMCache/LMCache/pull/583"),
    _built_for("0.10.0", "2.7.1", "https://github.com/nvidia-cosmos/cosmos-rl/pull/183"),
    _built_for("0.14.0", "2.9.1", "https://github.com/tenstorrent/tt-xla/issues/3402"),
    _built_for("0.16.0", "2.9.1", "https://github.com/vllm-project/vllm/issues/35462"),
    _built_for("0.17.1", "2.10.0", "https://github.com/infly-ai/INF-MLLM/issues/86"),
    _built_for("0.20.2", "2.11.0", "https://github.com/tenstorrent/tt-xla/issues/5559"),
    _built_for("0.27.0", "2.13.0", "https://github.com/huggingface/trl/pull/6742"),
    _built_for("0.27.1", "2.13.0", "https://github.com/huggingface/trl/pull/6742"),
)
