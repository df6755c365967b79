"""What the ranks of one life of a group say of each piece of work: whether all have said the same, and in time. Nothing
here knows where the ranks are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeGuard

from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Broken,
    Decoded,
    DecodedPart,
    Prepared,
    Ready,
    Recorded,
    Report,
    Stepped,
)

Key = tuple[str, str]
"""What reports belong together: the lane and, where it has one, the request."""
LANES = ("prepare", "step", "decode")
LAST_WORDS_SECONDS = 2.0
"""How long what a rank says of its own end waits for the death of another one: that may be its cause, a connection that
was lost in the middle of a collective, and is often found later.
"""
FOUND = ("WORKER_DIED", "WORKER_HUNG")
"""Reasons of an end that others have found, and a rank cannot tell of itself."""


class Timer(Protocol):
    """What is called later, unless it is cancelled before."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""Has something called in so many seconds."""


@dataclasses.dataclass(slots=True)
class Round:
    """The reports of the ranks on one piece of work, as far as they have come."""

    reports: dict[int, Report] = dataclasses.field(default_factory=dict)
    timer: Timer | None = None


class Agreement:
    """Collects the reports of ranks. None of its calls may run at the same time as another one, what `later` calls
    included.

    agreed: gets the report of rank 0 once all ranks have given theirs. end: gets why all of them have to be ended,
    RANKS_DISAGREE or RANK_STUCK.
    """

    def __init__(
        self,
        world: int,
        *,
        decoding: int,
        timeout: float,
        later: Later,
        agreed: Callable[[Report], None],
        end: Callable[[Failure], None],
    ) -> None:
        """`decoding` ranks answer a decode; `timeout`: seconds that one may lag behind another."""
        self._world, self._decoding, self._timeout = world, decoding, timeout
        self._later, self._agreed, self._end = later, agreed, end
        self._rounds: dict[Key, list[Round]] = {}

    def hear(self, rank: int, report: Report) -> None:
        """Takes a report, which is not Died: from its round on no rank reads the inputs of a prepared request, for
        example, and what comes next finds all of them in the same place.
        """
        if isinstance(report, Loading):
            if rank == 0:
                self._agreed(report)
            return
        if isinstance(report, Recorded):
            # each rank records for itself, and is not late for the others then
            self._agreed(report)
            return
        key = _key(report)
        rounds = self._rounds.setdefault(key, [])
        it = next((one for one in rounds if rank not in one.reports), None)
        if it is None:
            it = Round()
            rounds.append(it)
        it.reports[rank] = report
        if len(it.reports) < (self._decoding if key[0] == "decode" else self._world):
            if it.timer is None and key[0] in LANES:
                lagging = it
                it.timer = self._later(self._timeout, lambda: self._on_lag(key, lagging))
            return
        rounds.remove(it)
        if not rounds:
            del self._rounds[key]
        if it.timer is not None:
            it.timer.cancel()
        self._settle(key, it.reports)

    def close(self) -> None:
        """No rank is late from now on."""
        for it in (one for rounds in self._rounds.values() for one in rounds):
            if it.timer is not None:
                it.timer.cancel()

    def _settle(self, key: Key, reports: Mapping[int, Report]) -> None:
        first = reports[0]
        if key[0] == "adapter":
            # each reads the file for itself: what one of them lacks, nobody can use
            failed = (report for _, report in sorted(reports.items()) if isinstance(report, AdapterFailed))
            self._agreed(next(failed, first))
            return
        other = next((rank for rank, report in reports.items() if _told(report) != _told(first)), None)
        # rank 0 alone encodes what was decoded: where that fails, all ranks are done with the decode, and none hangs
        if other is None or key[0] == "decode":
            self._agreed(first)
            return
        message = (
            f"{name_of(other, self._world)} and rank 0 disagree on {_what(key)}: {_said(reports[other])}, and "
            f"{_said(first)}; all ranks were ended"
        )
        self._end(Failure(code=Code.INTERNAL, reason="RANKS_DISAGREE", message=message))

    def _on_lag(self, key: Key, it: Round) -> None:
        late = [rank for rank in range(self._world) if rank not in it.reports]
        if not late:
            # its last report came while this was on its way
            return
        done = ", ".join(f"rank {rank}: {_said(report)}" for rank, report in sorted(it.reports.items()))
        message = (
            f"{name_of(late[0], self._world)} is {self._timeout:g} s late with {_what(key)} ({done}), see "
            "--rank-timeout; all ranks were ended"
        )
        self._end(Failure(code=Code.UNAVAILABLE, reason="RANK_STUCK", message=message))


def name_of(rank: int, world: int) -> str:
    """How messages call a rank."""
    return f"rank {rank} of {world}"


def of_rank(rank: int, world: int, failure: Failure) -> Failure:
    """The failure, with the rank that it is of."""
    if failure.message.startswith("rank "):
        return failure
    return dataclasses.replace(failure, message=f"{name_of(rank, world)}: {failure.message}")


def is_last_words(failure: Failure) -> bool:
    """Whether a rank has said itself why it ends, see LAST_WORDS_SECONDS."""
    return failure.reason not in FOUND


def is_lost_decode(report: Report) -> TypeGuard[Broken]:
    """Whether rank 0 alone is done with a request: the others have it still, and may step it. All of them have to be
    told to drop it, at the same point.
    """
    return isinstance(report, Broken) and report.phase == "decode"


def is_lost_adapter(report: Report) -> TypeGuard[AdapterFailed]:
    """Whether an adapter could not be loaded by some rank: others may have it, and have to be told to unload it."""
    return isinstance(report, AdapterFailed) and report.failure.reason != "LORA_UNLOADED"


def _key(report: Report) -> Key:
    match report:
        case AdapterLoaded(adapter=adapter):
            return "adapter", adapter.key
        case AdapterFailed(uid=uid) | AdapterUnloaded(uid=uid):
            return "adapter", uid
        case Prepared(id=request_id):
            return "prepare", request_id
        case Broken(id=request_id, phase=phase):
            return phase, request_id
        case Stepped():
            return "step", ""
        case Decoded(id=request_id) | DecodedPart(id=request_id):
            return "decode", request_id
        case Ready():
            return "load", ""
    return "order", ""


def _told(report: Report) -> tuple[object, ...]:
    """What all ranks have to say alike."""
    match report:
        case Prepared(rows=rows, prompt_tokens=tokens):
            return Prepared, rows, tokens
        case Stepped(progress=progress, broken=broken):
            steps = tuple((one.id, one.step, one.evals, one.part_ready, one.finished) for one in progress)
            return Stepped, steps, tuple(one.id for one in broken)
        case Ready(dtype=dtype):
            return Ready, dtype
    return (type(report),)


def _what(key: Key) -> str:
    kind, request_id = key
    return " of ".join(filter(None, (f"its {kind}", request_id)))


def _said(report: Report) -> str:
    match report:
        case Broken(failure=failure):
            return f"{failure.reason}, {failure.message}"
        case Stepped(progress=progress, broken=broken):
            steps = [f"{one.id} at step {one.step}" for one in progress]
            return f"stepped {', '.join(steps) or 'nothing'}" + "".join(f", {one.id} broken" for one in broken)
    return type(report).__name__
