"""One sync over all engines, driven by the trainer: offers, weights, receipts, commit."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

from rlhf_core.errors import WeightSyncFailed
from rlhf_core.schemas.weight_sync import Receipt, SentVersion, TensorEntry, WeightSyncReport
from rlhf_core.weight_sync.base import Beat, EngineControl, Weights
from rlhf_core.weight_sync.sender import Sender, Transfer

BEAT_INTERVAL_S = 0.5
"""Seconds between two beats while engines are waited for."""

_Answer = TypeVar("_Answer")


def synchronize(
    sender: Sender,
    engines: Sequence[EngineControl],
    version: int,
    tensors: Sequence[TensorEntry],
    weights: Weights,
    beat: Beat,
    *,
    is_alone: bool = False,
) -> WeightSyncReport:
    """Commit a version on all engines, or on none.

    No engine is told to commit before every engine has staged and verified the version. An engine that is lost between
    its receipt and its commit is named in the report: the version is active on the others, and this engine has none, as
    it has to be restarted.

    Args:
        weights, is_alone: see :meth:`Sender.offer`.

    Raises:
        WeightSyncFailed: the version is active nowhere, and the previous one stays active. ``peer`` names the process
            that is to blame.
        DiskFull: likewise, for lack of room on the file system of the transport.
    """
    names = [engine.name for engine in engines]
    with ThreadPoolExecutor(max_workers=len(engines), thread_name_prefix="weight-sync") as pool:
        transfer = sender.offer(version, tensors, weights, names, beat, is_alone=is_alone)
        try:
            receipts = _staged(transfer, engines, pool, beat)
        except BaseException:
            _outcomes(engines, lambda engine: engine.abort(version), pool, beat)  # whatever those say that are lost
            raise
        applied, lost = _outcomes(engines, lambda engine: engine.commit(version), pool, beat)
    sender.settle(transfer, applied)
    problems = {name: str(error) for name, error in lost.items()}
    return WeightSyncReport(sent=transfer.sent, receipts=receipts, applied=applied, lost=problems)


def culprit(failures: Mapping[str, Exception], senders: Collection[str]) -> str:
    """Name of the process that caused a failed transfer.

    An engine whose control channel is lost comes first. The neighbours of a lost process report failures too: each
    failure that names a peer is followed to that peer, as long as that one names another. Senders stop when an engine
    has failed, so a sender is to blame only if no engine is. Of several senders, it is the one that names itself, or
    that others name and that reported nothing, because the others were told to stop.

    Args:
        failures: errors by the name of the process that reports them, those of engines first; at least one.
        senders: names of all senders.
    """
    unreachable = [name for name, error in failures.items() if not isinstance(error, WeightSyncFailed)]
    ends = [*unreachable, *(_follow_peers(name, failures) for name in failures)]
    engines = [name for name in ends if name not in senders]
    own = [name for name in ends if name not in failures or getattr(failures[name], "peer", "") == name]
    return next(iter([*engines, *own, *ends]))


def _follow_peers(name: str, failures: Mapping[str, Exception]) -> str:
    seen = set[str]()
    while name in failures and name not in seen:
        seen.add(name)
        name = getattr(failures[name], "peer", "") or name
    return name


def _staged(
    transfer: Transfer, engines: Sequence[EngineControl], pool: ThreadPoolExecutor, beat: Beat
) -> tuple[Receipt, ...]:
    """Send the weights while every engine receives; returns the receipts, which all agree."""
    receiving = {
        engine.name: pool.submit(engine.receive, offer) for engine, offer in zip(engines, transfer.offers, strict=True)
    }
    for future in receiving.values():
        future.add_done_callback(lambda done: transfer.cancel() if done.exception() else None)
    failures: dict[str, Exception] = {}
    try:
        transfer.send(beat)
    except WeightSyncFailed as error:
        failures[transfer.senders[0]] = error
    except BaseException:
        _wait_for_all(receiving, beat)  # an engine accepts no other request before it has stopped receiving
        raise
    receipts, refused = _wait_for_all(receiving, beat)
    failures = {**refused, **failures, **transfer.failures_of_others(beat)}
    if failures:
        raise _failure_of(failures, transfer.senders)
    _require_agreement(transfer.sent, receipts)
    return tuple(receipts.values())


def _require_agreement(sent: SentVersion, receipts: Mapping[str, Receipt]) -> None:
    """Refuse a commit unless every engine has staged exactly the version that was sent.

    Args:
        receipts: by the name of the engine.

    Raises:
        WeightSyncFailed: one is for another version or other weights. ``peer`` names the engine.
    """
    for name, receipt in receipts.items():
        if (receipt.version, receipt.digest) != (sent.version, sent.digest):
            raise WeightSyncFailed(
                f"{name} has staged version {receipt.version} with digest {receipt.digest}, expected version "
                f"{sent.version} with digest {sent.digest}; send the whole weights again",
                name,
            )


def _failure_of(failures: Mapping[str, Exception], senders: Collection[str]) -> WeightSyncFailed:
    """Error of a failed transfer: that of the process to blame, with the errors of all others."""
    name = culprit(failures, senders)
    naming = [error for error in failures.values() if getattr(error, "peer", "") == name]
    own = failures.get(name)
    # A sender that was told to stop does not report what another process has found out about it.
    was_cancelled = isinstance(own, WeightSyncFailed) and own not in naming
    main = own if own is not None and not (was_cancelled and naming) else naming[0]
    others = "; ".join(f"{process}: {error}" for process, error in failures.items() if error is not main)
    text = f"{main}" if isinstance(main, WeightSyncFailed) else f"{name} is lost: {main}"
    # Several may lack memory on one node: the next try would otherwise leave out only one of them.
    failed = [one for one, error in failures.items() if getattr(error, "peer", one) == one and one not in senders]
    return WeightSyncFailed(
        f"{text}{f' ({others})' if others else ''}", name, tuple(one for one in failed if one != name)
    )


def _outcomes(
    engines: Iterable[EngineControl], call: Callable[[EngineControl], _Answer], pool: ThreadPoolExecutor, beat: Beat
) -> tuple[dict[str, _Answer], dict[str, Exception]]:
    """Results and errors of a call to each engine, all calls running concurrently."""
    return _wait_for_all({engine.name: pool.submit(call, engine) for engine in engines}, beat)


def _wait_for_all(
    calls: Mapping[str, "Future[_Answer]"], beat: Beat
) -> tuple[dict[str, _Answer], dict[str, Exception]]:
    pending: set[Future[_Answer]] = set(calls.values())
    while pending:
        pending = wait(pending, timeout=BEAT_INTERVAL_S).not_done
        beat()
    answers: dict[str, _Answer] = {}
    failures: dict[str, Exception] = {}
    for name, call in calls.items():
        try:
            answers[name] = call.result()
        except (WeightSyncFailed, OSError) as error:
            failures[name] = error
    return answers, failures
