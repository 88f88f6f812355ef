"""Completions of the model: scored completions before and after, and groups sampled in training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from rlhf_core.render.gather import ReportData
from rlhf_core.render.markup import Markup, code, fold, join, number, remark, signed, table, tag
from rlhf_core.schemas.evaluation import CORRECT_SCORE, EVALUATIONS, EvaluationSample
from rlhf_core.schemas.reports import SampleLine
from rlhf_core.text.formatting import count

_PER_GROUP = 4
_LONGEST = 600
_SHORT = 100
"""Characters of a cell, markup included."""
_GROUP_SHOWN = 8

_GROUPS = {
    (False, True): "Learned: wrong before, right after",
    (True, False): "Lost: right before, wrong after",
    (False, False): "Wrong both times",
    (True, True): "Right both times",
}
_CHANGES = {1: "Higher score after training", -1: "Lower score after training", 0: "Same score"}
"""Groups for scores that are not shares, such as penalties and rewards of a model: no such score is right or wrong."""
_CHANGES_OF_LOSS = {-1: "Lower loss after training", 1: "Higher loss after training", 0: "Same loss"}

_Pair = tuple[EvaluationSample, EvaluationSample]


def evaluation_samples(record: ReportData) -> Markup:
    """Prompts with the model's answers, right and wrong: greedy ones if available, or preferences."""
    for name in EVALUATIONS:
        before, after = record.tables.get(("before", name)), record.tables.get(("after", name))
        if before and after:
            return _compared(name, before, after)
        if after or before:
            return _alone(name, "after" if after else "before", after or before or ())
    return remark("No evaluation left a sample table.")


def training_samples(record: ReportData) -> Markup:
    """Groups of completions sampled in training: the first, a middle one, the last."""
    steps = sorted({line.step for line in record.samples})
    if not steps:
        return remark("No completions were kept in training.")
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]})
    return join(_group(step, [line for line in record.samples if line.step == step]) for step in chosen)


def _compared(name: str, before: Sequence[EvaluationSample], after: Sequence[EvaluationSample]) -> Markup:
    old = {(sample.prompt_uid, sample.sample_index): sample for sample in before}
    pairs = [(old[key], sample) for sample in after if (key := (sample.prompt_uid, sample.sample_index)) in old]
    parts: list[object] = [remark(f"Of the {count(len(pairs), f'{name} answer')} in both sample tables:")]
    are_shares = name != "loss" and _are_shares(sample for pair in pairs for sample in pair)
    changes = _CHANGES_OF_LOSS if name == "loss" else _CHANGES
    for title, members in _grouped(pairs, changes, are_shares=are_shares):
        rows = [
            [_text(new.prompt), _answer(was, are_shares), _answer(new, are_shares), _text(new.answer)]
            for was, new in members[:_PER_GROUP]
        ]
        parts.append(tag("h3", f"{title}: {len(members)}"))
        parts.append(table(["prompt", "before", "after", "reference"], rows, class_=_style(rows)))
    return join(parts)


def _grouped(
    pairs: Sequence[_Pair], changes: Mapping[int, str], *, are_shares: bool
) -> Iterator[tuple[str, list[_Pair]]]:
    """Group the pairs by the effect of training; yield the title and pairs of each group that is not empty.

    Args:
        changes: titles for scores that are not shares, by the sign of their change.
    """
    for key, title in (_GROUPS if are_shares else changes).items():
        members = [(was, new) for was, new in pairs if _group_of(was, new, are_shares=are_shares) == key]
        if members:
            yield title, members


def _group_of(was: EvaluationSample, new: EvaluationSample, *, are_shares: bool) -> object:
    return (_right(was), _right(new)) if are_shares else (new.score > was.score) - (new.score < was.score)


def _alone(name: str, when: str, scored: Sequence[EvaluationSample]) -> Markup:
    parts: list[object] = [remark(f"From the {name} evaluation {when} training; there is no other to compare with.")]
    are_shares = name != "loss" and _are_shares(scored)
    groups = ((True, "Right"), (False, "Wrong")) if are_shares else ((None, "Scored"),)
    for right, title in groups:
        members = [sample for sample in scored if right is None or _right(sample) == right]
        if members:
            rows = [
                [_text(sample.prompt), _answer(sample, are_shares), _text(sample.answer)]
                for sample in members[:_PER_GROUP]
            ]
            parts.append(tag("h3", f"{title}: {len(members)}"))
            parts.append(table(["prompt", "completion", "reference"], rows, class_=_style(rows)))
    return join(parts)


def _group(step: int, lines: Sequence[SampleLine]) -> Markup:
    parts = []
    for _, of_prompt in groupby(lines, key=lambda line: line.prompt_uid):
        group = list(of_prompt)
        rows = [
            [line.sample_index, _text(line.completion), line.reward, signed(line.advantage)]
            for line in group[:_GROUP_SHOWN]
        ]
        distinct = len({line.completion for line in group})
        mean = number(sum(line.reward for line in group) / len(group), 3)
        head = f"Step {step}: {count(len(group), 'completion')}, {distinct} distinct, mean reward {mean}"
        more = len(group) - len(rows)
        parts.append(
            fold(
                head,
                tag("p", "Prompt: ", _text(group[0].prompt), " Reference: ", _text(group[0].answer)),
                table(["sample", "completion", "reward", "advantage"], rows, class_=_style(rows)),
                remark(f"{more} more of this group are in samples.jsonl.") if more > 0 else "",
            )
        )
    return join(parts)


def _style(rows: Sequence[Sequence[object]]) -> str:
    """Choose the style of a table: columns of long text get equal widths."""
    return "samples long" if any(len(str(cell)) > _SHORT for row in rows for cell in row) else "samples"


def _right(sample: EvaluationSample) -> bool:
    return sample.score >= CORRECT_SCORE


def _are_shares(samples: Iterable[EvaluationSample]) -> bool:
    return all(0 <= sample.score <= 1 for sample in samples)


def _answer(sample: EvaluationSample, is_share: bool) -> Markup:
    if not is_share:
        return Markup(f"{tag('b', number(sample.score, 3))} {_text(sample.completion)}")
    mark = tag("span", "✓" if _right(sample) else "✗", class_="good" if _right(sample) else "bad")
    return Markup(f"{mark} {_text(sample.completion)}")


def _text(text: str) -> Markup:
    """Format a prompt or completion: line breaks kept, long text cut, empty text labelled."""
    if not text:
        return tag("em", "empty")
    cut = text[:_LONGEST]
    num_omitted = len(text) - len(cut)
    return Markup(code(cut) + (tag("em", f" … {count(num_omitted, 'character')} more") if num_omitted else Markup("")))
