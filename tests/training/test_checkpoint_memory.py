"""Kills in the middle of a save, and restarts from the nodes' memory: two ranks, each on its own node."""

import dataclasses
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from made_reports import checkpoint_manifest
from rank_launcher import flip_last_bit, launch, make_context, tiny_spec, values
from test_loop_online import spec_of
from test_loop_runs import SUPERVISED, final_state, metrics_of

from rlhf_core.files.appended import read_models
from rlhf_core.run_dir.checkpoint import CheckpointDir
from rlhf_core.run_dir.run import RunDir
from rlhf_core.schemas.checkpoint_files import FileChecksum
from rlhf_core.schemas.reports import AgentEvent
from rlhf_core.training.checkpoints.memory import resume as memory_resume
from rlhf_core.training.checkpoints.memory.copies import MemoryPart, newest_in_memory
from rlhf_core.training.checkpoints.state import Progress, TrainerState
from rlhf_core.training.data.tokenizers import build_tokenizer
from rlhf_core.training.models.causal_lm import build_causal_lm
from rlhf_core.training.models.gathering import save_weights
from rlhf_core.training.trainers import models as models_module
from rlhf_core.training.trainers import ppo
from rlhf_core.training.trainers.context import loops

pytestmark = [pytest.mark.training, pytest.mark.end_to_end]

MOMENTS = {"copy": 2, "write": 4, "complete": 4}
"""Moment of the save of step 4 at which a rank is killed, and the step from which the run resumes."""
KILLED = {**{moment: moment for moment in MOMENTS}, "unsharded": "write"}
"""Moment of each run that is killed."""


def context_of(rank: int, num_ranks: int, folder: str, name: str, restart: int = 0) -> Any:
    trainer = {"trainer": {"zero_stage": 0}} if name == "unsharded" else {}
    num_steps = 6 if name in {"longer", "unsharded"} else 4
    spec = tiny_spec(**{**SUPERVISED, "train": {**SUPERVISED["train"], "num_steps": num_steps}, **trainer})
    context = make_context(f"{folder}/{name}", spec, rank, num_ranks, restart)
    memory = Path(folder) / f"{name}-memory" / f"node-{rank}"
    return dataclasses.replace(context, node=f"node-{rank}", local_rank=0, memory=memory)


def kill_at(moment: str, rank: int, memory: Path, step_2: CheckpointDir) -> None:
    """Make this rank kill itself in the second save: while it copies, before it writes, or before COMPLETE."""
    from rlhf_core.run_dir import checkpoint as checkpoint_dir
    from rlhf_core.training.checkpoints import background_save
    from rlhf_core.training.models import tensor_files

    places: dict[str, tuple[Any, str, int]] = {
        "copy": (tensor_files.TensorImage, "fill", 1),
        "write": (background_save, "write_files", 1),
        "complete": (checkpoint_dir, "write_model", 0),
    }
    owner, name, victim = places[moment]
    killed_here = memory.with_name("killed")
    plain = getattr(owner, name)

    def die(*arguments: Any) -> Any:
        if not step_2.complete.exists():
            return plain(*arguments)
        other = memory.parent / f"node-{1 - rank}" / "parts" / f"rank-{1 - rank:05d}.json"
        while moment == "write" and not (other.exists() and '"step": 4' in other.read_text()):
            time.sleep(0.01)  # until the other node has its part
        killed_here.touch()
        return os.kill(os.getpid(), signal.SIGKILL)

    if rank == victim:
        setattr(owner, name, die)
    else:
        threading.Thread(target=end_after, args=(killed_here,), daemon=True).start()


def end_after(path: Path) -> None:
    """End this rank as its agent would after another rank was killed."""
    while not path.exists():
        time.sleep(0.01)
    os._exit(1)


def killed(rank: int, num_ranks: int, folder: str, name: str) -> None:
    from rlhf_core.training.trainers.run import run_trainer

    context = context_of(rank, num_ranks, folder, name)
    kill_at(KILLED[name], rank, context.memory, context.run_dir.checkpoint(2))
    run_trainer(context)


def resumed(rank: int, num_ranks: int, folder: str) -> dict[str, str]:
    """Scenario: all killed runs, one with a damaged copy, one with a stale copy, and one that was never killed."""
    from rlhf_core.training.distributed import init_process_group, leave_process_group
    from rlhf_core.training.trainers.run import train_run

    ranks = init_process_group(context_of(rank, num_ranks, folder, "straight"))
    results = {"straight": str(train_run(context_of(rank, num_ranks, folder, "straight"), ranks))}
    for name in (*KILLED, "damaged", "longer"):
        results[name] = str(train_run(context_of(rank, num_ranks, folder, name, restart=1), ranks))
    leave_process_group(ranks)
    return results


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the runs that were killed and resumed."""
    folder = tmp_path_factory.mktemp("memory")
    for name in KILLED:
        ended = launch(killed, 2, folder / f"{name}-launch", folder=str(folder), name=name)
        assert -signal.SIGKILL in [result.exit_code for result in ended], ended
    for part in ("", "-memory"):
        shutil.copytree(folder / f"write{part}", folder / f"damaged{part}")
        shutil.copytree(folder / f"write{part}", folder / f"longer{part}")
    flip_last_bit(folder / "damaged-memory" / "node-1" / "trainer_state" / "rank-00001.safetensors")
    for result in values(launch(resumed, 2, folder / "resumed", folder=str(folder))):
        assert result == dict.fromkeys(["straight", *KILLED, "damaged", "longer"], "done")
    return folder


@pytest.mark.parametrize(("moment", "step"), MOMENTS.items())
def test_killed_in_a_save_and_resumed_is_the_same_as_straight(folder: Path, moment: str, step: int) -> None:
    """The result is bitwise equal, from the newest step that all ranks have in memory, even if it never reached the
    disk."""
    after = metrics_of(folder, moment, restart=1)
    assert min(after) == step + 1 if step < 4 else after == {}
    straight = metrics_of(folder, "straight")
    assert metrics_of(folder, moment) | after == straight
    assert final_state(folder, moment, 4) == final_state(folder, "straight", 4)
    (event,) = events(folder, moment)
    whence = (
        f"resuming from the copy of step {step} in the memory"
        if step == 4
        else "resuming from files: the nodes have no"
    )
    assert event.message.startswith(whence)


def test_a_damaged_copy_is_refused_and_the_files_are_used(folder: Path) -> None:
    """Negative control: the test above resumes from the same copy, undamaged."""
    (event,) = events(folder, "damaged")
    assert event.message == (
        "resuming from files: the copy of step 4 in memory is damaged: "
        "trainer_state/rank-00001.safetensors does not match its checksum"
    )
    assert min(metrics_of(folder, "damaged", restart=1)) == 3
    assert final_state(folder, "damaged", 4) == final_state(folder, "straight", 4)


def test_a_node_keeps_the_weights_that_a_restart_brought_only_until_the_next_save(folder: Path) -> None:
    (event,) = events(folder, "longer")
    assert event.message.startswith("resuming from the copy of step 4 in the memory")
    memory = folder / "longer-memory"
    assert (memory / "node-0" / "model" / "model.safetensors").exists()
    left = {path.relative_to(memory / "node-1").as_posix() for path in (memory / "node-1").rglob("*") if path.is_file()}
    assert left == {
        "parts/rank-00001.json",
        "trainer_state/rank-00001.safetensors",
        "trainer_state/settings.json",
    }


def test_without_shards_a_node_gets_the_states_of_all_ranks(folder: Path) -> None:
    """In stage 0 every rank reads what the others wrote."""
    (event,) = events(folder, "unsharded")
    assert event.message.startswith("resuming from the copy of step 4 in the memory")
    assert set(metrics_of(folder, "unsharded", restart=1)) == {5, 6}


def test_a_value_model_comes_from_the_same_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the checkpoint on disk is read, which was not verified."""
    engine = Mock()
    monkeypatch.setattr(models_module, "Engine", engine)
    ranks = Mock(device=torch.device("cpu"), sequence=None)
    context = make_context(str(tmp_path / "run"), spec_of("ppo"), 0, 1, restart=1)
    tokenizer = build_tokenizer("char", [], 0)
    policy, memory = build_causal_lm(tiny_spec()["model"]["config"], tokenizer, 0), CheckpointDir(tmp_path, 4)
    policy.save_pretrained(memory.model)
    saved = ppo.ValueModel(policy)
    torch.nn.init.ones_(saved.head.bias)
    memory.critic.mkdir()
    save_weights(saved, memory.critic / "model.safetensors", True, lambda: None)
    models = models_module.RunModels(context, ranks, tokenizer, tmp_path / "initial", memory, lambda: None)
    state = TrainerState(Progress(step=4, loop="ppo", loop_finished=False, position=0), (), None, critic=({},))
    models.critic(loops(context.spec)[-1], state)
    assert engine.call_args.args[0].head.bias.item() == 1.0


def events(folder: Path, name: str) -> list[AgentEvent]:
    restart = RunDir(folder / name).attempt(1).restart(1)
    return list(read_models(restart.worker_events("trainer", "node-0", 0), AgentEvent))


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the copy


def part(rank: int, step: int = 4, save: str = "a", num_ranks: int = 2, spec_hash: str = "spec") -> MemoryPart:
    names = [f"trainer_state/rank-{rank:05d}.safetensors", *(["model/config.json"] if rank == 0 else [])]
    files = {name: FileChecksum(bytes=1, sha256="0" * 64) for name in names}
    manifest = checkpoint_manifest(step, num_ranks=num_ranks, spec_hash=spec_hash, files=files)
    return MemoryPart(save=save, attempt=1, rank=rank, manifest=manifest)


@pytest.mark.parametrize(
    ("parts", "step"),
    [
        ([part(0), part(1)], 4),
        ([part(0), part(1), part(1), part(0)], 4),
        ([part(0)], None),
        ([part(0, 6, "b"), part(1)], None),
        ([part(0, 4, "b"), part(1)], None),
        ([part(0, 6, "b"), part(1), part(1, 6, "b"), part(0)], 6),
        ([part(0, num_ranks=3), part(1, num_ranks=3)], None),
        ([part(0, spec_hash="other"), part(1, spec_hash="other")], None),
    ],
    ids=["whole", "twice", "a part lacks", "of two steps", "of two saves", "newest", "ranks", "settings"],
)
def test_a_copy_counts_that_all_ranks_have_a_part_of(parts: list[MemoryPart], step: int | None) -> None:
    found = newest_in_memory(parts, 2, "spec")
    assert (found.manifest.step if found else None) == step


def test_a_node_needs_the_state_of_its_ranks_and_what_belongs_to_all() -> None:
    found = newest_in_memory([part(0), part(1)], 2, "spec")
    assert found is not None
    assert found.needed([1]) == ["model/config.json", "trainer_state/rank-00001.safetensors"]
    assert found.needed([1], every_state=True) == list(found.manifest.files)


@pytest.mark.parametrize(
    ("on_disk", "damaged", "words"),
    [
        (2, frozenset(), ""),
        (4, frozenset(), ""),
        (None, frozenset(), ""),
        (6, frozenset(), "the copy in memory is of step 4, the files are of step 6"),
        (2, frozenset({"step-000004"}), "the checkpoint of step 4 was found damaged"),
    ],
)
def test_a_stale_copy_is_refused(tmp_path: Path, on_disk: int | None, damaged: frozenset[str], words: str) -> None:
    context = dataclasses.replace(context_of(0, 2, str(tmp_path), "run", 1), damaged=damaged)
    found = newest_in_memory([part(0), part(1)], 2, "spec")
    assert memory_resume.refusal(context, found, on_disk, lambda _: False) == words


@pytest.mark.parametrize("is_same", [True, False])
def test_a_copy_of_an_earlier_attempt_has_to_be_what_the_controller_chose(tmp_path: Path, is_same: bool) -> None:
    context = dataclasses.replace(context_of(0, 2, str(tmp_path), "run"), attempt=2)
    found = newest_in_memory([part(0), part(1)], 2, "spec")
    refused = memory_resume.refusal(context, found, 4, lambda _: is_same)
    whole = "the copy in memory is of step 4 of attempt 1, not of the checkpoint to resume from"
    assert refused == ("" if is_same else whole)
