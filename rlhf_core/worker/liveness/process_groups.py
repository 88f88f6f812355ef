"""Positions of a rank in its process groups, from the contents of its flight recorder."""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rlhf_core.schemas.reports import GroupPlace, RankStatus

_PEER = re.compile(r"(send|recv) \d+(->|<-)(?P<peer>\d+)")
"""Name of a send or receive with the peer's rank in the group: ``nccl:send 1->2``, ``nccl:recv 3<-0``."""
_Entry = Mapping[str, Any]


def with_process_groups(ranks: Iterable[RankStatus], answers: Mapping[int, str]) -> list[RankStatus]:
    """Add to each status the positions in process groups, if the worker has answered."""
    return [with_places(rank, answers.get(rank.local_rank, "{}")) for rank in ranks]


def with_places(rank: RankStatus, content: str) -> RankStatus:
    """Add to a status the worker's positions in its process groups, and the collective that it entered last.

    Args:
        rank: Status read from the worker's slot.
        content: The worker's answer. The status is unchanged if it cannot be parsed, or if the program numbers its
            ranks in another way.
    """
    try:
        answer = json.loads(content)
        if answer["rank"] != rank.rank:
            return rank
        places = _places(answer["recorders"], answer["groups"])
    except (ValueError, TypeError, KeyError, IndexError, AttributeError):
        return rank
    last = next((place for place in places if place.entered), None)
    changes: dict[str, Any] = {"process_groups": tuple(places)}
    if last is not None:
        number = last.entered if last.waits_in is None else last.waits_in
        changes |= {"collective": last.operation, "collective_sequence": number, "collective_shape": last.shape}
    return rank.model_copy(update=changes)


def _places(recorders: Sequence[_Entry], members: Mapping[str, Sequence[int]]) -> list[GroupPlace]:
    """Positions in the groups with these members, the one entered last first."""
    num_ranks = max(map(len, members.values()), default=0)
    found: list[tuple[int, GroupPlace]] = []
    for recorder in recorders:
        of_group: dict[tuple[str, str], list[_Entry]] = defaultdict(list)
        for entry in recorder["entries"]:
            name, backend = entry["process_group"][0], entry["profiling_name"].partition(":")[0]
            if name in members:
                of_group[name, backend].append(entry)
        for (name, backend), entries in of_group.items():
            place = _place(name, backend, entries, recorder["pg_status"], members[name])
            if len(place.members) == num_ranks:  # not a thousand times a thousand numbers
                place = place.model_copy(update={"members": ()})
            found.append((entries[-1]["time_created_ns"], place))
    found.sort(key=lambda one: -one[0])
    places = [place for _, place in found]
    if all(recorder["entries"][0]["record_id"] == 0 for recorder in recorders):  # nothing was overwritten
        entered = {place.name for place in places}
        places += [GroupPlace(name=name) for name in members if name not in entered]
    return places


def _place(
    name: str, backend: str, entries: Sequence[_Entry], status: Mapping[str, _Entry], members: Sequence[int]
) -> GroupPlace:
    """Position in one group.

    Args:
        status: Numbers of the last collectives of all groups, by the id that they have in this process.
    """
    completed = int(status.get(str(entries[-1]["pg_id"]), {}).get("last_completed_collective", 0))
    collectives = [entry for entry in entries if not entry["is_p2p"]]
    open_ones = [one for one in collectives if not one["retired"] and one["collective_seq_id"] > completed]
    # The parts of a batch of sends and receives are never marked as done, but what follows them is.
    num_done = max((index for index, one in enumerate(entries, start=1) if one["retired"]), default=0)
    peers = [_PEER.search(one["profiling_name"]) for one in entries[num_done:] if one["is_p2p"]]
    shown = next(iter([*open_ones, *collectives[-1:]]), None)
    description = entries[-1]["process_group"][1]
    return GroupPlace(
        name=name,
        description="" if description == "undefined" else description,
        backend=backend,
        entered=collectives[-1]["collective_seq_id"] if collectives else 0,
        waits_in=open_ones[0]["collective_seq_id"] if open_ones else None,
        operation=shown["profiling_name"] if shown else "",
        shape=f"{'/'.join(shown['input_dtypes'])} {json.dumps(shown['input_sizes'])}" if shown else "",
        members=tuple(members) if open_ones else (),
        peers=tuple(sorted({members[int(found.group("peer"))] for found in peers if found is not None})),
    )
