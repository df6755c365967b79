"""Sequence parallel: each rank has a part of every row's tokens, from before the first block to after the last.

A stack's carry is sharded, and so is whatever is bound to the streams that it carries. Tokens of other streams, which
blocks read as constants, are whole on every rank. Of a row's n tokens in a stream, rank q of P has those from n q / P
to n (q + 1) / P, rounded down: shards may differ by one token and may be empty. How a row is sharded depends on that
row alone, so what a request keeps from step to step fits in any batch.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.attention import Attention, AttentionWrapper, leaves
from omni_grpc.nn.coming import Begun, Coming, there
from omni_grpc.nn.rows import JOINT, Exchange, Row, Rows, Runs
from omni_grpc.nn.stack import Carry, RunBlocks, Stack, convert
from omni_grpc.ops.attention_parts import merge, part_backend
from omni_grpc.types.errors import InternalError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]

CAUSAL = (
    "causal attention over tokens that are spread over ranks: let ranks share its heads, instead of fetching keys and "
    "values"
)

GEOMETRIES = 512
"""Geometries whose index tensors are kept, at most."""


def apply(module: nn.Module, config: object, context: Context, *, overlap: bool = False) -> None:
    """Spreads the tokens of every stack over the ranks of "sequence": over those that fetch keys and values, and each
    part of those over the ranks that exchange heads. It has to be the last to wrap the stacks.

    Every attention but those with `skip_sequence_parallel` gets the keys and values of the other ranks: all at once, or
    with a `ring_degree` rank by rank. With `overlap`, other things than the attention are computed meanwhile; at the
    sizes that were timed, its launches cost more than the wait. Raises ConfigError for a backend that computes no
    parts, if there is a ring.
    """
    context.group(Axis.SEQUENCE, "sequence parallel needs ranks to spread tokens over")
    assert context.ranks is not None
    groups = [context.ranks.groups[axis] for axis in (Axis.ULYSSES, Axis.OUTER) if axis in context.ranks.groups]
    for stack in [child for child in module.modules() if isinstance(child, Stack)]:
        for group in groups:
            stack.wrap(functools.partial(_spread, RankShards(group, context.device)))
    if Axis.OUTER not in context.ranks.groups:
        return
    # innermost: what wraps an attention may bring it all tokens in another way, and then nothing is fetched
    ring = context.ranks.sizes.ring_degree > 1
    for name, attention in leaves(module):
        if attention.skip_sequence_parallel:
            continue
        if ring:
            part_backend(attention.backend, attention.uses(context.device, context.dtype))
        wrapper = RingAttention if ring else GatheringAttention
        module.set_submodule(name, wrapper(attention, overlap))


class GatheringAttention(AttentionWrapper):
    """Around the innermost attention, which gets the keys and values of all ranks where tokens are spread."""

    def __init__(self, inner: Attention, overlap: bool = False) -> None:
        super().__init__(inner)
        self.overlap = overlap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """q [T, H, D] of this rank, k and v [T_kv, K, D] -> [T, H, D], with the keys and values of all ranks gathered.
        Raises InternalError for causal attention over sharded tokens.
        """
        return self.begin(q, k, v, rows, over, kv)()

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor | Begun, rows: Rows, over: str = JOINT, kv: str | None = None
    ) -> Begun:
        """Begins to gather keys and values, or keys alone; attends to them when the result is asked for."""
        exchange, source = rows.exchange, kv or over
        if exchange is None or not exchange.spreads(source):
            return self.inner.begin(q, k, v, rows, over, kv)
        if self.causal:
            raise InternalError(CAUSAL)
        if isinstance(v, Tensor):
            both = exchange.begin_gather(source, torch.stack([k, v], 1))
            finish = functools.partial(self._finish, q, lambda: both().unbind(1), rows, over, source)
        else:
            keys, values = exchange.begin_gather(source, k), v
            finish = functools.partial(self._finish, q, lambda: (keys(), values()), rows, over, source)
        return finish if self.overlap else there(finish())

    def begin_values(self, v: Begun, rows: Rows, over: str = JOINT) -> Begun | None:
        """Begins to gather values; what it returns gives those of all ranks [T, K, D]."""
        exchange = rows.exchange
        if exchange is None or not exchange.spreads(over):
            return self.inner.begin_values(v, rows, over)
        return exchange.begin_gather(over, v()) if self.overlap and not self.causal else None

    def _finish(
        self, q: Tensor, gathered: Callable[[], tuple[Tensor, ...]], rows: Rows, over: str, source: str
    ) -> Tensor:
        k, v = gathered()
        return self.inner.attend(q, k, v, rows.stream(over), rows.whole.stream(source))

    def computed_by(self, rows: Rows) -> Attention | None:
        return None if rows.exchange is not None else self.inner.computed_by(rows)


class RingAttention(AttentionWrapper):
    """Around the innermost attention, where the keys and values of all ranks go around: each rank passes on what it has
    just had, while it attends to it, and merges the parts (https://arxiv.org/abs/2310.01889). It never has more than
    two ranks' keys and values.
    """

    def __init__(self, inner: Attention, overlap: bool = False) -> None:
        super().__init__(inner)
        self.overlap = overlap

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """q [T, H, D] of this rank, k and v [T_kv, K, D] -> [T, H, D], with the keys and values of all ranks. Raises
        InternalError for causal attention over sharded tokens.
        """
        return self.begin(q, k, v, rows, over, kv)()

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor | Begun, rows: Rows, over: str = JOINT, kv: str | None = None
    ) -> Begun:
        """Begins to pass on this rank's keys and values; all that is computed is when the result is asked for."""
        exchange, source = rows.exchange, kv or over
        if exchange is None or not exchange.spreads(source):
            return self.inner.begin(q, k, v, rows, over, kv)
        if self.causal:
            raise InternalError(CAUSAL)
        # keys and values go together
        held = torch.stack([k, v if isinstance(v, Tensor) else v()], 1)
        finish = functools.partial(self._finish, q, held, _pass_on(exchange, source, held, 0), rows, over, source)
        return finish if self.overlap else there(finish())

    def _finish(self, q: Tensor, held: Tensor, coming: Coming | None, rows: Rows, over: str, source: str) -> Tensor:
        exchange, part = rows.exchange, None
        assert exchange is not None
        for step in range(exchange.size):
            owner = (exchange.rank - step) % exchange.size
            if step:
                coming = _pass_on(exchange, source, held, step)
            keys = rows.layouts.get(exchange.parts[owner]).streams[source]
            k, v = held[: keys.total].unbind(1)
            made = self.inner.attend_part(q, k, v, rows.stream(over), keys)
            part = made if part is None else merge(part, made)
            if coming is not None:
                held = coming.wait()
        assert part is not None
        return part.out.to(q.dtype)

    def computed_by(self, rows: Rows) -> Attention | None:
        return None if rows.exchange is not None else self.inner.computed_by(rows)


def _pass_on(exchange: Exchange, stream: str, held: Tensor, step: int) -> Coming | None:
    """In the given step around the ring, begins to send what is held of a stream, [T, 2, K, D], to the next rank, and
    to receive what the rank before has. Of no tokens, one is sent that is not read: every rank takes part in every
    exchange. None after the last one.
    """
    here, size = exchange.rank, exchange.size
    if step + 1 == size:
        return None
    sent = (held if len(held) else held.new_zeros(1, *held.shape[1:])).contiguous()
    tokens = max(1, exchange.counts[stream][(here - step - 1) % size])
    received = held.new_empty(tokens, *held.shape[1:])
    following, before = (dist.get_global_rank(exchange.group, (here + each) % size) for each in (1, -1))
    work = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, following, exchange.group),
            dist.P2POp(dist.irecv, received, before, exchange.group),
        ]
    )
    return Coming(received, sent, work)


def _spread(cuts: RankShards, run: RunBlocks) -> RunBlocks:
    def spread(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        joined = tuple(rows.place)
        cut = cuts.of(rows.layout.rows, joined if JOINT in carry else tuple(carry), joined, rows.exchange)
        mine = Rows(
            rows.owners,
            cut.rows,
            rows.layouts,
            {name: (stream, cut.shard(stream, x)) for name, (stream, x) in rows.bound.items()},
            cut.exchange,
        )
        out = run(stack, lo, hi, {stream: cut.shard(stream, x) for stream, x in carry.items()}, mine)
        out = convert(out, tuple(carry), mine)
        coming = {stream: cut.exchange.begin_gather(stream, x) for stream, x in out.items()}
        return {stream: whole() for stream, whole in coming.items()}

    return spread


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RankShard:
    """One geometry as this rank has it: its rows, and for each stream that is sharded the places of its tokens among
    all tokens.
    """

    rows: tuple[Row, ...]
    places: Mapping[str, Tensor]
    exchange: Exchange

    def shard(self, stream: str, x: Tensor) -> Tensor:
        """This rank's part of a tensor that is packed by the stream: [T, ...] -> [T of this rank, ...]."""
        return x.index_select(0, self.places[stream]) if stream in self.places else x


class RankShards:
    """Shards batches over the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.of = functools.lru_cache(GEOMETRIES)(self._cut)

    def _cut(
        self, rows: tuple[Row, ...], spread: tuple[str, ...], joined: tuple[str, ...], outer: Exchange | None
    ) -> RankShard:
        """The rows' streams `spread` are cut, the others are whole on every rank; `joined` are those of "joint".
        `outer`: where the rows are parts themselves.
        """
        streams = {name: (name,) for name in spread} | {JOINT: joined}
        places = {
            stream: [_places(rows, spread, names, rank, self.size) for rank in range(self.size)]
            for stream, names in streams.items()
        }
        mine = {stream: parts[self.rank].to(self.device) for stream, parts in places.items()}
        if not set(joined) <= set(spread):
            # what is whole is there on every rank, so all ranks' tokens together are no permutation of the stream
            del places[JOINT]
        ranked = {stream: torch.cat(parts) for stream, parts in places.items()}

        def narrow(chosen: Sequence[int]) -> Exchange:
            within = None if outer is None else outer.narrow(chosen)
            return self.of(tuple(rows[row] for row in chosen), spread, joined, within).exchange

        parts = tuple(tuple(_part(row, spread, rank, self.size) for row in rows) for rank in range(self.size))
        exchange = Exchange(
            rows=rows,
            group=self.group,
            size=self.size,
            rank=self.rank,
            counts={stream: tuple(map(len, of_stream)) for stream, of_stream in places.items()},
            ranked={stream: place.to(self.device) for stream, place in ranked.items()},
            order={stream: place.argsort().int().to(self.device) for stream, place in ranked.items()},
            parts=parts,
            narrow=narrow,
            outer=outer,
        )
        return RankShard(parts[self.rank], mine, exchange)


def _bounds(tokens: int, rank: int, size: int) -> tuple[int, int]:
    return tokens * rank // size, tokens * (rank + 1) // size


def _part(row: Row, spread: Sequence[str], rank: int, size: int) -> Row:
    """The row as one rank has it. Levels without tokens stay, because modulation is whole on every rank."""
    streams = tuple(
        (name, _clip(runs, *_bounds(tokens, rank, size)) if name in spread else runs)
        for (name, runs), tokens in zip(row.streams, row.lengths, strict=True)
    )
    return dataclasses.replace(row, streams=streams)


def _clip(runs: Runs, start: int, end: int) -> Runs:
    clipped, at = [], 0
    for level, tokens in runs:
        clipped.append((level, max(0, min(end, at + tokens) - max(start, at))))
        at += tokens
    return tuple(clipped)


def _places(rows: Sequence[Row], spread: Sequence[str], names: Sequence[str], rank: int, size: int) -> Tensor:
    """Of a tensor that packs the named streams row by row, the places of what one rank has: int32."""
    spans, at = [], 0
    for row in rows:
        for name, tokens in zip(row.names, row.lengths, strict=True):
            if name in names:
                start, end = _bounds(tokens, rank, size) if name in spread else (0, tokens)
                spans.append(torch.arange(at + start, at + end, dtype=torch.int32))
                at += tokens
    return torch.cat(spans)
