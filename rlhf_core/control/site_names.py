"""Names in a spec that only the site can resolve to folders: environments of trainers, promoted models."""

from rlhf_core.config.site import Site
from rlhf_core.errors import BadConfig
from rlhf_core.launch.promote import newest_promoted
from rlhf_core.machine.environments import environment_folder
from rlhf_core.run_dir.run import promoted_models
from rlhf_core.schemas.command_trainer import CommandTrainer
from rlhf_core.schemas.run import RunSpec
from rlhf_core.schemas.scoring_models import PROMOTED


def for_site(spec: RunSpec, site: Site) -> RunSpec:
    """The spec with folders in place of names, because the nodes do not know the site. A name that cannot be resolved
    is left as it is, and a preflight check reports it."""
    return _with_promoted_models(_with_environment(spec, site), site)


def _with_environment(spec: RunSpec, site: Site) -> RunSpec:
    trainer = spec.trainer
    if not isinstance(trainer, CommandTrainer) or not trainer.environment:
        return spec
    try:
        folder = str(environment_folder(trainer.environment, site.home))
    except BadConfig:
        return spec
    return spec.model_copy(update={"trainer": trainer.model_copy(update={"environment": folder})})


def _with_promoted_models(spec: RunSpec, site: Site) -> RunSpec:
    def found(path: str) -> str:
        if not path.startswith(PROMOTED):
            return path
        return str(newest_promoted(promoted_models(site.runs_dir), path.removeprefix(PROMOTED)) or path)

    models = {name: one.model_copy(update={"path": found(one.path)}) for name, one in spec.reward.models.items()}
    loops = {
        name: loop.model_copy(update={"reference": found(loop.reference)}) for name, loop in spec.loops.named.items()
    }
    return spec.model_copy(
        update={
            "reward": spec.reward.model_copy(update={"models": models}),
            "loops": spec.loops.model_copy(update=loops),
        }
    )
