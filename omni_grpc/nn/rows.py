"""Rows: the geometry of a packed denoiser batch, and the tensors that are packed by it.

A row is one sequence: one image of one request in one guidance branch. A stream ("txt", "img") holds the tokens of all
rows end to end in one [T, C] tensor. Two streams are derived: "joint" has each row's streams one after the other, but
for those that stay aside, and "mod" has each row's modulation vectors. Lengths are Python ints, which are the truth;
index tensors are made from them once per geometry, travel to the device in one copy and are never read back.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.nn.coming import Begun, all_to_all
from omni_grpc.types.errors import InternalError

JOINT = "joint"
MOD = "mod"

Runs = tuple[tuple[int, int], ...]
"""((level, tokens), ...): runs of tokens that share one of their row's modulation vectors."""

Owner = tuple[Any, str]
"""(state, branch): the request's output and the guidance branch that a row belongs to."""


@runtime_checkable
class ByOwner(Protocol):
    """A part of a block that treats rows differently by their owner. `variant` returns everything it looks at in an
    owner: for owners with equal variants it does the same.
    """

    @property
    def variant(self) -> Callable[[Owner], Hashable]: ...


def variants(module: nn.Module) -> tuple[Callable[[Owner], Hashable], ...]:
    """The `variant` functions of all such parts of a module, each once."""
    return tuple(dict.fromkeys(part.variant for part in module.modules() if isinstance(part, ByOwner)))


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """The lengths of one sequence, stream by stream; the order of the streams is their order in "joint".

    aside: streams that are no part of "joint": what the others only look across to.
    """

    streams: tuple[tuple[str, Runs], ...]
    aside: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if absent := set(self.aside) - set(self.names):
            raise ValueError(f"aside: the row has no stream {', '.join(sorted(absent))}")
        for name, runs in self.streams:
            if name in (JOINT, MOD):
                raise ValueError(f"stream {name!r}: the name is taken by a derived stream")
            if any(level < 0 or tokens < 0 for level, tokens in runs):
                raise ValueError(f"stream {name!r}: levels and tokens must not be negative, got {runs}")

    @classmethod
    def of(cls, *, aside: tuple[str, ...] = (), **streams: int | Runs) -> Row:
        """`Row.of(txt=7, img=((0, 16), (1, 24)))`; a bare number of tokens is one run at level 0."""
        return cls(
            tuple((name, ((0, runs),) if isinstance(runs, int) else tuple(runs)) for name, runs in streams.items()),
            aside,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.streams)

    @property
    def joined(self) -> tuple[str, ...]:
        """The streams of "joint"."""
        return tuple(name for name in self.names if name not in self.aside)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each stream, in the order of `names`."""
        return tuple(sum(tokens for _, tokens in runs) for _, runs in self.streams)

    @property
    def levels(self) -> int:
        """Modulation vectors that this row needs: one more than its highest level."""
        return 1 + max((level for _, runs in self.streams for level, _ in runs), default=0)


class Stream:
    """How one tensor is packed: lengths and offsets of its rows as ints, and `cu`, the offsets as int32 [R + 1]; `host`
    is the same in the host's memory.
    """

    cu: Tensor
    host: Tensor

    def __init__(self, lengths: Iterable[int]) -> None:
        self.lengths = tuple(lengths)
        self.offsets = (0, *itertools.accumulate(self.lengths))
        self.longest = max(self.lengths, default=0)

    @property
    def total(self) -> int:
        return self.offsets[-1]

    def slice(self, row: int) -> slice:
        return slice(self.offsets[row], self.offsets[row + 1])

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        """One view of x [T, ...] per row."""
        views: tuple[Tensor, ...] = x.split(self.lengths)
        return views

    def take(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The given rows of x [T, ...], end to end: a view where they are consecutive, else a copy."""
        if _is_run(rows):
            return x[self.offsets[rows[0]] : self.offsets[rows[-1] + 1]]
        return torch.cat([x[self.slice(row)] for row in rows])


class RowLayout:
    """The streams of one geometry and its index tensors, all int32 and all parts of one buffer on the device.

    `index[s]` [T_s] is each token's row in a tensor that is packed by "mod"; `place[s]` [T_s] is its position in
    "joint", for the streams that are a part of it: `joined`.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self.rows = tuple(rows)
        self.names, self.joined = _common_names(self.rows)
        lengths = list(zip(*(row.lengths for row in self.rows), strict=True))
        self.streams = {name: Stream(column) for name, column in zip(self.names, lengths, strict=True)}
        self.streams[JOINT] = Stream(map(sum, zip(*(self.streams[name].lengths for name in self.joined), strict=True)))
        self.streams[MOD] = Stream(row.levels for row in self.rows)

        index = {name: self._index(column) for column, name in enumerate(self.names)}
        place = self._place()
        index[JOINT] = torch.empty(self.streams[JOINT].total, dtype=torch.int32)
        for name in self.joined:
            index[JOINT][place[name]] = index[name]
        cu = {name: torch.tensor(stream.offsets, dtype=torch.int32) for name, stream in self.streams.items()}

        for name, stream in self.streams.items():
            stream.host = cu[name]
        self.index, self.place, cu = _to_device([index, place, cu], device)
        for name, stream in self.streams.items():
            stream.cu = cu[name]

    def _index(self, column: int) -> Tensor:
        """For each token of one stream: the offset of its row in "mod", plus its level."""
        runs = [
            (offset + level, tokens)
            for row, offset in zip(self.rows, self.streams[MOD].offsets, strict=False)
            for level, tokens in row.streams[column][1]
        ]
        vectors, tokens = torch.tensor(runs, dtype=torch.int32).reshape(-1, 2).unbind(1)
        return vectors.repeat_interleave(tokens)

    def _place(self) -> dict[str, Tensor]:
        """For each token of each stream of "joint": the start of its row there, past the streams before it, plus its
        position.
        """
        start = torch.tensor(self.streams[JOINT].offsets[:-1], dtype=torch.int32)
        place = {}
        for name in self.joined:
            stream = self.streams[name]
            lengths = torch.tensor(stream.lengths, dtype=torch.int32)
            shift = start - torch.tensor(stream.offsets[:-1], dtype=torch.int32)
            place[name] = torch.arange(stream.total, dtype=torch.int32) + shift.repeat_interleave(lengths)
            start = start + lengths
        return place


class LayoutCache:
    """A cache of layouts by geometry, least recently used first out. The worker owns one; its lanes may share it."""

    def __init__(self, device: torch.device | str, capacity: int = 512) -> None:
        self.device = torch.device(device)
        self.capacity = capacity
        self._layouts: collections.OrderedDict[tuple[Row, ...], RowLayout] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._layouts)

    def get(self, rows: tuple[Row, ...]) -> RowLayout:
        with self._lock:
            layout = self._layouts.get(rows)
            if layout is None:
                layout = self._layouts[rows] = RowLayout(rows, self.device)
                if len(self._layouts) > self.capacity:
                    self._layouts.popitem(last=False)
            self._layouts.move_to_end(rows)
            return layout


@dataclasses.dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Exchange:
    """What a batch of which each rank has a part of every row knows of the other parts.

    rows: the rows with the tokens of all ranks. group, size, rank: the ranks, and which of them this is.
    Streams that are not spread are whole on every rank; for each that is:
    counts: tokens of each rank.
    ranked: int32 [T], its tokens rank by rank -> their place among all. order: the inverse.
    parts: the rows as each rank has them, by rank.
    narrow: the exchange of some of the rows, by their numbers.
    outer: where these ranks together have only a part of every row, the exchange with those that have the others.
    """

    rows: tuple[Row, ...]
    group: dist.ProcessGroup
    size: int
    rank: int
    counts: Mapping[str, tuple[int, ...]]
    ranked: Mapping[str, Tensor]
    order: Mapping[str, Tensor]
    parts: tuple[tuple[Row, ...], ...]
    narrow: Callable[[Sequence[int]], Exchange]
    outer: Exchange | None = None

    def spreads(self, stream: str) -> bool:
        """Whether each rank has a part of the stream. Raises InternalError where that is so of a part of "joint"."""
        if stream == JOINT and JOINT not in self.counts:
            raise InternalError(
                f"attention over {JOINT!r}, of which {', '.join(self.counts)} is spread over ranks and the rest is not"
            )
        return stream in self.counts

    def gather(self, stream: str, x: Tensor) -> Tensor:
        """The tokens of all ranks, in the order of the whole stream: [T of this rank, ...] -> [T, ...]."""
        return self.begin_gather(stream, x)()

    def begin_gather(self, stream: str, x: Tensor) -> Begun:
        """Begins to `gather` x [T of this rank, ...]; what it returns gives [T, ...].

        An all-to-all of equal messages, because parts differ in size, which not every all-gather takes.
        """
        order = self.order[stream]
        out = x.new_empty(order.shape[0], *x.shape[1:])
        copies = torch.cat([x] * self.size)
        coming = all_to_all(out, copies, self.counts[stream], [x.shape[0]] * self.size, self.group)
        return lambda: coming().index_select(0, order)

    def sum(self, x: Tensor) -> Tensor:
        """All-reduces x [...], of any shape, to its sum over the ranks, those of `outer` included. x itself is left as
        it is.
        """
        total = x.clone()
        dist.all_reduce(total, group=self.group)
        return total if self.outer is None else self.outer.sum(total)


class Rows:
    """A batch: who owns each row, the layout, and the tensors bound to it by name.

    Whatever is per token or per row is bound under the name of the stream that packs it, so that `narrow` treats it
    without knowing what it is. `source` is whatever the bound tensors were made from, row by row. With an `exchange`,
    these are the parts of the rows that one rank has. `notes` is for parts of blocks that work something out of the
    owners, once for all layers: each under a key of its own.
    """

    def __init__(
        self,
        owners: Iterable[Owner],
        rows: Iterable[Row],
        layouts: LayoutCache,
        bound: Mapping[str, tuple[str, Tensor]] | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.owners = tuple(owners)
        self.layouts = layouts
        self.layout = layouts.get(tuple(rows))
        self.bound = dict(bound or {})
        self.source: tuple[object, ...] = ()
        self.notes: dict[Hashable, Any] = {}
        self.exchange = exchange
        self._whole = None if exchange is None else Rows(self.owners, exchange.rows, layouts, exchange=exchange.outer)
        if len(self.owners) != len(self.layout.rows):
            raise ValueError(f"{len(self.owners)} owners for {len(self.layout.rows)} rows")

    def __len__(self) -> int:
        return len(self.owners)

    def __getitem__(self, name: str) -> Tensor:
        return self.bound[name][1]

    @property
    def index(self) -> Mapping[str, Tensor]:
        return self.layout.index

    @property
    def place(self) -> Mapping[str, Tensor]:
        return self.layout.place

    @property
    def whole(self) -> Rows:
        """The same rows with the tokens of every rank of the exchange; where they are spread, with nothing bound."""
        return self if self._whole is None else self._whole

    def stream(self, name: str) -> Stream:
        return self.layout.streams[name]

    def bind(self, name: str, stream: str, per_row: Sequence[Tensor]) -> None:
        """Packs one tensor per row, each [its length in `stream`, ...], under `name`. A single row is bound without a
        copy.
        """
        lengths = tuple(len(x) for x in per_row)
        if lengths != self.stream(stream).lengths:
            raise ValueError(f"{name!r} has rows of {lengths}, stream {stream!r} of {self.stream(stream).lengths}")
        self.bound[name] = (stream, per_row[0] if len(per_row) == 1 else torch.cat(list(per_row)))

    def narrow(self, rows: Sequence[int]) -> Rows:
        """The sub-batch of the given rows: views where each follows the one before; all of them: this batch itself."""
        if _is_run(rows) and len(rows) == len(self):
            return self
        return Rows(
            [self.owners[row] for row in rows],
            [self.layout.rows[row] for row in rows],
            self.layouts,
            {name: (stream, self.stream(stream).take(x, rows)) for name, (stream, x) in self.bound.items()},
            self.exchange and self.exchange.narrow(tuple(rows)),
        )

    def totals(self, per_row: Tensor) -> Tensor:
        """[R, ...], sums over the tokens of each row that are here -> sums over all of its tokens, whoever has them.

        Ranks that decide by such a sum decide alike. It has to be of a stream that is spread over them: what every rank
        has would count once for each.
        """
        return per_row if self.exchange is None else self.exchange.sum(per_row)

    # join and split run inside compiled blocks: they read tensors and their shapes, never lengths, offsets or
    # len(rows), each of which would make one graph per geometry.

    @property
    def single(self) -> bool:
        """Whether this is a batch of one row."""
        return self.stream(JOINT).cu.shape[0] == 2

    def join(self, parts: Mapping[str, Tensor]) -> Tensor:
        """One tensor per stream of "joint", each [T_s, ...], into its order."""
        tensors = [parts[name] for name in self.layout.joined]
        if self.single:
            return torch.cat(tensors)
        first = tensors[0]
        joint = first.new_empty(sum(x.shape[0] for x in tensors), *first.shape[1:])
        for name, x in zip(self.layout.joined, tensors, strict=True):
            joint[self.place[name]] = x
        return joint

    def split(self, joint: Tensor) -> dict[str, Tensor]:
        """The inverse of `join`: joint [T_joint, ...] -> [T_s, ...] by stream. Views where there is a single row."""
        if self.single:
            parts = joint.split([self.place[name].shape[0] for name in self.layout.joined])
            return dict(zip(self.layout.joined, parts, strict=True))
        return {name: joint.index_select(0, self.place[name]) for name in self.layout.joined}


def _is_run(rows: Sequence[int]) -> bool:
    return all(after == before + 1 for before, after in itertools.pairwise(rows))


def _common_names(rows: tuple[Row, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The streams of every row, and those of them that are joined."""
    if not rows:
        raise ValueError("a layout needs at least one row")
    first = rows[0].names, rows[0].joined
    if different := {(row.names, row.joined) for row in rows} - {first}:
        raise ValueError(f"rows of one batch must have the same streams: {first} and {different.pop()}")
    return first


def _to_device(groups: list[dict[str, Tensor]], device: torch.device) -> list[dict[str, Tensor]]:
    """The same tensors on the device, as parts of one buffer: one copy, asynchronous from pinned memory on CUDA."""
    parts = [part for group in groups for part in group.values()]
    buffer = torch.cat(parts)
    if device.type == "cuda":
        buffer = buffer.pin_memory()
    moved = iter(buffer.to(device, non_blocking=True).split([part.numel() for part in parts]))
    return [{name: next(moved) for name in group} for group in groups]
