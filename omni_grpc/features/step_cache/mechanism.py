"""The mechanism of all step caches: runs the blocks of the rows that have to, and answers for the others.

A stack is run in parts. A row's head and tail, which some policies have, always run. What is between them runs, or is
replaced by what it last added to each stream. Rows with unlike policies, and with none, share every part that they run.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from omni_grpc.config import CacheConfig
from omni_grpc.features import Context
from omni_grpc.features.step_cache.compare import changes, timestep_changes
from omni_grpc.features.step_cache.memory import Memory, forecast
from omni_grpc.features.step_cache.policies import Compared, Moment, Observe, Policy, policy_of
from omni_grpc.features.step_cache.spectrum import filtered
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import Rows
from omni_grpc.nn.stack import Carry, RunBlocks, Stack, convert, main_stack
from omni_grpc.pipeline.state import State
from omni_grpc.types.cache_fields import FIELDS, from_peers, none_left
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.step_cache import CacheCount, Observation, method_of, tally


def apply(module: nn.Module, config: CacheConfig, context: Context) -> None:
    """Puts a cache around the main stack. Request.cache says whether it is used, and how. Raises ConfigError where the
    server's own settings leave it nothing to skip.
    """
    path, stack = main_stack(module)
    backend, given = config.cache_backend or "", config.cache_config or {}
    if backend in FIELDS:
        values = {**{name: field.default for name, field in FIELDS[backend].items()}, **from_peers(backend, given)}
        if why := none_left(backend, values, len(stack)):
            why = f"fn_compute_blocks {why}"
            raise ConfigError(f"cache_config: {why}", violations=(Violation("cache_config", why),))
    found = context.effects.found.cached_blocks
    context.effects.report(cached_blocks=min(len(stack), found or len(stack)))
    stack.wrap(StepCache(context.component, path, context.ranks).around)


@dataclasses.dataclass(slots=True)
class Work:
    """A row of a batch that has a policy. `start`, `stop`: the blocks between its head and its tail. `before`: its
    streams where those begin. `answered`: whether they do not run; decided where they begin.
    """

    state: State
    branch: str
    policy: Policy
    memory: Memory | None
    start: int
    stop: int
    before: Carry = dataclasses.field(default_factory=dict)
    change: float | None = None
    compared: Tensor | None = None
    answered: bool = False
    kept: tuple[float, ...] = ()
    observed: tuple[Observation, ...] = ()


class StepCache:
    """The cache of one stack. It decides for each row separately, and keeps what it knows of a row in its state. Ranks
    that compute the same rows go by the numbers of the first of them: one that ran blocks that the others skip would
    wait for them forever.
    """

    def __init__(self, component: str, path: str, ranks: Mesh | None = None) -> None:
        self.component, self.ranks = component, ranks
        self.slot = f"step_cache {component}.{path}"

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        works = self._works(rows, lo, hi)
        if not works:
            return inner(stack, lo, hi, carry, rows)
        places = sorted({lo, hi}.union(*((work.start, work.stop) for work in works.values())))
        now = carry
        for place, end in itertools.pairwise([*places, hi]):
            self._decide(stack, lo, carry, now, rows, {row: work for row, work in works.items() if work.start == place})
            now = self._settle(stack, now, rows, {row: work for row, work in works.items() if work.stop == place})
            if place == hi:
                break
            running = tuple(row for row in range(len(rows)) if row not in works or _runs(works[row], place))
            now = _run_some(inner, stack, place, end, now, rows, running)
        for work in works.values():
            self._count(work, hi - lo)
        return now

    def _works(self, rows: Rows, lo: int, hi: int) -> dict[int, Work]:
        """The rows that have a policy, and blocks between its head and its tail."""
        works = {}
        for row, (state, branch) in enumerate(rows.owners):
            if state.request.cache is None:
                continue
            policy = policy_of(state.request.cache)
            start, stop = lo + policy.head, hi - policy.tail
            if start < stop:
                works[row] = Work(state, branch, policy, self._recall(state, branch), start, stop)
        return works

    def _recall(self, state: State, branch: str) -> Memory | None:
        """What is kept of a row from the evaluation right before this one, else None. A branch that guidance left out
        in between, and an evaluation that is repeated because it failed for another row, start afresh: what is compared
        is about to be overwritten, so nothing is kept until the evaluation has ended.
        """
        memory: Memory | None = state.slots.pop((self.slot, branch), None)
        if memory is None or (memory.segment, memory.evaluation) != (state.segment, state.evaluation - 1):
            return None
        return memory

    # --- deciding -----------------------------------------------------------------------------------------------------

    def _decide(self, stack: Stack, lo: int, carry: Carry, now: Carry, rows: Rows, works: dict[int, Work]) -> None:
        """Decides for the rows whose head has run: `carry` is what went into the stack, `now` what has come of it."""
        if not works:
            return
        judged = self._judged(stack, lo, carry, now, rows, works)
        policies = [works[row].policy if row in works else None for row in range(len(rows))]
        memories = [works[row].memory if row in works else None for row in range(len(rows))]
        found, compared = changes(judged, policies, memories, rows, self.ranks)
        before = {name: rows.stream(name).split(x) for name, x in now.items()}
        for row, work in works.items():
            work.change, work.compared = found.get(row), compared.get(row)
            work.before = {name: parts[row] for name, parts in before.items()}
            if work.policy.compared is Compared.TIMESTEP:
                work.change = self._timestep_change(stack, work)
        for work in works.values():
            if work.memory is not None:
                at = self._moment(work, _leader(work, works.values()).change)
                work.answered, work.kept = work.policy.decide(at, work.memory.kept)
            if work.policy.since_computed and work.answered and work.memory is not None:
                work.compared = work.memory.compared

    def _judged(
        self, stack: Stack, lo: int, carry: Carry, now: Carry, rows: Rows, works: dict[int, Work]
    ) -> dict[int, Tensor]:
        """Row -> the tensor [T, C] that its policy judges by."""
        judged: dict[int, Tensor] = {}
        by = {kind: [row for row, work in works.items() if work.policy.compared is kind] for kind in Compared}
        if by[Compared.INPUT]:
            stream, signal = stack.signal(lo, carry, rows)
            parts = rows.stream(stream).split(signal)
            judged |= {row: parts[row] for row in by[Compared.INPUT]}
        if by[Compared.HEAD]:
            # of what goes through the blocks, the pictures are the last
            stream = list(carry)[-1]
            ins, outs = (rows.stream(stream).split(x[stream]) for x in (carry, now))
            judged |= {row: outs[row] - ins[row] for row in by[Compared.HEAD]}
        for row in by[Compared.FILTERED]:
            state, power = works[row].state, works[row].policy.power
            judged[row] = filtered(state.latents, state.grid, state.schedule.sigmas[state.index], power)
        return judged

    def _timestep_change(self, stack: Stack, work: Work) -> float | None:
        if work.memory is None:
            return None
        key = f"{self.slot} timestep", work.branch
        if key not in work.state.slots:
            work.state.slots[key] = timestep_changes(work.state, work.branch, stack.groups[0])
        known: list[float] = work.state.slots[key]
        return known[work.state.evaluation]

    def _moment(self, work: Work, change: float | None) -> Moment:
        state, memory = work.state, work.memory
        assert memory is not None
        return Moment(
            step=state.index,
            steps=state.schedule.steps,
            evaluation=state.evaluation,
            evaluations=state.schedule.evaluations,
            computed=memory.computed,
            reused=memory.reused,
            in_row=memory.in_row,
            change=change,
        )

    # --- answering ----------------------------------------------------------------------------------------------------

    def _settle(self, stack: Stack, now: Carry, rows: Rows, works: dict[int, Work]) -> Carry:
        """Adds to the rows that are answered what stands for their blocks, and keeps what the others' blocks added."""
        if not works:
            return now
        after = {name: list(rows.stream(name).split(x)) for name, x in now.items()}
        answered = False
        for row, work in works.items():
            memory = work.memory
            if work.answered and memory is not None:
                residuals, answered = memory.residuals, True
                for name, residual in forecast(residuals, work.state.evaluation).items():
                    after[name][row] = work.before[name] + residual
            else:
                added = {name: parts[row] - work.before[name] for name, parts in after.items()}
                if isinstance(work.policy, Observe):
                    work.observed = self._observe(stack, work, added)
                earlier = () if memory is None else memory.residuals[: work.policy.order]
                residuals = ((work.state.evaluation, added), *earlier)
            work.state.slots[self.slot, work.branch] = _kept(work, residuals)
        return {name: torch.cat(parts) for name, parts in after.items()} if answered else now

    def _observe(self, stack: Stack, work: Work, added: Carry) -> tuple[Observation, ...]:
        """What caches would have gone by in this evaluation; nothing where there is none before it."""
        memory, name = work.memory, list(added)[-1]
        if memory is None or work.change is None:
            work.state.slots[f"{self.slot} output", work.branch] = work.before[name] + added[name]
            return ()
        before = memory.residuals[0][1][name]
        ratios = added[name].float().norm(dim=-1) / before.float().norm(dim=-1)
        earlier = work.state.slots[f"{self.slot} output", work.branch]
        output = work.before[name] + added[name]
        work.state.slots[f"{self.slot} output", work.branch] = output
        moved = (output.float() - earlier.float()).abs().sum() / earlier.float().abs().sum()
        return (
            Observation(
                branch=work.branch,
                evaluation=work.state.evaluation,
                change=work.change,
                timestep=self._timestep_change(stack, work) or 0.0,
                output=moved.item(),
                ratio=ratios.mean().item(),
            ),
        )

    def _count(self, work: Work, blocks: int) -> None:
        cache = work.state.request.cache
        assert cache is not None
        count = CacheCount(
            component=self.component,
            method=method_of(cache),
            hits=int(work.answered),
            misses=int(not work.answered),
            blocks=blocks,
            blocks_run=blocks - (work.stop - work.start) * work.answered,
            measured=int(work.change is not None),
            change=work.change or 0.0,
            observed=work.observed,
        )
        tally(work.state.reports, (self.slot, work.branch), count)


def _runs(work: Work, place: int) -> bool:
    """Whether a row runs the part of the stack that begins here."""
    return not work.answered or not work.start <= place < work.stop


def _leader(work: Work, works: Iterable[Work]) -> Work:
    """The row whose change decides: of a policy that is shared, the first branch of the output that is here."""
    return next(other for other in works if other.state is work.state) if work.policy.shared else work


def _kept(work: Work, residuals: tuple[tuple[int, Carry], ...]) -> Memory:
    memory, state = work.memory, work.state
    before = Memory(segment=0, evaluation=0, compared=None, residuals=()) if memory is None else memory
    return Memory(
        segment=state.segment,
        evaluation=state.evaluation,
        compared=work.compared,
        residuals=residuals,
        kept=work.kept,
        computed=before.computed + (not work.answered),
        reused=before.reused + work.answered,
        in_row=before.in_row + 1 if work.answered else 0,
    )


def _run_some(
    inner: RunBlocks, stack: Stack, lo: int, hi: int, now: Carry, rows: Rows, running: tuple[int, ...]
) -> Carry:
    """Runs blocks lo to hi for some of the rows; the streams of the others stay as they are."""
    if not running:
        return now
    part = rows.narrow(running)
    taken = {name: rows.stream(name).take(x, running) for name, x in now.items()}
    made = convert(inner(stack, lo, hi, taken, part), tuple(now), part)
    if len(running) == len(rows):
        return made
    out = {}
    for name, x in now.items():
        parts = list(rows.stream(name).split(x))
        for row, y in zip(running, part.stream(name).split(made[name]), strict=True):
            parts[row] = y
        out[name] = torch.cat(parts)
    return out
