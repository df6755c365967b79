"""Whose memory goes to whom, where a budget holds fewer models than there are. Pure: it sees names, bytes and times.

A model that a job waits for is woken; for its room, models without jobs are put to sleep, the least recently used
first. Where all that are awake have jobs, the one that has been awake for longest gives way once its turn is over: it
ends what runs, sleeps, and waits for its next turn like the others. So no model waits for longer than the turns of
those before it, however many jobs they have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tenure:
    """A model at this moment. `bytes` on each of its `devices` while it is awake; `waiting_since`: since when a job
    waits for it to wake, None where none does. Times in seconds of one clock.
    """

    name: str
    bytes: int
    devices: Collection[str]
    awake: bool
    idle: bool
    last_used: float
    awake_since: float
    waiting_since: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Evict:
    """This one is to sleep."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Nobody can be put to sleep for so many seconds, unless one becomes idle; None: until then."""

    seconds: float | None


def next_to_wake(models: Sequence[Tenure]) -> str | None:
    """The model whose jobs have waited for longest."""
    waiting = [(one.waiting_since, one.name) for one in models if one.waiting_since is not None]
    return min(waiting)[1] if waiting else None


def make_room(name: str, models: Sequence[Tenure], budget: int, *, now: float, turn: float) -> Evict | Wait | None:
    """What has to happen next before a model may be awake; None: there is room. One that is larger than the budget gets
    it alone.
    """
    this = next(one for one in models if one.name == name)
    others = [one for one in models if one.awake and one is not this]
    full = [
        device
        for device in this.devices
        if this.bytes + sum(one.bytes for one in others if device in one.devices) > budget
    ]
    holding = [one for one in others if one.bytes and not set(full).isdisjoint(one.devices)]
    if not holding:
        return None
    if idle := [one for one in holding if one.idle]:
        return Evict(min(idle, key=lambda one: (one.last_used, one.name)).name)
    oldest = min(holding, key=lambda one: (one.awake_since, one.name))
    left = oldest.awake_since + turn - now
    return Evict(oldest.name) if left <= 0 else Wait(left)
