"""CUDA graphs: a batch that comes again is launched as a whole, by one call (https://developer.nvidia.com/blog/cuda-graphs).

What a stack computes is a few hundred kernels, and where they are short the device waits for the host to launch them.
The kernels of a batch depend on its geometry, on the shapes of what is bound to it, and on what parts of the blocks
look at in a row's owner. Batches that are alike in these are of one kind, and the second time that a kind comes again,
its launches are captured in a graph. The graph computes on tensors of its own, into which those of each batch are
copied, and gives what the blocks give, bit for bit.
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
from omni_grpc.features import Context, undisturbed
from omni_grpc.nn.rows import JOINT, LayoutCache, Owner, Rows, variants
from omni_grpc.nn.stack import Carry, RunBlocks, Stack, main_stack
from omni_grpc.ops.tuning import choices
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.results import RequestWarning

__all__ = ["apply"]

logger = logging.getLogger(__name__)

MOST_TOKENS = 8192
"""Of a batch, where the configuration does not say it: above that the device takes longer than the host for all but the
smallest models, and a graph would only take memory.
"""

KINDS = 64
"""Kinds with a graph, at most."""

MOST_BYTES = 1 << 30
"""What the tensors of all kinds may take together: inputs and results. What is between them is shared."""

REMEMBERED = 4096
"""Kinds of which is known that they came."""

GraphKey = Hashable
Replay = Callable[[], None]
Blocks = Callable[[Carry, Rows], Carry]
"""Some blocks of a stack."""


def apply(module: nn.Module, config: WorkerConfig, context: Context) -> None:
    """Puts graphs around the main stack. Raises ConfigError where the setting asks for them and the device has none."""
    asked = config.cuda_graph_tokens
    if context.device.type != "cuda":
        if asked:
            wrong = Violation("cuda_graph_tokens", f"is {asked}, and {context.device} has no CUDA graphs: leave it out")
            message = f"--cuda-graph-tokens {wrong.description}"
            raise ConfigError(message, reason="SETTING_WITHOUT_EFFECT", violations=(wrong,))
        return
    _, stack = main_stack(module)
    graphs = Graphs(
        stack,
        MOST_TOKENS if asked is None else asked,
        CudaRecorder(context.device),
        alone=context.alone,
        epoch=lambda: choices(context.device).epoch,
        tell=context.effects.warn,
    )
    stack.wrap(graphs.around)


class Recorder(abc.ABC):
    """Makes one call of what a function does on tensors that stay where they are."""

    @abc.abstractmethod
    def usable(self) -> bool:
        """Whether it can be made, or called, here and now."""

    @abc.abstractmethod
    def record(self, run: Callable[[], Carry]) -> tuple[Replay, Carry]:
        """The call, and the tensors that have what `run` returned after each. `run` was called before; whether it is
        computed now is left open.
        """

    @abc.abstractmethod
    def forget(self) -> None:
        """Gives back what the recordings took; none of them will be called again."""


class CudaRecorder(Recorder):
    """Captures graphs of one memory pool, which are launched on one stream: no two of them run at once."""

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
        """Raises whatever a block that cannot be captured does."""
        graph = torch.cuda.CUDAGraph()
        self._side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._side):
            if self._keeper is None:
                # a pool cannot be used again once its last graph has gone
                self._keeper = self._little(torch.cuda.graph_pool_handle())
            graph.capture_begin(pool=self._keeper.pool(), capture_error_mode="thread_local")
            try:
                out = run()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, self._keeper.pool())
                raise
        return graph.replay, out

    def forget(self) -> None:
        self._keeper = None

    def _little(self, pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        torch.zeros(1, device=self.device)
        graph.capture_end()
        return graph

    def _abandon(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Ends a capture that failed. Where CUDA has given it up before, torch goes on as if it were under way: the
        allocator until it is told, the generator until another capture ends.
        """
        try:
            graph.capture_end()
        except RuntimeError:
            with contextlib.suppress(RuntimeError):  # the allocator knows already
                torch._C._cuda_endAllocateToPool(self._side.device_index, pool)
            self._little(torch.cuda.graph_pool_handle())


class RecordedRows(Rows):
    """A batch that remembers what was read of what is bound to it."""

    read: frozenset[str] = frozenset()

    def __getitem__(self, name: str) -> Tensor:
        self.read |= {name}
        return super().__getitem__(name)


class GraphTensors:
    """The tensors of one kind, and once it is recorded the call that computes on them. It keeps no owner: that has all
    that its request does.
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
        """The first time, block by block: it shows what is read of what is bound."""
        rows = RecordedRows(owners, self.rows, self.layouts, self.bound)
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

    alone: a block in which no other thread is at work on the device; it gives False where that cannot be had, and then
    the next batch of the kind is tried. epoch: what changes when kernels are chosen anew, so that graphs have the old
    ones. tell: gets a warning where a batch cannot be captured; after that, none is tried.
    """

    def __init__(
        self,
        stack: Stack,
        most_tokens: int,
        recorder: Recorder,
        *,
        alone: Callable[[], AbstractContextManager[bool]] = undisturbed,
        epoch: Callable[[], int] = lambda: 0,
        tell: Callable[[RequestWarning], None] = lambda warning: None,
    ) -> None:
        self.stack, self.most_tokens, self.recorder = stack, most_tokens, recorder
        self.kept: collections.OrderedDict[GraphKey, GraphTensors] = collections.OrderedDict()
        self._alone = alone
        self._epoch, self._of = epoch, epoch()
        self._tell, self._failed = tell, False
        self._came: collections.OrderedDict[GraphKey, None] = collections.OrderedDict()
        self._lock = threading.Lock()

    def around(self, run: RunBlocks) -> RunBlocks:
        return functools.partial(self.run, run)

    def run(self, inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        usable = (
            not self._failed
            and rows.exchange is None
            and rows.stream(JOINT).total <= self.most_tokens
            and not torch.is_grad_enabled()
            and self.recorder.usable()
        )
        # another thread has the tensors: it is not worth to wait for them
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
        kind = self._kind(part, carry, rows)
        kept = self.kept.get(kind)
        if kept is None:
            if not self._comes_again(kind) or _needed(carry, rows) > MOST_BYTES:
                return run(carry, rows)
            try:
                kept = GraphTensors(carry, rows)
            except torch.OutOfMemoryError:
                self._forget()
                return run(carry, rows)
            out = kept.compute(run, rows.owners)
            self._keep(kind, kept)
            return out
        self.kept.move_to_end(kind)
        replay = kept.replay or self._record(kept, run, rows.owners)
        if replay is None:
            return run(carry, rows)
        kept.fill(carry, rows)
        replay()
        return _copies(kept.out)

    def _kind(self, part: tuple[int, int], carry: Carry, rows: Rows) -> GraphKey:
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

    def _comes_again(self, kind: GraphKey) -> bool:
        again = kind in self._came
        self._came[kind] = None
        self._came.move_to_end(kind)
        if len(self._came) > REMEMBERED:
            self._came.popitem(last=False)
        return again

    def _keep(self, kind: GraphKey, kept: GraphTensors) -> None:
        """Beside the kinds used last, as far as there is room."""
        self.kept[kind] = kept
        while self.kept and (len(self.kept) > KINDS or sum(each.bytes for each in self.kept.values()) > MOST_BYTES):
            self.kept.popitem(last=False)

    def _forget(self) -> None:
        self.kept.clear()
        self.recorder.forget()

    def _record(self, kept: GraphTensors, run: Blocks, owners: tuple[Owner, ...]) -> Replay | None:
        try:
            with self._alone() as quiet:
                return kept.record(self.recorder, run, owners) if quiet else None
        except Exception as error:  # whatever it is, the blocks compute the same without
            self._failed = True
            self._forget()
            logger.exception("a batch could not be captured in a CUDA graph; from now on there are none")
            message = f"CUDA graphs are off: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
            self._tell(RequestWarning(code="CUDA_GRAPHS_OFF", field="", message=message, applied="launches one by one"))
            return None


def _copies(carry: Mapping[str, Tensor]) -> Carry:
    """Of tensors that the next batch of the kind overwrites."""
    return {name: x.clone() for name, x in carry.items()}


def _bytes(*tensors: Tensor) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _needed(carry: Carry, rows: Rows) -> int:
    """Bytes of what a kind keeps: inputs, and results of their size."""
    return 2 * _bytes(*carry.values()) + _bytes(*(x for _, x in rows.bound.values()))
