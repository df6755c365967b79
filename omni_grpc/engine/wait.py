"""How long a tenant has to wait at most, for the time after which a refused caller is told to come again."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from omni_grpc.engine.items import Item, Phase
from omni_grpc.engine.leaving import Places, Queue, View, leaving


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What a prepare and a decode take, in milliseconds. `exclusive`: one job at a time goes through all lanes."""

    prepare_ms: float
    decode_ms: float
    exclusive: bool


def expected_wait(tenant: str, queue: Queue, active: Collection[Item], view: View, pace: Pace) -> float:
    """Milliseconds until the next of a tenant's waiting jobs has left the queue, or where none waits, until one of
    those that have left it ends; 0 for a tenant that has no job here.

    It is an upper bound, if no other job comes, the predictions hold and decodes are no bottleneck.
    """
    own = [item for item in active if item.tenant == tenant]
    waiting = queue.count(tenant)
    if not waiting and not own:
        return 0.0
    decoding = sum(item.phase in (Phase.DECODE_QUEUED, Phase.DECODING) for item in active)
    if waiting and (before := _prepared_before(tenant, queue, active, view)) is not None and not pace.exclusive:
        return before * pace.prepare_ms
    mine = [item for item in own if item.inside]
    others = {item.tenant for item in active} | {name for jobs in queue.ranks.values() for name in jobs}
    ranks = {*queue.ranks, *(item.rank for item in active if item.inside)}
    lanes = pace.prepare_ms * (view.total + len(others) + 1) + pace.decode_ms * (decoding + len(others) + 1)
    everything = _everything(tenant, queue, active, view)
    if pace.exclusive:
        # every job that goes before is prepared and decoded too, with nothing beside it
        count = len(active) + len(queue) - waiting
        return everything + (count + 1) * (pace.prepare_ms + pace.decode_ms)
    if len(ranks) > 1 or len(others) > view.total or not (mine or own):
        return everything + lanes + pace.prepare_ms * len(queue)
    return min(everything + pace.prepare_ms * len(queue), _fair(tenant, mine, queue, active, view)) + lanes


def _prepared_before(tenant: str, queue: Queue, active: Collection[Item], view: View) -> int | None:
    """How many prepares it takes until the tenant's first job leaves, itself not counted, where nothing but the lane
    keeps it; None where it waits for the end of others.
    """
    preparing = sum(item.phase is Phase.PREPARING for item in active)
    inside = sum(item.inside for item in active)
    running = sum(item.tenant == tenant for item in active) + view.elsewhere(tenant)
    limit = view.shares[tenant].max_running
    places: dict[float, Places] = {}
    for count, item in enumerate(leaving(queue, active, view)):
        level = places.setdefault(item.rank, Places(queue, active, item.rank, view, above=count))
        if inside + count >= 2 * view.total or (level.full and not level.entitled(item.tenant)):
            return None
        if item.tenant == tenant:
            return None if limit is not None and running >= limit else preparing + count
        level.take(item.tenant)
    return None


def _everything(tenant: str, queue: Queue, active: Collection[Item], view: View) -> float:
    """All work that is inside, and all that others have waiting: of the tenant's own, the next one is the first."""
    inside = sum(view.work(item) for item in active if item.inside)
    waiting = (
        item for names in queue.ranks.values() for name, jobs in names.items() if name != tenant for item in jobs
    )
    return inside + sum(view.work(item) for item in waiting)


def _fair(tenant: str, mine: list[Item], queue: Queue, active: Collection[Item], view: View) -> float:
    """Until the tenant has received all that its jobs inside still need; then it is entitled to a place. Meanwhile no
    other one gets further than its tag does, but by what it has in the steps on either side.
    """
    if not mine:
        return 0.0
    rank = mine[0].rank
    weight = view.shares[tenant].weight
    need = sum(view.work(item) for item in mine)
    end = view.tag(rank, tenant) + (need + max(view.step(item) for item in mine)) / weight
    by_tenant: dict[str, list[Item]] = {}
    for item in (*active, *(item for jobs in queue.ranks.get(rank, {}).values() for item in jobs)):
        if item.tenant != tenant and item.phase in (Phase.WAITING, Phase.PREPARING, Phase.RUNNING):
            by_tenant.setdefault(item.tenant, []).append(item)
    total = need + max(view.step(item) for item in mine)
    for other, items in by_tenant.items():
        work = sum(view.work(item) for item in items)
        steps = sum(sorted((view.step(item) for item in items), reverse=True)[: view.total])
        fair = max(0.0, (end - view.tag(rank, other)) * view.shares[other].weight)
        total += min(work, fair + 3 * steps)
    return total
