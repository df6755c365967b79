"""CUDA graphs: a batch that comes again is launched as a whole, by one call
(https://developer.nvidia.com/blog/cuda-graphs).

A stack launches a few hundred kernels, and where they are short the device waits for the host. The kernels of a batch
depend on its geometry, on the shapes of the tensors bound to it, and on what parts of the blocks look at in a row's
owner. Together these are the batch's key. The first batch of a key runs kernel by kernel, the second one too, on
tensors that are kept; the third one is captured in a graph. From then on, each batch of that key is copied into those
tensors and the graph is launched. Results are those of the blocks, bit for bit.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from omni_grpc.config import WorkerConfig
from omni_grpc.features import Context, single_threaded
from omni_grpc.nn.rows import JOINT, LayoutCache, Owner, Rows, variants
from omni_grpc.nn.stack import Carry, RunBlocks, Stack, main_stack
from omni_grpc.ops.tuning import choices
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.ranks import Axis
from omni_grpc.types.results import RequestWarning

__all__ = ["apply"]

logger = logging.getLogger(__name__)

MAX_TOKENS = 8192
"""Tokens of a batch, at most, unless the configuration says otherwise. Above that the device takes longer than the host
for all but the smallest models, so a graph would only take memory.
"""

MAX_GRAPHS = 64
"""Captured batches, at most."""

MAX_BYTES = 1 << 30
"""Bytes of the inputs and results of all captured batches, at most. What lies between them is shared by all graphs."""

MAX_KEYS = 4096
"""Keys that are remembered, at most, to tell whether a batch comes again."""

CAPTURES, REPLAYS = "graph_captures", "graph_replays"
"""What is counted: graphs that were captured, and how often one was launched."""

BatchKey = tuple[Any, ...]
Replay = Callable[[], None]
Blocks = Callable[[Carry, Rows], Carry]
"""Runs some blocks of a stack."""


def apply(module: nn.Module, config: WorkerConfig, context: Context) -> None:
    """Puts graphs around the main stack, unless ranks share the work of its blocks: each decides by itself when a batch
    is captured. Raises ConfigError where the setting asks for graphs and there are none.
    """
    asked = config.cuda_graph_tokens
    shared = context.ranks is not None and bool({Axis.PEERS, Axis.PIPELINE} & context.ranks.groups.keys())
    if shared or context.device.type != "cuda":
        if asked:
            lacking = "ranks share the work of the blocks" if shared else f"{context.device} has no CUDA graphs"
            wrong = Violation("cuda_graph_tokens", f"is {asked}, and {lacking}: leave it out")
            message = f"--cuda-graph-tokens {wrong.description}"
            raise ConfigError(message, reason="SETTING_WITHOUT_EFFECT", violations=(wrong,))
        return
    _, stack = main_stack(module)
    graphs = Graphs(
        stack,
        MAX_TOKENS if asked is None else asked,
        CudaRecorder(context.device),
        exclusive=context.exclusive,
        epoch=lambda: choices(context.device).epoch,
        tell=context.effects.warn,
        counts=context.effects.counts,
    )
    stack.wrap(graphs.around)
    # graphs read weights by their addresses, which are others after waking
    context.effects.on_sleep.append(graphs.forget)
    context.effects.stale.append(graphs.forget_where)


class Recorder(abc.ABC):
    """Records what a function does on tensors that keep their addresses, to repeat it by one call."""

    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether a recording can be made, or repeated, on the current stream."""

    @abc.abstractmethod
    def record(self, run: Callable[[], Carry]) -> tuple[Replay, Carry]:
        """The call that repeats `run`, and the tensors that hold its results after each call. `run` has been called
        once before; whether this call computes anything is up to the recorder.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Frees what the recordings hold; none of them will be called again."""


class CudaRecorder(Recorder):
    """Captures graphs that share one memory pool. They are launched on one stream, so no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = torch.cuda.Stream(device)
        self._stream: torch.cuda.Stream | None = None
        self._keeper: torch.cuda.CUDAGraph | None = None

    def usable(self) -> bool:
        stream = torch.cuda.current_stream(self.device)
        if self._stream is None:
            self._stream = stream
        return stream == self._stream and not torch.cuda.is_current_stream_capturing()

    def record(self, run: Callable[[], Carry]) -> tuple[Replay, Carry]:
        """Raises whatever a block raises that cannot be captured."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            if self._keeper is None:
                # a pool cannot be used again once its last graph has gone
                self._keeper = self._empty_graph(torch.cuda.graph_pool_handle())
            graph.capture_begin(pool=self._keeper.pool(), capture_error_mode="thread_local")
            try:
                out = run()
                graph.capture_end()
            except BaseException:
                self._abort_capture(graph, self._keeper.pool())
                raise
        return graph.replay, out

    def forget(self) -> None:
        self._keeper = None

    def _empty_graph(self, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(1, device=self.device)
        graph.capture_end()
        return graph

    def _abort_capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture that failed. Where CUDA has already invalidated it, torch still believes that it is under way:
        the allocator until it is told, the random generator until another capture ends.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # the allocator knows already
                torch._C._cuda_endAllocateToPool(self._side.device_index, pool)
            self._empty_graph(torch.cuda.graph_pool_handle())


class ReadRecorder(Rows):
    """A batch that records which of its bound tensors are read."""

    read: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        self.read |= {name}
        return super().__getitem__(name)


class CapturedBatch:
    """The tensors of one key and, once recorded, the call that computes on them. It holds no owner, because an owner
    holds everything of its request.
    """

    def __init__(self, carry: Carry, rows: Rows) -> None:
        self.rows = rows.layout.rows
        self.layouts = LayoutCache(rows.layouts.device)  # what a graph reads must stay as long as the graph does
        self.bound = {name: (stream, x.clone()) for name, (stream, x) in rows.bound.items()}
        self.carry = {name: x.clone() for name, x in carry.items()}
        self.out: Carry = {}
        self.replay: Replay | None = None

    @property
    def bytes(self) -> int:
        return _bytes(*self.carry.values(), *self.out.values(), *(x for _, x in self.bound.values()))

    def compute(self, run: Blocks, owners: tuple[Owner, ...]) -> Carry:
        """Runs kernel by kernel, which shows which bound tensors are read."""
        rows = ReadRecorder(owners, self.rows, self.layouts, self.bound)
        self.out = run(dict(self.carry), rows)
        self.bound = {name: self.bound[name] for name in rows.read}
        return _copies(self.out)

    def fill(self, carry: Carry, rows: Rows) -> None:
        for name, x in carry.items():
            self.carry[name].copy_(x)
        for name, (_, x) in self.bound.items():
            x.copy_(rows.bound[name][1])

    def record(self, recorder: Recorder, run: Blocks, owners: tuple[Owner, ...]) -> Replay:
        rows = Rows(owners, self.rows, self.layouts, self.bound)
        self.replay, self.out = recorder.record(lambda: run(dict(self.carry), rows))
        return self.replay


class Graphs:
    """The graphs of one stack.

    exclusive: a context manager in which no other thread uses the device. It yields False where that cannot be had, and
    then the next batch of the key is captured instead. epoch: a number that changes when kernels are chosen anew, which
    makes all graphs stale. counts: gets the numbers of CAPTURES and REPLAYS. tell: gets a warning where a batch cannot
    be captured; after that, none is tried.
    """

    def __init__(
        self,
        stack: Stack,
        max_tokens: int,
        recorder: Recorder,
        *,
        exclusive: Callable[[], AbstractContextManager[bool]] = single_threaded,
        epoch: Callable[[], int] = lambda: 0,
        tell: Callable[[RequestWarning], None] = lambda warning: None,
        counts: collections.Counter[str] | None = None,
    ) -> None:
        self.stack, self.max_tokens, self.recorder = stack, max_tokens, recorder
        self.kept: collections.OrderedDict[BatchKey, CapturedBatch] = collections.OrderedDict()
        self._exclusive = exclusive
        self._epoch, self._of = epoch, epoch()
        self._tell, self._failed = tell, False
        self.counts = collections.Counter[str]() if counts is None else counts
        self._seen: collections.OrderedDict[BatchKey, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        usable = (
            not self._failed
            and rows.exchange is None
            and rows.stream(JOINT).total <= self.max_tokens
            and not torch.is_grad_enabled()
            and self.recorder.usable()
        )
        # another thread uses the tensors: running without a graph is quicker than waiting
        if not usable or not self._lock.acquire(blocking=False):
            return inner(stack, lo, hi, carry, rows)
        try:
            with torch.inference_mode():
                return self._run(functools.partial(inner, stack, lo, hi), (lo, hi), carry, rows)
        except torch.OutOfMemoryError:
            self._forget()  # what they hold is what the next batch may need
            raise
        finally:
            self._lock.release()

    def _run(self, run: Blocks, part: tuple[int, int], carry: Carry, rows: Rows) -> Carry:
        if self._of != self._epoch():
            self._of = self._epoch()
            self._forget()
        key = self._key(part, carry, rows)
        kept = self.kept.get(key)
        if kept is None:
            if not self._seen_before(key) or _needed(carry, rows) > MAX_BYTES:
                return run(carry, rows)
            try:
                kept = CapturedBatch(carry, rows)
            except torch.OutOfMemoryError:
                self._forget()
                return run(carry, rows)
            out = kept.compute(run, rows.owners)
            self._keep(key, kept)
            return out
        self.kept.move_to_end(key)
        replay = kept.replay or self._record(kept, run, rows.owners)
        if replay is None:
            return run(carry, rows)
        kept.fill(carry, rows)
        replay()
        self.counts[REPLAYS] += 1
        return _copies(kept.out)

    def _key(self, part: tuple[int, int], carry: Carry, rows: Rows) -> BatchKey:
        return (
            part,
            tuple((name, x.shape, x.dtype) for name, x in carry.items()),
            tuple((name, stream, x.shape, x.dtype) for name, (stream, x) in rows.bound.items()),
            rows.layout.rows,
            tuple(variant(owner) for variant in self._variants for owner in rows.owners),
        )

    @functools.cached_property
    def _variants(self) -> tuple[Callable[[Owner], Hashable], ...]:
        """Found at the first batch: by then every feature has edited the blocks."""
        return variants(self.stack)

    def _seen_before(self, key: BatchKey) -> bool:
        again = key in self._seen
        self._seen[key] = None
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        return again

    def _keep(self, key: BatchKey, kept: CapturedBatch) -> None:
        """Keeps a captured batch, and drops those used longest ago beyond the limits."""
        self.kept[key] = kept
        while self.kept and (len(self.kept) > MAX_GRAPHS or sum(each.bytes for each in self.kept.values()) > MAX_BYTES):
            self.kept.popitem(last=False)

    def forget(self) -> None:
        """Drops all graphs and their memory. A batch of a key that was seen before is captured anew."""
        with self._lock:
            self._forget()

    def forget_where(self, stale: Callable[[Hashable], bool]) -> None:
        """Drops the graphs of which something that blocks look at in an owner is stale: they read tensors that are
        gone. What is launched waits for no more than the batch that runs.
        """
        with self._lock:
            for key in [key for key in self.kept if any(stale(one) for one in key[-1])]:
                del self.kept[key]

    def _forget(self) -> None:
        self.kept.clear()
        self.recorder.forget()

    def _record(self, kept: CapturedBatch, run: Blocks, owners: tuple[Owner, ...]) -> Replay | None:
        try:
            with self._exclusive() as quiet:
                if not quiet:
                    return None
                replay = kept.record(self.recorder, run, owners)
                self.counts[CAPTURES] += 1
                return replay
        except Exception as error:  # whatever it is, the blocks compute the same without a graph
            self._failed = True
            self._forget()
            logger.exception("a batch could not be captured in a CUDA graph; from now on there are none")
            message = f"CUDA graphs are off: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            self._tell(RequestWarning(code="CUDA_GRAPHS_OFF", field="", message=message, applied="launches one by one"))
            return None


def _copies(carry: Mapping[str, Tensor]) -> Carry:
    """Copies of tensors that the next batch of the same key overwrites."""
    return {name: x.clone() for name, x in carry.items()}


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _needed(carry: Carry, rows: Rows) -> int:
    """Bytes that a captured batch takes: inputs, and results of their size."""
    return 2 * _bytes(*carry.values()) + _bytes(*(x for _, x in rows.bound.values()))
