"""Graphs of a stack, with a recorder that computes again where CUDA launches again: it reads nothing of a batch but
what was put into the tensors of its kind, as a graph does. What CUDA itself does is in test_on_gpu.py.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import pkgutil
import threading
import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import omni_grpc.features
import omni_grpc.models
import omni_grpc.nn
from omni_grpc.config import EngineConfig, WorkerConfig
from omni_grpc.feature_rules.table import is_on
from omni_grpc.features import Context, Effects, cuda_graphs
from omni_grpc.features.cuda_graphs import Graphs
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.rows import LayoutCache, Owner, Row, Rows
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.lora import Lora
from omni_grpc.types.results import RequestWarning
from omni_grpc.worker import edits
from omni_grpc.worker.lanes import Lanes
from tests.features.graphed import Again, graphed, later, played, same_in_turns
from tests.features.suite import CACHE, FAMILIES, INNER_STEPS_BF16, Suite, alone, halfway, tea
from tests.models.cases import ENTRIES
from tests.toy import toy_spec

WIDTH, BLOCKS = 8, 3
CPU = torch.device("cpu")


# --- with whole models ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    name = FAMILIES[request.param]
    return Suite(ENTRIES[name], tmp_path_factory.mktemp(name))


SETTINGS: Mapping[str, Callable[[Suite], dict[str, Any]]] = {
    "attention by step": lambda suite: dict(INNER_STEPS_BF16),
    "LoRA and step cache": lambda suite: suite.lora | CACHE,
}
"""More than one feature beside graphs, or of which test_pairs.py does not know."""


@pytest.mark.conformance
@pytest.mark.parametrize("feature", SETTINGS)
def test_graphs_change_nothing(suite: Suite, feature: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SETTINGS[feature](suite)
    plain = suite.load(settings)
    model, recorders = graphed(suite, monkeypatch, **settings)
    same_in_turns(plain, model, tea(halfway(plain)) if "cache" in feature else None)
    assert played(recorders)


@pytest.mark.conformance
def test_a_request_alone_is_recorded_in_its_third_step(suite: Suite, monkeypatch: pytest.MonkeyPatch) -> None:
    model, recorders = graphed(suite, monkeypatch)
    request = model.request(model.draft(steps=8, seeds=(1,)))
    evals = sum(alone(model, request).evals)
    # where a second denoiser takes over, its third step
    assert all(recorder.recorded == 1 for recorder in recorders)
    assert sum(recorder.replayed for recorder in recorders) == evals - 2 * len(recorders)
    alone(model, later(request, 1))
    assert all(recorder.recorded == 1 for recorder in recorders)
    assert sum(recorder.replayed for recorder in recorders) == 2 * evals - 2 * len(recorders)


# --- with a made-up stack ---------------------------------------------------------------------------------------------


class Adds(Block):
    """Adds a layer of its tokens, what is bound for its row, and what its owner says."""

    carry = ("img",)

    def __init__(self) -> None:
        super().__init__()
        self.up = Linear(WIDTH, WIDTH, stream="img")
        self.calls = 0

    @property
    def variant(self) -> Callable[[Owner], int]:
        return number

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        self.calls += 1
        if self.calls < 0:
            raise RuntimeError("broken")
        lengths = rows.stream("img").lengths
        own = torch.cat([torch.full((n, 1), number(it)) for n, it in zip(lengths, rows.owners, strict=True)])
        return (carry[0] + torch.tanh(self.up(carry[0])) + mod[rows.index["img"]] + own,)


def number(owner: Owner) -> int:
    return int(owner[0].number)


class Own(SimpleNamespace):
    """Stands for a state: something that can be seen to go."""

    __slots__ = ("__weakref__",)


class Made:
    """A stack with graphs, the same one without, and batches for them."""

    def __init__(self, recorder: Again | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.plain = Stack(blocks=[Adds() for _ in range(BLOCKS)]).requires_grad_(False)
        self.stack = Stack(blocks=[Adds() for _ in range(BLOCKS)]).requires_grad_(False)
        self.stack.load_state_dict(self.plain.state_dict())
        self.recorder = recorder or Again()
        self.told: list[RequestWarning] = []
        options = {"tell": self.told.append} | options
        self.graphs = Graphs(self.stack, options.pop("tokens", 1000), self.recorder, **options)
        self.stack.wrap(self.graphs.around)
        self.layouts = LayoutCache(CPU)

    @property
    def blocks(self) -> list[Adds]:
        return list(self.stack.group("blocks"))

    def ask(self, *lengths: int, number: int = 0, dtype: torch.dtype = torch.float32, more: int = 0) -> None:
        """One batch with random values, which has to come out right."""
        owners = [(SimpleNamespace(number=number + row), "cond") for row in range(len(lengths))]
        rows = Rows(owners, [Row.of(img=length) for length in lengths], self.layouts)
        rows.bind("blocks", "mod", [torch.randn(1, BLOCKS, WIDTH) for _ in lengths])
        rows.bind("unread", "img", [torch.randn(length, 1 + more, dtype=dtype) for length in lengths])
        x = torch.randn(sum(lengths), WIDTH)
        with torch.no_grad():
            got, expected = (stack({"img": x.clone()}, rows)["img"] for stack in (self.stack, self.plain))
        assert torch.equal(got, expected)

    def counts(self) -> tuple[int, int]:
        return self.recorder.recorded, self.recorder.replayed


def test_a_kind_is_recorded_the_third_time_that_it_comes() -> None:
    made = Made()
    seen = []
    for _ in range(5):
        made.ask(4, 3)
        seen.append(made.counts())
    assert seen == [(0, 0), (0, 0), (1, 1), (1, 2), (1, 3)]
    assert made.graphs.counts == {cuda_graphs.CAPTURES: 1, cuda_graphs.REPLAYS: 3}


@pytest.mark.parametrize(
    "other",
    [{"lengths": (3, 4)}, {"lengths": (7,)}, {"number": 1}, {"dtype": torch.float64}, {"more": 1}],
    ids=["lengths", "rows", "owners", "dtype", "shape"],
)
def test_what_makes_another_kind(other: dict[str, Any]) -> None:
    made = Made()
    for _ in range(3):
        made.ask(4, 3)
    lengths = other.pop("lengths", (4, 3))
    made.ask(*lengths, **other)
    made.ask(*lengths, **other)
    assert made.counts() == (1, 1)
    made.ask(*lengths, **other)
    made.ask(4, 3)
    assert made.counts() == (2, 3)


def test_parts_of_a_stack_are_kinds_of_their_own() -> None:
    """As a middleware outside runs them."""
    made = Made()

    def halves(inner: Callable[..., Carry]) -> Callable[..., Carry]:
        def run(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
            return inner(stack, 1, hi, inner(stack, lo, 1, carry, rows), rows)

        return run

    made.stack.wrap(halves)
    for _ in range(4):
        made.ask(4, 3)
    assert made.counts() == (2, 4)


def test_above_so_many_tokens_there_is_none() -> None:
    made = Made(tokens=6)
    for _ in range(4):
        made.ask(4, 3)
        made.ask(4, 2)
    assert made.counts() == (1, 2)


def test_the_kinds_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "MAX_GRAPHS", 2)
    made = Made()
    for length in (2, 3, 2, 4):
        for _ in range(3):
            made.ask(length)
    assert made.recorder.recorded == 3
    assert len(made.graphs.kept) == 2
    made.ask(2)
    assert made.recorder.recorded == 3
    # it was forgotten for the last one, and is known to come again
    made.ask(3)
    made.ask(3)
    assert made.recorder.recorded == 4


def test_no_more_bytes_are_kept_than_there_is_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    for _ in range(3):
        made.ask(4)
    (kept,) = made.graphs.kept.values()
    assert kept.bytes == 4 * (4 * WIDTH * 2 + BLOCKS * WIDTH), "what no block reads is not kept"
    monkeypatch.setattr(cuda_graphs, "MAX_BYTES", 2 * kept.bytes)
    for length in (5, 6):
        for _ in range(3):
            made.ask(length)
        assert sum(each.bytes for each in made.graphs.kept.values()) <= 2 * kept.bytes
    before = made.counts()
    for _ in range(4):
        made.ask(40)  # alone too large
    assert made.counts() == before


def test_kernels_that_are_chosen_anew_are_captured_anew() -> None:
    epoch = [0]
    made = Made(epoch=lambda: epoch[0])
    for _ in range(3):
        made.ask(4)
    epoch[0] = 1
    for _ in range(3):
        made.ask(4)
    assert made.counts() == (2, 3)
    assert made.recorder.forgotten == 1


def test_a_sleep_drops_all_graphs_and_they_are_captured_anew() -> None:
    made = Made()
    for _ in range(3):
        made.ask(4)
    made.graphs.forget()
    assert (len(made.graphs.kept), made.recorder.forgotten) == (0, 1)
    for _ in range(3):
        made.ask(4)
    assert made.counts() == (2, 3)


def test_what_cannot_be_captured_is_computed_and_told_once() -> None:
    made = Made(Again(problem="no such thing while a stream is capturing\nmore of it"))
    for _ in range(5):
        made.ask(4)
        made.ask(5)
    (warning,) = made.told
    assert warning.code == "CUDA_GRAPHS_OFF"
    assert warning.message == "CUDA graphs are off: no such thing while a stream is capturing"
    assert not made.graphs.kept


def test_what_two_denoisers_warn_of_is_told_once() -> None:
    effects = Effects()
    for _ in range(2):
        made = Made(Again(problem="no"), tell=effects.warn)
        for _ in range(3):
            made.ask(4)
    assert [warning.code for warning in effects.warnings] == ["CUDA_GRAPHS_OFF"]


def test_nothing_is_captured_while_another_thread_is_at_work() -> None:
    lanes = Lanes()
    made = Made(exclusive=lanes.exclusive)
    with lanes.work():
        for _ in range(4):
            made.ask(4)
    assert made.counts() == (0, 0)
    made.ask(4)
    with lanes.work():
        made.ask(4)
    assert made.counts() == (1, 2)


def test_what_a_block_raises_is_raised_and_the_next_batch_goes_on() -> None:
    made = Made()
    made.ask(4)
    made.ask(4)
    made.blocks[0].calls = -10
    with pytest.raises(RuntimeError, match="broken"):
        made.ask(5)
    made.blocks[0].calls = 0
    made.ask(4)
    assert made.counts() == (1, 1)


def test_graphs_give_their_memory_back_where_a_batch_finds_none() -> None:
    made = Made()
    for _ in range(3):
        made.ask(4)

    def full(inner: RunBlocks, stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
        raise torch.OutOfMemoryError("CUDA out of memory")

    rows = Rows([(SimpleNamespace(number=0), "cond")], [Row.of(img=9)], made.layouts)
    with torch.no_grad(), pytest.raises(torch.OutOfMemoryError):
        made.graphs.run(
            functools.partial(full, Stack.loop), made.stack, 0, BLOCKS, {"img": torch.zeros(9, WIDTH)}, rows
        )
    assert not made.graphs.kept
    assert made.recorder.forgotten == 1
    for _ in range(3):
        made.ask(4)
    assert made.recorder.recorded == 2


def test_a_batch_that_finds_no_memory_for_a_graph_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Made()
    for _ in range(3):
        made.ask(4)

    def full(*arguments: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(cuda_graphs.CapturedBatch, "__init__", full)
        for _ in range(3):
            made.ask(5)
    assert not made.graphs.kept
    assert not made.told
    for _ in range(2):
        made.ask(5)
    assert made.recorder.recorded == 2


def test_nothing_is_kept_of_a_request() -> None:
    made = Made()
    owner = Own(number=0)
    rows = Rows([(owner, "cond")], [Row.of(img=4)], made.layouts)
    rows.bind("blocks", "mod", [torch.randn(1, BLOCKS, WIDTH)])
    with torch.no_grad():
        made.stack({"img": torch.randn(4, WIDTH)}, rows)
        made.stack({"img": torch.randn(4, WIDTH)}, rows)
    gone = weakref.ref(owner)
    del owner, rows
    gc.collect()
    assert len(made.graphs.kept) == 1
    assert gone() is None


def test_results_are_the_callers_own() -> None:
    made = Made()
    rows = Rows([(SimpleNamespace(number=0), "cond")], [Row.of(img=4)], made.layouts)
    rows.bind("blocks", "mod", [torch.randn(1, BLOCKS, WIDTH)])
    outs = []
    with torch.no_grad():
        for _ in range(4):
            outs.append(made.stack({"img": torch.randn(4, WIDTH)}, rows)["img"])
    kept = [out.clone() for out in outs]
    made.ask(4)
    assert all(torch.equal(out, before) for out, before in zip(outs, kept, strict=True))
    assert len({out.data_ptr() for out in outs}) == 4


def test_there_is_none_with_gradients_or_where_the_recorder_cannot() -> None:
    made = Made()
    rows = Rows([(SimpleNamespace(number=0), "cond")], [Row.of(img=4)], made.layouts)
    rows.bind("blocks", "mod", [torch.randn(1, BLOCKS, WIDTH)])
    for _ in range(4):
        made.stack({"img": torch.randn(4, WIDTH)}, rows)
    made.recorder.here = False
    for _ in range(4):
        made.ask(4)
    assert made.counts() == (0, 0)
    made.recorder.here = True
    for _ in range(3):
        made.ask(4)
    assert made.counts() == (1, 1)


def test_a_second_thread_computes_for_itself() -> None:
    made = Made()
    for _ in range(3):
        made.ask(4)
    inside, go_on = threading.Event(), threading.Event()
    (kept,) = made.graphs.kept.values()
    replay = kept.replay

    def slow() -> None:
        inside.set()
        assert go_on.wait(30)
        replay()

    kept.replay = slow
    first = threading.Thread(target=made.ask, args=(4,))
    first.start()
    assert inside.wait(30)
    before = made.counts()
    made.ask(4)
    assert made.counts() == before
    go_on.set()
    first.join(30)
    assert not first.is_alive()
    assert made.counts() == (before[0], before[1] + 1)


# --- the setting ------------------------------------------------------------------------------------------------------


def context(device: str) -> Context:
    return Context(component="transformer", spec=toy_spec(), device=torch.device(device), dtype=torch.float32)


def test_asked_for_where_there_are_none() -> None:
    module = nn.ModuleDict({"stack": Stack(blocks=[Adds()])})
    with pytest.raises(ConfigError, match="--cuda-graph-tokens is 64, and cpu has no CUDA graphs: leave it out"):
        cuda_graphs.apply(module, WorkerConfig(cuda_graph_tokens=64), context("cpu"))
    before = module["stack"]._run
    cuda_graphs.apply(module, WorkerConfig(), context("cpu"))
    assert module["stack"]._run is before


@pytest.mark.parametrize(
    ("settings", "on"),
    [
        ({}, True),
        ({"cuda_graph_tokens": 100}, True),
        ({"cuda_graph_tokens": 0}, False),
        ({"enable_layerwise_offload": True}, False),
    ],
)
def test_when_the_feature_is_on(settings: dict[str, Any], on: bool) -> None:
    (feature,) = [feature for feature in edits.AFTER if feature.name == "cuda_graphs"]
    config = EngineConfig.from_settings(model="toy", **settings)
    assert is_on(feature, config) == on


def test_a_request_names_its_adapters_in_its_kind() -> None:
    """Two scales of one adapter are two kinds, or the second would get the first one's."""
    assert hash(Lora(lora_id="a", scale=0.5)) != hash(Lora(lora_id="a", scale=0.7))


def test_what_looks_at_an_owner_says_at_what() -> None:
    """Or a graph that was captured for one request would answer another."""
    looking = set()
    for package in (omni_grpc.features, omni_grpc.nn, omni_grpc.models):
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            for _, kind in inspect.getmembers(importlib.import_module(info.name), inspect.isclass):
                in_blocks = issubclass(kind, nn.Module) and not issubclass(kind, Pipeline)
                if in_blocks and kind.__module__ == info.name and "owners" in inspect.getsource(kind):
                    looking.add(kind.__name__)
                    assert "variant" in inspect.getsource(kind), f"{info.name}.{kind.__name__} reads owners"
    assert looking == {"Gains", "LoraLinear", "PreciseAttention", "VariantLinear"}
