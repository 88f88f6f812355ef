"""Supervised fine-tuning: the warm start of a run, or its main algorithm."""

from rlhf_core.schemas.reports import Phase
from rlhf_core.training.algorithms.sft import sft_loss
from rlhf_core.training.batches import collate
from rlhf_core.training.data import encode_targets
from rlhf_core.training.models import PolicyModel
from rlhf_core.training.trainers.engine import Engine, learning_rate
from rlhf_core.training.trainers.session import Session, Stage, Totals


def train(session: Session, stage: Stage, policy: PolicyModel, engine: Engine) -> bool:
    """Make the steps of ``stage`` that are left.

    Returns:
        Whether it ended early because an agent asked for it.
    """
    ranks = session.ranks
    for number in session.steps_left(stage):
        step = session.begin_step(number)
        session.beat(Phase.TRAIN)
        rows, prompts = session.take_rows(session.spec.sft.batch_size)
        targets = encode_targets(rows, session.tokenizer)

        with step.watch.part("train"):
            own_tokens = sum(len(target) for target in targets)
            (num_tokens,) = ranks.sum([own_tokens])
            totals = Totals()
            lengths = [len(prompt) + len(target) for prompt, target in zip(prompts, targets, strict=True)]
            for part in session.micro_batches(lengths):
                session.beat(Phase.TRAIN)
                batch = collate(
                    [prompts[i] for i in part], [targets[i] for i in part], session.tokenizer.pad_token_id, ranks.device
                )
                logprobs, _ = engine(batch.input_ids, target_mask=batch.target_mask)
                loss, stats = sft_loss(logprobs, batch.target_mask, num_tokens)
                engine.backward(loss)
                totals.add(stats)
            rate = learning_rate(number - stage.first_step + 1, stage.optimizer, stage.num_steps)
            grad_norm = engine.step(rate)

        step.metrics.mean("train/loss", *totals.read("loss/sft"))
        step.metrics.shared("train/grad_norm", grad_norm)
        step.metrics.shared("train/changed_share", engine.changed_share(policy))
        step.metrics.shared("train/learning_rate", rate)
        step.metrics.total("train/num_tokens", own_tokens)
        step.metrics.total("speed/tokens_per_s", own_tokens / step.watch.seconds())
        if session.end_step(step, stage, policy.causal_lm, engine):
            return True
    return False
