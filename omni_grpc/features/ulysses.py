"""Ulysses (https://arxiv.org/abs/2309.14509): attention over tokens that are sharded over ranks, by heads.

One all-to-all gives a rank the queries, keys and values of all tokens for its share of the heads; another one returns
the results to the ranks that have the tokens. The first one runs beside what is computed meanwhile: values leave before
queries and keys are normed, and these while what does not depend on the attention is computed. Where a batch is not
sharded (`rows.exchange`), or the keys and values are whole on every rank, attention runs as it is. Where more ranks
share the tokens than share heads, the wrapped attention gets the tokens of these ranks, and those of the others by
fetching them or in a ring.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.attention import Attention, AttentionWrapper, outermost
from omni_grpc.nn.coming import Begun, all_to_all, there
from omni_grpc.nn.rows import JOINT, Exchange, Rows
from omni_grpc.types.errors import ConfigError, InternalError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context, *, overlap: bool = False) -> None:
    """Wraps every attention but those with `skip_sequence_parallel`. It waits for each all-to-all at once or, with
    `overlap`, where its result is needed: at the sizes that were timed, more launches cost more than the wait.

    Raises ConfigError, by name, for one whose heads the ranks of the context cannot share evenly.
    """
    size = dist.get_world_size(context.group(Axis.ULYSSES, "Ulysses needs ranks to share heads"))
    for name, attention in list(outermost(module)):
        if attention.skip_sequence_parallel:
            continue
        for what, heads in (("heads", attention.num_heads), ("key/value heads", attention.num_kv_heads)):
            if heads % size:
                raise ConfigError(
                    f"{context.component}.{name} has {heads} {what}, which {size} ranks cannot share evenly; "
                    f"use a degree that divides {heads}, or leave Ulysses off: keys and values are fetched then"
                )
        module.set_submodule(name, UlyssesAttention(attention, overlap))


class UlyssesAttention(AttentionWrapper):
    """Around another attention, which computes all tokens for this rank's share of the heads."""

    def __init__(self, inner: Attention, overlap: bool = False) -> None:
        super().__init__(inner)
        self.overlap = overlap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """q [T, H, D], k and v [T_kv, K, D] of this rank's tokens -> [T, H, D]. All-to-alls exchange tokens for heads
        before the wrapped attention, and back after it. Raises InternalError where keys are sharded and queries are
        not.
        """
        return self.begin(q, k, v, rows, over, kv)()

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor | Begun, rows: Rows, over: str = JOINT, kv: str | None = None
    ) -> Begun:
        """Begins the all-to-alls before the wrapped attention; the rest is done when the result is asked for."""
        exchange, source = rows.exchange, kv or over
        if exchange is None or not exchange.spreads(source):
            return self.inner.begin(q, k, v, rows, over, kv)
        if not exchange.spreads(over):
            raise InternalError(f"attention from {over!r}, which every rank has, to {source!r}, which is spread")
        tokens = q.shape[0]
        if not isinstance(v, Tensor):
            coming, values = _to_heads(exchange, over, q, k), v
            finish = functools.partial(self._finish, lambda: (*coming(), values()), rows, over, kv, tokens)
        elif source == over:
            finish = functools.partial(self._finish, _to_heads(exchange, over, q, k, v), rows, over, kv, tokens)
        else:
            queries, others = _to_heads(exchange, over, q), _to_heads(exchange, source, k, v)
            finish = functools.partial(self._finish, lambda: (*queries(), *others()), rows, over, kv, tokens)
        return finish if self.overlap else there(finish())

    def begin_values(self, v: Begun, rows: Rows, over: str = JOINT) -> Begun | None:
        """Begins the all-to-all of values; what it returns gives [T, K / P, D] of all tokens."""
        exchange = rows.exchange
        if exchange is None or not exchange.spreads(over):
            return self.inner.begin_values(v, rows, over)
        if not self.overlap:
            return None
        coming = _to_heads(exchange, over, v())
        return lambda: coming()[0]

    def _finish(self, heads: Moved, rows: Rows, over: str, kv: str | None, tokens: int) -> Tensor:
        """From the heads to the result for this rank's `tokens`."""
        assert rows.exchange is not None
        return _to_tokens(rows.exchange, over, self.inner(*heads(), rows.whole, over, kv), tokens)

    def computed_by(self, rows: Rows) -> Attention | None:
        return None if rows.exchange is not None else self.inner.computed_by(rows)


Moved = Callable[[], tuple[Tensor, ...]]
"""Gives what is on its way, once it is there."""


def _to_heads(exchange: Exchange, stream: str, *tensors: Tensor) -> Moved:
    """Begins to exchange this rank's tokens with all heads for all tokens with this rank's heads: [T of this rank, H,
    D] -> [T, H / P, D].

    The tensors may differ in H and travel together.
    """
    order, heads = exchange.order[stream], torch.cat([x.unflatten(1, (exchange.size, -1)) for x in tensors], 2)
    sent = heads.transpose(0, 1).flatten(0, 1).contiguous()
    received = sent.new_empty(order.shape[0], *sent.shape[1:])
    sizes, shares = [heads.shape[0]] * exchange.size, [x.shape[1] // exchange.size for x in tensors]
    coming = all_to_all(received, sent, exchange.counts[stream], sizes, exchange.group)
    return lambda: coming().index_select(0, order).split(shares, 1)


def _to_tokens(exchange: Exchange, stream: str, x: Tensor, tokens: int) -> Tensor:
    """The inverse, for a rank with `tokens` tokens: [T, H / P, D] -> [tokens, H, D]."""
    parts = x.index_select(0, exchange.ranked[stream])
    received = x.new_empty(exchange.size * tokens, *x.shape[1:])
    out = all_to_all(received, parts, [tokens] * exchange.size, exchange.counts[stream], exchange.group)()
    by_token: Tensor = out.unflatten(0, (exchange.size, tokens)).transpose(0, 1)
    return by_token.flatten(1, 2)
