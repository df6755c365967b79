"""What fits into a worker's memory at once: who may come in, who may share a step, and whose decode may begin.

The three lanes work at the same time, so what they take adds up, on top of what every job in the worker holds. A job
comes in only if from then on each job in there can take its steps alone while any other one is decoded: so nobody waits
for memory that only he himself could free, and none has to be thrown out. What is left is for steps that are shared.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from omni_grpc.engine.items import Item, Lane, Phase
from omni_grpc.types.memory_model import MemoryModel, Need


class Room:
    """The memory of a worker at one moment. `active` are the jobs in it; `flying` what its lanes work on, which may be
    jobs that are gone already: what they take is free once their lane has reported.
    """

    def __init__(self, memory: MemoryModel, active: Iterable[Item], flying: Mapping[Lane, Sequence[Item]]) -> None:
        self._memory = memory
        self._flying = flying
        self._inside = list(dict.fromkeys((*active, *(item for items in flying.values() for item in items))))

    def admits(self, item: Item, new: Need) -> bool:
        """Whether a job that needs so much may come in. One that is in there alone always may: what does not fit even
        so was refused.
        """
        if not self._memory.limited or not self._inside:
            return True
        held = self._held + new.held
        now = self._taken(Lane.STEP) + self._decode_at_most()
        inside = [(one.need, one.segments > 1) for one in self._inside]
        later = max(new.prepare + _pair(inside), _pair([*inside, (new, item.segments > 1)]))
        return held + max(new.prepare + now, later) <= self._memory.capacity

    def steps(self, items: Sequence[Item]) -> bool:
        """Whether these may take a step, beside whatever the other lanes do until it ends.

        One alone is held up only by what was predicted to take less than it does, and not if nothing would come of
        that.
        """
        if not self._memory.limited:
            return True
        step = self._held + self._taken(Lane.PREPARE) + self._step(items)
        if step + self._decode_at_most() <= self._memory.capacity:
            return True
        idle = not self._flying.get(Lane.PREPARE) and not self._flying.get(Lane.DECODE)
        return len(items) == 1 and (idle or step + self._taken(Lane.DECODE) <= self._memory.capacity)

    def decodes(self, item: Item) -> bool:
        """Whether a decode may begin, beside what the other lanes do now."""
        others = self._taken(Lane.PREPARE) + self._taken(Lane.STEP)
        idle = not self._flying.get(Lane.PREPARE) and not self._flying.get(Lane.STEP)
        return idle or self._held + others + item.need.decode <= self._memory.capacity

    @property
    def taken(self) -> float:
        """Bytes that are taken now, as predicted."""
        return self._held + sum(map(self._taken, Lane))

    @property
    def _held(self) -> float:
        return sum(item.need.held for item in self._inside)

    def _step(self, items: Sequence[Item]) -> float:
        return self._memory.step.of([tokens for item in items for tokens in item.need.rows])

    def _taken(self, lane: Lane) -> float:
        """By what a lane works on now."""
        items = self._flying.get(lane, ())
        match lane:
            case Lane.PREPARE:
                return sum(item.need.prepare for item in items)
            case Lane.STEP:
                return self._step(items)
            case Lane.DECODE:
                return sum(item.need.decode for item in items)

    def _decode_at_most(self) -> float:
        """By the decode lane, until the step lane reports next: only what has left it, or a part, can be decoded."""
        ready = [
            item for item in self._inside if item.part_ready or item.phase in (Phase.DECODE_QUEUED, Phase.DECODING)
        ]
        return max((item.need.decode for item in (*ready, *self._flying.get(Lane.DECODE, ()))), default=0.0)


def _pair(needs: Sequence[tuple[Need, bool]]) -> float:
    """The most that a step of one of them and a decode of another take together. A job that is made in segments, marked
    by True, may be in both lanes.
    """
    most = max((need.step + need.decode for need, segmented in needs if segmented), default=0.0)
    steps = sorted((need for need, _ in needs), key=lambda need: -need.step)[:2]
    decodes = sorted((need for need, _ in needs), key=lambda need: -need.decode)[:2]
    together = (one.step + other.decode for one in steps for other in decodes if one is not other)
    alone = (max(need.step, need.decode) for need in (*steps, *decodes))
    return max(most, *together, *alone, 0.0)
