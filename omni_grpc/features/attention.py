"""Attention backends and precisions by role, and precisions by step and layer.

The kernel of each attention is chosen once, when the model is loaded. A backend that a setting names and that cannot
run here stops the start.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from omni_grpc.config.backends import AUTO, EIGHT_BIT, INVARIANT, choose, flag_of, in_precision, refused
from omni_grpc.config.roles import Choice, Roles, Window
from omni_grpc.features import Context
from omni_grpc.nn.attention import Attention, AttentionWrapper, leaves
from omni_grpc.nn.coming import Begun
from omni_grpc.nn.rows import JOINT, Owner, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.attention import varlen_attention

__all__ = ["apply"]

TOKENS = 32
"""Tokens of each of the two rows on which a backend is tried."""


def apply(module: nn.Module, config: Roles, context: Context) -> None:
    """Gives every attention the backend and the precision that its role has in the configuration.

    Raises ConfigError for a backend that cannot run, by the setting that names it, and, once all denoisers are loaded,
    for a role that none of them has.
    """
    layers, effects = _layers(module), context.effects
    tried = functools.cache(functools.partial(_try, context.device))
    chosen_by_role: dict[str, dict[str, None]] = effects.slots.setdefault("attention", {})
    categories: set[str] = effects.slots.setdefault("attention categories", set())
    effects.checks["attention"] = lambda: config.check(chosen_by_role.keys() | categories)
    for name, attention in leaves(module):
        choice = config.of(attention.role, attention.role_category)
        windows = [window for window in config.schedule if _covers(window.layers, layers.get(attention))]
        used = chosen_by_role.setdefault(attention.role, {})
        categories.add(attention.role_category)
        for precision in {choice.precision: None} | {window.precision: None for window in windows}:
            dtype = _dtype(precision, context.dtype)
            named = in_precision(choice.backend, precision, choice.field)
            chosen = choose(named, attention.uses(context.device, dtype), choice.field)
            used[chosen if dtype == context.dtype else f"{chosen} in {precision}"] = None
            if named != AUTO:
                tried(chosen, choice, dtype, attention.num_heads, attention.num_kv_heads, attention.head_size)
        attention.backend = choice.backend + (INVARIANT if context.batch_invariant else "")
        if windows or choice.precision != AUTO:
            module.set_submodule(name, PreciseAttention(attention, choice.precision, windows))


def _dtype(precision: str, own: torch.dtype) -> torch.dtype:
    """The dtype that queries, keys and values are cast to. Precisions of 8 bits are made from the model's own dtype."""
    dtype: torch.dtype = own if precision == AUTO or precision in EIGHT_BIT else getattr(torch, precision)
    return dtype


def _layers(module: nn.Module) -> dict[nn.Module, float]:
    """The relative depth of each attention in its stack: 0 in the first block, near 1 in the last."""
    found: dict[nn.Module, float] = {}
    for stack in [part for part in module.modules() if isinstance(part, Stack)]:
        blocks = [block for name in stack.groups for block in stack.group(name)]
        for number, block in enumerate(blocks):
            found |= {attention: number / len(blocks) for _, attention in leaves(block)}
    return found


def _covers(span: tuple[float, float], at: float | None) -> bool:
    """Whether a window of steps or layers contains this position. What is in no stack has no position."""
    return at is not None and span[0] <= at < span[1]


def _try(
    device: torch.device, backend: str, choice: Choice, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    q, k, v = (torch.randn(2 * TOKENS, n, size, device=device, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    cu = torch.tensor([0, TOKENS, 2 * TOKENS], dtype=torch.int32)
    there = cu.to(device)
    try:
        out = varlen_attention(q, k, v, there, there, TOKENS, TOKENS, size**-0.5, False, backend, cu, cu)
        finite = bool(out.isfinite().all())
    except Exception as error:
        message = (
            f"{flag_of(choice.field)} {choice.backend}: {backend} does not run here: {error}; use another, or auto"
        )
        raise refused(choice.field, message, "ATTENTION_UNAVAILABLE") from error
    if not finite:
        message = f"{flag_of(choice.field)} {choice.backend}: {backend} gives what is not finite; use another, or auto"
        raise refused(choice.field, message, "ATTENTION_UNAVAILABLE")


@dataclasses.dataclass(frozen=True, slots=True)
class PrecisionSchedule:
    """The precision of a row: that of the first window that covers its step, else `precision`."""

    precision: str
    windows: tuple[Window, ...]

    def __call__(self, owner: Owner) -> str:
        if not self.windows:
            return self.precision
        state = owner[0]
        at = state.index / state.schedule.steps
        return next((window.precision for window in self.windows if _covers(window.steps, at)), self.precision)


class PreciseAttention(AttentionWrapper):
    """Around another attention: casts queries, keys and values to a precision, and the result back to the model's
    dtype.

    `windows` are those of its layer. Rows with different precisions are computed separately.
    """

    def __init__(self, inner: Attention, precision: str, windows: Sequence[Window]) -> None:
        super().__init__(inner)
        self.variant = PrecisionSchedule(precision, tuple(windows))
        self.in_8_bits = nn.ModuleDict()
        for each in {precision} | {window.precision for window in windows}:
            if each in EIGHT_BIT:
                coded = copy.copy(inner)
                coded.backend = in_precision(inner.backend, each)
                self.in_8_bits[each] = coded

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """q [T, num_heads, head_size], k and v [T_kv, num_kv_heads, head_size] -> the shape and dtype of q."""
        by_row = self._by_row(rows)
        if len(set(by_row)) == 1:
            return self._attend(by_row[0], q, k, v, rows, over, kv)
        out, queries, keys = torch.empty_like(q), rows.stream(over), rows.stream(kv or over)
        bare = Rows(rows.owners, rows.layout.rows, rows.layouts, exchange=rows.exchange)
        views = queries.split(out)
        for precision in dict.fromkeys(by_row):
            mine = [row for row, its in enumerate(by_row) if its == precision]
            part = bare.narrow(mine)
            taken = queries.take(q, mine), keys.take(k, mine), keys.take(v, mine)
            done = self._attend(precision, *taken, part, over, kv)
            for row, result in zip(mine, part.stream(over).split(done), strict=True):
                views[row].copy_(result)
        return out

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor | Begun, rows: Rows, over: str = JOINT, kv: str | None = None
    ) -> Begun:
        """Begins the inner attention, where all rows have one precision."""
        by_row = set(self._by_row(rows))
        if len(by_row) > 1:
            return super().begin(q, k, v, rows, over, kv)
        (precision,) = by_row
        dtype = _dtype(precision, q.dtype)
        # what is not there yet was cast when it was begun
        values = v.to(dtype) if isinstance(v, Tensor) else v
        begun = self._with(precision).begin(q.to(dtype), k.to(dtype), values, rows, over, kv)
        return lambda: begun().to(q.dtype)

    def begin_values(self, v: Begun, rows: Rows, over: str = JOINT) -> Begun | None:
        """Likewise. Of rows with different precisions nothing is begun: they are computed separately."""
        by_row = set(self._by_row(rows))
        if len(by_row) > 1:
            return None
        (precision,) = by_row

        def cast() -> Tensor:
            values = v()
            return values.to(_dtype(precision, values.dtype))

        return self._with(precision).begin_values(cast, rows, over)

    def computed_by(self, rows: Rows) -> Attention | None:
        """The inner attention, where all rows have one precision and that is one of 8 bits: it gets heads of the
        model's dtype.
        """
        by_row = set(self._by_row(rows))
        return self._with(*by_row).computed_by(rows) if len(by_row) == 1 and by_row <= EIGHT_BIT.keys() else None

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        found = []
        named = [self.variant.precision, *(window.precision for window in self.variant.windows)]
        for precision in dict.fromkeys(named):
            own = _dtype(precision, dtype)
            for name in self._with(precision).runs_on(device, own):
                found.append(name if own == dtype else f"{name} in {precision}")
        return found

    def _with(self, precision: str) -> Attention:
        found = self.in_8_bits[precision] if precision in EIGHT_BIT else self.inner
        assert isinstance(found, Attention)
        return found

    def _by_row(self, rows: Rows) -> list[str]:
        """The precision of each row; a single entry where all rows have the same."""
        if not self.variant.windows:
            return [self.variant.precision]
        return [self.variant(owner) for owner in rows.owners]

    def _attend(self, precision: str, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str, kv: str | None) -> Tensor:
        dtype = _dtype(precision, q.dtype)
        out: Tensor = self._with(precision)(q.to(dtype), k.to(dtype), v.to(dtype), rows, over, kv)
        return out.to(q.dtype)
