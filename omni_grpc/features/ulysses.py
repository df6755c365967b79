"""Ulysses (https://arxiv.org/abs/2309.14509): attention over tokens that are sharded over ranks, by heads.

One all-to-all gives a rank the queries, keys and values of all tokens for its share of the heads; another one returns
the results to the ranks that have the tokens. Where a batch is not sharded (`rows.exchange`), or the keys and values
are whole on every rank, attention runs as it is. Where more ranks share the tokens than share heads, the wrapped
attention gets the tokens of these ranks, and those of the others by fetching them or in a ring.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.attention import Attention, AttentionWrapper, outermost
from omni_grpc.nn.rows import JOINT, Exchange, Rows
from omni_grpc.types.errors import ConfigError, InternalError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]


def apply(module: nn.Module, config: object, context: Context) -> None:
    """Wraps every attention but those with `skip_sequence_parallel`.

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
        module.set_submodule(name, UlyssesAttention(attention))


class UlyssesAttention(AttentionWrapper):
    """Around another attention, which computes all tokens for this rank's share of the heads."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """q [T, H, D], k and v [T_kv, K, D] of this rank's tokens -> [T, H, D]. All-to-alls exchange tokens for heads
        before the wrapped attention, and back after it. Raises InternalError where keys are sharded and queries are
        not.
        """
        exchange, source = rows.exchange, kv or over
        if exchange is None or not exchange.spreads(source):
            local: Tensor = self.inner(q, k, v, rows, over, kv)
            return local
        if not exchange.spreads(over):
            raise InternalError(f"attention from {over!r}, which every rank has, to {source!r}, which is spread")
        tokens = q.shape[0]
        if source == over:
            q, k, v = _to_heads(exchange, over, q, k, v)
        else:
            (q,), (k, v) = _to_heads(exchange, over, q), _to_heads(exchange, source, k, v)
        return _to_tokens(exchange, over, self.inner(q, k, v, rows.whole, over, kv), tokens)

    def computed_by(self, rows: Rows) -> Attention | None:
        return None if rows.exchange is not None else self.inner.computed_by(rows)


def _to_heads(exchange: Exchange, stream: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """This rank's tokens with all heads -> all tokens with this rank's heads: [T of this rank, H, D] -> [T, H / P, D].

    The tensors may differ in H and travel together.
    """
    heads = torch.cat([x.unflatten(1, (exchange.size, -1)) for x in tensors], 2)
    sent = heads.transpose(0, 1).flatten(0, 1).contiguous()
    out = sent.new_empty(exchange.order[stream].shape[0], *sent.shape[1:])
    sizes = [heads.shape[0]] * exchange.size
    dist.all_to_all_single(out, sent, list(exchange.counts[stream]), sizes, group=exchange.group)
    out = out.index_select(0, exchange.order[stream])
    split: tuple[Tensor, ...] = out.split([x.shape[1] // exchange.size for x in tensors], 1)
    return split


def _to_tokens(exchange: Exchange, stream: str, x: Tensor, tokens: int) -> Tensor:
    """The inverse, for a rank with `tokens` tokens: [T, H / P, D] -> [tokens, H, D]."""
    parts = x.index_select(0, exchange.ranked[stream])
    out = x.new_empty(exchange.size * tokens, *x.shape[1:])
    sizes = [tokens] * exchange.size
    dist.all_to_all_single(out, parts, sizes, list(exchange.counts[stream]), group=exchange.group)
    by_token: Tensor = out.unflatten(0, (exchange.size, tokens)).transpose(0, 1)
    return by_token.flatten(1, 2)
