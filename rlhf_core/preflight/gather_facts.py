"""Collection of the facts: thin functions that read files, query the scheduler and start one subprocess per query."""

import hashlib
import importlib.metadata
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement as PackageRequirement
from packaging.utils import canonicalize_name

from rlhf_core import __version__
from rlhf_core.config.site import Site
from rlhf_core.files.fingerprints import fingerprint_or_problem
from rlhf_core.files.whole import read_object
from rlhf_core.machine.interpreters import LISTING_CODE
from rlhf_core.preflight.data_file import scan_files
from rlhf_core.preflight.facts import (
    Baseline,
    CheckpointFacts,
    ComputeSide,
    Disk,
    Facts,
    ModelFolder,
    ModelTypes,
    Requirement,
    RewardModelFolder,
)
from rlhf_core.preflight.gather_trainer import inspect_trainer
from rlhf_core.preflight.missing_paths import missing
from rlhf_core.preflight.model_types import read_causal_types, read_model_types
from rlhf_core.preflight.plugins import load_plugins
from rlhf_core.preflight.program_queries import Tick, ask_worker, query_program, secrets_of
from rlhf_core.preflight.weight_files import inspect_weights
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.initial_model import model_config
from rlhf_core.run_dir.run import promoted_models
from rlhf_core.schemas.cluster import SlurmSpec
from rlhf_core.schemas.content import ContentReport
from rlhf_core.schemas.model import BUILT_TOKENIZERS, ModelSpec
from rlhf_core.schemas.resources import Inventory
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import PROMOTED

CONTENT_CHECKS = (
    "content.columns",
    "content.tokenizer",
    "content.chat_template",
    "content.conversations",
    "content.lengths",
    "content.labels",
    "content.pipeline",
    "content.rewards",
)
"""Checks that share one reading of the data, which takes seconds."""


@dataclass(frozen=True)
class Surroundings:
    """Site and code around a run."""

    site: Site
    inventory: Inventory
    scheduler: str
    """``local`` or ``slurm``."""
    code_path: Path
    """Folder with the user's code as the nodes will see it."""
    code_sources: Sequence[Path] = ()
    """Files and folders that this code was copied from, which messages name in place of the copies; empty to name the
    copies."""
    resume: CheckpointDir | None = None
    """The checkpoint to resume from, if the run is resumed."""
    stored_version: str = ""
    """Version of rlhf-flows that created the run, if it is resumed."""
    baseline: Baseline = field(default_factory=Baseline)

    def of_the_user(self, text: str) -> str:
        """Replace the copies of the user's files in a message by the originals."""
        for source in self.code_sources:
            text = text.replace(str(self.code_path / source.name), str(source))
        return text

    def ask_worker(self, spec: RunSpec, tick: Tick, *words: str) -> dict[str, Any] | str:
        """Answer of ``rlhf_core.worker`` with the user's code on its path, as :func:`ask_worker`."""
        answer = ask_worker(spec, self.site, *words, "--path", str(self.code_path), tick=tick)
        return self.of_the_user(answer) if isinstance(answer, str) else answer


def gather(spec: RunSpec, around: Surroundings, tick: Tick = lambda: None) -> Facts:
    """Gather everything the checks need. Takes seconds: the compute interpreter is started a few times."""
    site, compute = around.site, inspect_compute_python(around.site.compute_python, tick)
    # Another version would answer in its own words (environment.rlhf_flows reports it). Without pydantic, our modules
    # cannot be imported there (environment.packages reports it).
    usable = compute.rlhf_flows == __version__ and "pydantic" in compute.packages
    imports = try_imports(spec, around, tick) if usable else {}
    native = spec.trainer.kind == "native"
    # External trainers read the data in their own way, so the content checks do not apply.
    content = _content(spec, around, compute, imports, tick) if usable and native else None
    promoted = Path(spec.promote.folder) if spec.promote.folder else promoted_models(site.runs_dir)
    slurm = spec.slurm.over(site.slurm) if around.scheduler == "slurm" else SlurmSpec()
    transformers = Path(compute.transformers) if native and compute.transformers else None
    folder = inspect_model(spec.model)
    return Facts(
        spec=spec,
        inventory=around.inventory,
        scheduler=around.scheduler,
        control_version=__version__,
        compute=compute,
        requirements=training_requirements(),
        disk=inspect_disk(site.runs_dir),
        imports=imports,
        missing_code=missing_code(spec),
        code_hash=hash_code(around.code_path, tick),
        files=scan_files(spec, spec.data.files, tick),
        model_config=folder.config if folder else model_config(spec.model),
        model_types=read_model_types(transformers, spec.model.config) if transformers else ModelTypes(),
        causal_types=read_causal_types(transformers) if transformers else frozenset(),
        model_folder=folder,
        reward_models=_inspect_reward_models(spec),
        references=_inspect_references(spec),
        tokenizer_problem=inspect_tokenizer(spec.model) if native else "",
        promote_folder="" if spec.promote.when == "never" else str(promoted),
        promote_problem="" if spec.promote.when == "never" else inspect_disk(promoted).problem,
        resume=inspect_checkpoint(around.resume),
        stored_version=around.stored_version,
        plugins=load_plugins(),
        content=content if isinstance(content, ContentReport) else None,
        content_problem=content if isinstance(content, str) else "",
        baseline=around.baseline,
        site_slurm=site.slurm,
        job_secrets=site.job_secrets,
        passed_problem=secrets_of(spec, site).problem(),
        trainer=None if native else inspect_trainer(spec, site.home, around.code_path, slurm, tick),
    )


def missing_code(spec: RunSpec) -> tuple[str, ...]:
    """Code of the run that does not exist, or that this user may not read."""
    return tuple(path for path in spec.code.paths if not os.access(path, os.R_OK))


def gather_for_predictions(spec: RunSpec, inventory: Inventory, site_slurm: SlurmSpec) -> Facts:
    """Gather what predictions and the checks of memory need. No process is started, and of the data only the held-out
    pairs are read, whose columns decide whether they are completed."""
    held_out = {setting: path for setting, path in spec.data.files.items() if setting.endswith(".eval")}
    folder = inspect_model(spec.model)
    return Facts(
        spec=spec,
        inventory=inventory,
        scheduler="",
        control_version=__version__,
        compute=ComputeSide(""),
        requirements=(),
        disk=Disk(Path()),
        files=scan_files(spec, held_out) if spec.data_kinds == {"pair"} else {},
        model_config=folder.config if folder else model_config(spec.model),
        model_folder=folder,
        reward_models=_inspect_reward_models(spec),
        references=_inspect_references(spec),
        site_slurm=site_slurm,
    )


def _inspect_reward_models(spec: RunSpec) -> dict[str, RewardModelFolder]:
    return {name: inspect_reward_model(one.path) for name, one in spec.scoring_models.items()}


def _inspect_references(spec: RunSpec) -> dict[str, ModelFolder]:
    return {setting: inspect_reference(path) for setting, path in spec.references.items()}


def _content(
    spec: RunSpec, around: Surroundings, compute: ComputeSide, imports: Mapping[str, str], tick: Tick
) -> ContentReport | str | None:
    """Report on the content; None if another check reports why it cannot be read, or if all its checks are off."""
    if all(id in spec.preflight.off for id in CONTENT_CHECKS) or "transformers" not in compute.packages:
        return None
    broken = [name for name, problem in imports.items() if problem]
    return f"{', '.join(broken)} does not import" if broken else inspect_content(spec, around, tick)


# ---------------------------------------------------------------------------------------------------------------------
# The compute interpreter


def inspect_compute_python(python: str, tick: Tick = lambda: None) -> ComputeSide:
    """Version and packages of the interpreter that the nodes start. Imports none of them."""
    answer = query_program([python, "-c", LISTING_CODE], tick)
    if isinstance(answer, str):
        return ComputeSide(python, problem=answer)
    return ComputeSide(
        python,
        version=tuple(answer["version"]),
        packages=answer["packages"],
        rlhf_flows=answer["rlhf_flows"],
        transformers=answer["transformers"],
    )


def try_imports(spec: RunSpec, around: Surroundings, tick: Tick = lambda: None) -> dict[str, str]:
    """Import every function that the config names, in the compute interpreter: name to problem, empty if none."""
    functions = spec.reward.functions if spec.trainer.kind == "native" else ()
    turns = spec.rollout.turns.functions
    measured = (spec.evaluate.scorer_function, spec.data.generator, *turns) if spec.is_evaluated else turns
    names = dict.fromkeys([*functions, *measured])
    found = {}
    for name in filter(None, names):
        answer = around.ask_worker(spec, tick, "check-import", name)
        if isinstance(answer, str):
            found[name] = answer
        else:
            found[name] = "" if answer["ok"] else around.of_the_user(str(answer["error"]))
    return found


def inspect_content(spec: RunSpec, around: Surroundings, tick: Tick = lambda: None) -> ContentReport | str:
    """Inspect rows, tokenizer and rewards in the compute interpreter; return the error as a sentence if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spec.json"
        path.write_text(spec.model_dump_json(), encoding="utf-8")
        answer = around.ask_worker(spec, tick, "check-content", "--spec", str(path))
    if isinstance(answer, str):
        return answer
    report = ContentReport.model_validate(answer)
    rewards = [one.model_copy(update={"message": around.of_the_user(one.message)}) for one in report.rewards]
    splits = [one.model_copy(update={"problem": around.of_the_user(one.problem)}) for one in report.splits]
    return report.model_copy(update={"rewards": tuple(rewards), "splits": tuple(splits)})


def training_requirements() -> tuple[Requirement, ...]:
    """Requirements of the training extra of the installed rlhf-flows; empty if it is not installed as a package."""
    try:
        lines = importlib.metadata.requires("rlhf-flows") or []
    except importlib.metadata.PackageNotFoundError:
        return ()
    return select_requirements(lines, "training")


def select_requirements(lines: Sequence[str], extra: str) -> tuple[Requirement, ...]:
    """The requirements that one extra adds, from the lines of a package's metadata."""
    found = []
    for line in lines:
        requirement = PackageRequirement(line)
        marker = requirement.marker
        if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
            found.append(Requirement(canonicalize_name(requirement.name), str(requirement.specifier)))
    return tuple(found)


# ---------------------------------------------------------------------------------------------------------------------
# This machine


def hash_code(folder: Path, tick: Tick = lambda: None) -> str:
    """Short hash of the names and contents of all files in a folder, except ``.pyc`` files; empty if there are none."""
    found = folder.rglob("*") if folder.is_dir() else ()
    files = sorted(path for path in found if path.is_file() and path.suffix != ".pyc")
    digest = hashlib.blake2b(digest_size=4)
    for path in files:
        tick()
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(os.fsencode(f"{path.relative_to(folder)} {content}\n"))
    return digest.hexdigest() if files else ""


def inspect_disk(runs_dir: Path) -> Disk:
    """Check that run directories can be created, by creating one, and measure the free space. Leaves nothing behind."""
    existing = runs_dir
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(prefix=".rlhf-check-", dir=existing):
            pass
        usage, statistics = shutil.disk_usage(existing), os.statvfs(existing)
        # File systems that create inodes on demand (btrfs, many network ones) report a total of 0.
        has_limit = statistics.f_files > 0
        return Disk(
            runs_dir,
            free_bytes=usage.free,
            total_bytes=usage.total,
            free_files=statistics.f_favail if has_limit else None,
            total_files=statistics.f_files if has_limit else None,
        )
    except OSError as error:
        return Disk(runs_dir, problem=error.strerror or str(error))


# ---------------------------------------------------------------------------------------------------------------------
# Model and checkpoint


def inspect_model(model: ModelSpec) -> ModelFolder | None:
    """Inspect ``model.path``; None if it is not set."""
    return _inspect_folder(Path(model.path)) if model.path else None


def _inspect_folder(path: Path) -> ModelFolder:
    try:
        if not path.is_dir():
            return ModelFolder(path, problem="it is a file" if path.exists() else missing(path, "folder"))
        if not (path / "config.json").is_file():
            return ModelFolder(path, problem="it has no config.json")
    except OSError as error:
        return ModelFolder(path, problem=f"it is not accessible: {error.strerror}")
    weights = inspect_weights(path)
    config = model_config(ModelSpec(path=str(path)))
    return ModelFolder(path, weights.problem, weights.num_bytes, weights.matrices, config)


def inspect_reference(text: str) -> ModelFolder:
    """Inspect a folder of a model that may be named as that of a run, such as ``loops.<name>.reference``."""
    if text.startswith(PROMOTED):  # otherwise it would have been replaced by its folder
        problem = f"no run called {text.removeprefix(PROMOTED)} has promoted a model here"
        return ModelFolder(Path(text), problem)
    return _inspect_folder(Path(text))


def inspect_reward_model(text: str) -> RewardModelFolder:
    """Inspect a reward model that scores completions, given as ``reward.models.<name>.path``."""
    found = inspect_reference(text)
    if found.problem:
        return RewardModelFolder(found.path, found.problem)
    tokenizer = read_object(found.path / "tokenizer_config.json")
    return RewardModelFolder(
        found.path,
        _lack_of_a_reward_model(found.path, found.config),
        found.weight_bytes,
        found.matrices,
        found.config,
        has_chat_template="chat_template" in tokenizer or (found.path / "chat_template.jinja").is_file(),
        fingerprint=fingerprint_or_problem(found.path),
    )


def _lack_of_a_reward_model(path: Path, config: Mapping[str, Any]) -> str:
    architectures = [str(name) for name in config.get("architectures") or ()]
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        return (
            f"it is a {', '.join(architectures) or 'model of an unknown class'}, which has no sequence "
            "classification head"
        )
    labels = config.get("id2label") or {}
    num_outputs = len(labels) if isinstance(labels, Mapping) and labels else int(config.get("num_labels") or 2)
    if num_outputs != 1:
        return f"it has {num_outputs} outputs"
    return _lack_of_a_tokenizer(path)


def inspect_tokenizer(model: ModelSpec) -> str:
    """Reason why the tokenizer is not a tokenizer folder; empty if it is one or is built."""
    if model.tokenizer in BUILT_TOKENIZERS:
        return ""
    folder = Path(model.tokenizer or model.path)
    try:
        if folder.is_dir():
            return _lack_of_a_tokenizer(folder)
        problem = missing(folder, "folder")
    except OSError as error:
        problem = f"it is not accessible: {error.strerror}"
    return problem if model.tokenizer else ""  # the model's own folder is reported by model.folder


def _lack_of_a_tokenizer(folder: Path) -> str:
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return "" if any((folder / name).is_file() for name in names) else "it contains no tokenizer"


def inspect_checkpoint(checkpoint: CheckpointDir | None) -> CheckpointFacts | None:
    """Inspect the checkpoint to resume from: its ranks, and files of a wrong size. Hashes are checked on loading."""
    manifest = checkpoint.manifest() if checkpoint else None
    if checkpoint is None or manifest is None:
        return None
    problems = []
    for name, expected in manifest.files.items():
        try:
            size = (checkpoint.root / name).stat().st_size
        except OSError as error:
            problems.append(f"{name}: {error.strerror}")
            continue
        if size != expected.bytes:
            problems.append(f"{name}: found {size} bytes, expected {expected.bytes}")
    return CheckpointFacts(checkpoint.root.name, checkpoint.step, manifest.num_ranks, tuple(problems))
