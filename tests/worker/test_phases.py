"""Components that are on the device only while they run: who fetches them, who waits, and that nothing else changes."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.checkpoint import sizes
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.nn.stack import main_stack
from omni_grpc.resolve.residency import GIB, ModelSizes, sizes_of
from omni_grpc.resolve.settings import Placement
from omni_grpc.types.errors import ConfigError
from omni_grpc.worker.offload import offloading
from omni_grpc.worker.phases import Staging, largest_list
from omni_grpc.worker.reachable import tensors
from tests.features.suite import Suite
from tests.models.cases import ENTRIES
from tests.models.model import Model
from tests.toy import toy_checkpoint
from tests.worker.host_device import PretendMemory

WIDTH = 16


class Encoder(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).tanh()
        return x


class Autoencoder(nn.Module):
    """It keeps something in its attributes while it runs, as those of videos do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.kept: Tensor | None = None

    def encode(self, x: Tensor) -> Tensor:
        self.kept = x
        return x @ self.inner.weight

    def decode(self, x: Tensor) -> Tensor:
        return x @ self.inner.weight.T + self.inner.bias


def size(part: Any) -> int:
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors(part)}.values())


@pytest.fixture
def memory() -> PretendMemory:
    return PretendMemory()


@torch.inference_mode()
def test_a_component_is_there_while_its_phase_goes_on_and_nothing_is_copied_back(memory: PretendMemory) -> None:
    encoder, x = Encoder().requires_grad_(False), torch.randn(2, WIDTH)
    expected, whole = encoder(x), size(encoder)
    staging = Staging(memory)
    assert staging.take("text_encoder", encoder)
    assert (size(encoder), staging.present) == (0, ())
    assert all(parameter.device == memory.device for parameter in encoder.parameters())
    with staging.phase():
        assert size(encoder) == 0
        assert torch.equal(encoder(x), expected)
        assert staging.present == ("text_encoder",)
        assert torch.equal(encoder(x), expected)
    assert (size(encoder), staging.present) == (0, ())
    assert sum(memory.filled) == whole
    assert memory.saved == []
    # outside of a phase it stays for one call
    assert torch.equal(encoder(x), expected)
    assert size(encoder) == 0


@torch.inference_mode()
def test_every_way_into_an_autoencoder_finds_it_there_also_of_a_copy(memory: PretendMemory) -> None:
    vae, x = Autoencoder().requires_grad_(False), torch.randn(2, WIDTH)
    expected = [vae.encode(x), vae.decode(x), vae.inner(x)]
    Staging(memory).take("vae", vae)
    assert type(vae).__name__ == "Autoencoder"
    assert isinstance(vae, Autoencoder)
    vae.kept = None
    own = copy.copy(vae)
    for got, right in zip([own.encode(x), own.decode(x), own.inner(x)], expected, strict=True):
        assert torch.equal(got, right)
    # what the copy kept is its own
    assert own.kept is x
    assert vae.kept is None
    assert size(vae.inner) == 0


@torch.inference_mode()
def test_blocks_come_one_at_a_time(memory: PretendMemory) -> None:
    encoder, x = Encoder(5).requires_grad_(False), torch.randn(2, WIDTH)
    expected, block = encoder(x), size(encoder.blocks[0])
    seen: list[int] = []
    staging = Staging(memory, by_block=("text_encoder",))
    staging.take("text_encoder", encoder)
    memory.meanwhile = lambda: seen.append(size(encoder))
    assert torch.equal(encoder(x), expected)
    assert seen == [size_of_linear := block] + [block + size_of_linear] * 5
    assert size(encoder) == 0


@torch.inference_mode()
def test_what_blocks_share_stays_while_their_component_is_there(memory: PretendMemory) -> None:
    encoder, x = Encoder(4).requires_grad_(False), torch.randn(2, WIDTH)
    first, second = encoder.blocks[1], encoder.blocks[3]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = first.weight
    expected = encoder(x)
    Staging(memory, by_block=("text_encoder",)).take("text_encoder", encoder)
    assert torch.equal(encoder(x), expected)
    assert size(encoder) == 0
    assert memory.filled.count(4 * WIDTH * WIDTH) == 4


def test_who_is_not_named_stays(memory: PretendMemory) -> None:
    encoder = Encoder()
    staging = Staging(memory, only=("vae",))
    assert not staging.take("text_encoder", encoder)
    assert size(encoder) > 0
    assert staging.names == ()


@torch.inference_mode()
def test_two_phases_share_a_component_and_the_last_one_frees_it(memory: PretendMemory) -> None:
    encoder, x = Encoder().requires_grad_(False), torch.randn(2, WIDTH)
    expected = encoder(x)
    staging = Staging(memory)
    staging.take("text_encoder", encoder)
    inside, leave, wrong = threading.Event(), threading.Event(), []

    def other() -> None:
        with torch.inference_mode(), staging.phase():
            if not torch.equal(encoder(x), expected):
                wrong.append("other")
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    thread.start()
    inside.wait(10)
    with staging.phase():
        assert torch.equal(encoder(x), expected)
    assert staging.present == ("text_encoder",)
    leave.set()
    thread.join()
    assert (staging.present, wrong) == ((), [])
    assert len(memory.filled) == len(list(encoder.parameters()))


@torch.inference_mode()
def test_what_is_not_in_use_makes_way_and_what_is_in_use_is_waited_for(memory: PretendMemory) -> None:
    first, second, x = Encoder().requires_grad_(False), Autoencoder().requires_grad_(False), torch.randn(2, WIDTH)
    staging = Staging(memory, room=size(first))
    staging.take("text_encoder", first)
    staging.take("vae", second)
    with staging.phase():
        first(x)
        second.decode(x)
        # there is room for one of them
        assert staging.present == ("vae",)
        running, go_on = threading.Event(), threading.Event()

        def decode() -> None:
            with staging.entered(staging._staged["vae"]):
                running.set()
                go_on.wait(10)

        done = threading.Event()

        def encode() -> None:
            with torch.inference_mode():
                first(x)
            done.set()

        threads = [threading.Thread(target=work) for work in (decode, encode)]
        threads[0].start()
        running.wait(10)
        threads[1].start()
        assert not done.wait(0.1)
        go_on.set()
        for thread in threads:
            thread.join(10)
        assert done.is_set()


@torch.inference_mode()
def test_lanes_that_call_all_the_time_never_see_a_component_without_its_weights(memory: PretendMemory) -> None:
    first, second, x = Encoder().requires_grad_(False), Autoencoder().requires_grad_(False), torch.randn(2, WIDTH)
    expected = first(x), second.decode(x)
    staging = Staging(memory, room=size(first), by_block=("text_encoder",))
    staging.take("text_encoder", first)
    staging.take("vae", second)
    wrong: list[str] = []

    def lane(call: Any, right: Tensor) -> None:
        with torch.inference_mode():
            for number in range(60):
                with staging.phase():
                    for _ in range(1 + number % 3):
                        if not torch.equal(call(x), right):
                            wrong.append(str(call))

    threads = [
        threading.Thread(target=lane, args=arguments)
        for arguments in ((first, expected[0]), (second.decode, expected[1]), (first, expected[0]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    assert (wrong, staging.present, size(first), size(second.inner)) == ([], (), 0, 0)


@torch.inference_mode()
def test_a_component_that_finds_no_memory_is_asked_for_again(memory: PretendMemory) -> None:
    encoder, x = Encoder().requires_grad_(False), torch.randn(2, WIDTH)
    expected = encoder(x)
    staging = Staging(memory)
    staging.take("text_encoder", encoder)
    memory.fails = 3
    with staging.phase(), pytest.raises(torch.OutOfMemoryError):
        encoder(x)
    assert (size(encoder), staging.present) == (0, ())
    memory.fails = None
    assert torch.equal(encoder(x), expected)


@torch.inference_mode()
def test_what_is_not_in_use_is_freed_before_a_sleep(memory: PretendMemory) -> None:
    encoder, x = Encoder().requires_grad_(False), torch.randn(2, WIDTH)
    staging = Staging(memory)
    staging.take("text_encoder", encoder)
    with staging.phase():
        encoder(x)
        staging.clear()
        assert (staging.present, size(encoder)) == ((), 0)
        encoder(x)
    assert staging.present == ()


def test_the_part_that_repeats_is_found() -> None:
    assert len(largest_list(Encoder(4))) == 4
    assert largest_list(Autoencoder()) == []


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=sorted(ENTRIES))
def suite(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES[request.param], tmp_path_factory.mktemp(request.param))


def least(suite: Suite) -> int:
    """The least budget of a model, in bytes."""
    it = found(suite)
    held = sum(denoiser.with_resident(0) for denoiser in it.denoisers)
    return it.peak(held, max(min(part.by_block, part.weights) + part.work for part in it.parts), blocks_move=True)


def found(suite: Suite) -> ModelSizes:
    checkpoint = open_checkpoint(suite.folder, name="tiny")
    config = EngineConfig.from_settings(model=str(suite.folder))
    return sizes_of(config, checkpoint, sizes.headers(suite.folder), "float32")


def same(suite: Suite, model: Model) -> None:
    draft = model.guided()
    for got, expected in zip(model.run(draft, draft), suite.load().run(draft, draft), strict=True):
        assert got.differs_from(expected) == (0, 0)


def denoisers(model: Model, suite: Suite) -> int:
    return sum(size(model.components[name]) for name in suite.components)


def test_a_model_without_its_encoders_makes_the_same_and_its_denoiser_stays(suite: Suite) -> None:
    memory = PretendMemory()
    model = Model(suite.entry, suite.folder, memory=memory, enable_cpu_offload=True)
    assert model.staging is not None
    assert {"text_encoder", "vae"} <= set(model.staging.names)
    assert model.ready.found.residency == "text encoders and VAE between phases"
    plain = suite.load().ready
    assert model.ready.weight_bytes == plain.weight_bytes
    assert model.ready.device_bytes < plain.device_bytes
    stays = denoisers(model, suite)
    assert model.ready.device_bytes == stays
    same(suite, model)
    assert (model.staging.present, memory.saved) == ((), [])
    # it sleeps like any other
    assert denoisers(model, suite) == stays
    model.residency.sleep()
    assert model.residency.device_bytes == 0
    model.residency.wake()
    same(suite, model)


def test_a_model_in_the_least_budget_makes_the_same(suite: Suite) -> None:
    memory, budget = PretendMemory(), least(suite)
    model = Model(
        suite.entry, suite.folder, memory=memory, gpu_memory_budget=budget / GIB, enable_layerwise_offload=True
    )
    assert memory.budget == budget
    told = model.ready.found.residency
    assert "between phases; 0 of " in told
    assert model.staging is not None
    assert set(model.staging._by_block) < set(model.staging.names)
    same(suite, model)
    model.residency.sleep()
    model.residency.wake()
    same(suite, model)
    with pytest.raises(ConfigError, match=r"--gpu-memory-budget is .* and the model needs at least") as caught:
        Model(suite.entry, suite.folder, memory=memory, gpu_memory_budget=(budget - 1) / GIB)
    assert caught.value.failure.reason == "BUDGET_TOO_SMALL"
    assert [violation.field for violation in caught.value.failure.violations] == ["gpu_memory_budget"]


def test_sizes_from_headers_are_those_of_the_loaded_model(suite: Suite) -> None:
    it, model = found(suite), suite.load()
    for denoiser in it.denoisers:
        module: Any = model.components[denoiser.name]
        loaded = sum(parameter.nbytes for parameter in module.parameters())
        # rotary tables and the like are not in the files
        assert denoiser.whole == loaded
        assert denoiser.with_resident(0) <= denoiser.whole
        assert max(map(len, denoiser.stacks)) == len(main_stack(module)[1])
    assert {"text_encoder", "vae"} <= {part.name for part in it.parts}


def test_a_budget_for_all_offloads_nothing(suite: Suite) -> None:
    memory = PretendMemory()
    model = Model(suite.entry, suite.folder, memory=memory, gpu_memory_budget=64)
    assert model.staging is None
    assert model.ready.found.residency.startswith("all resident: ")
    assert model.ready.device_bytes == suite.load().ready.device_bytes


def test_a_dropped_model_is_garbage(suite: Suite) -> None:
    model = Model(suite.entry, suite.folder)
    weights = [weakref.ref(parameter) for parameter in model.pipeline.parameters()]
    whole, residency = model.ready.device_bytes, model.residency
    assert whole == suite.load().ready.device_bytes >= model.ready.weight_bytes
    residency.begin_drop()
    del model
    assert residency.end_drop() >= whole
    gc.collect()
    assert not any(weight() is not None for weight in weights)


# --- settings ---------------------------------------------------------------------------------------------------------

CPU = Placement(device="cpu", dtype="float32", cpu_threads=1)


def test_a_native_model_on_a_cpu_has_nothing_to_offload_from() -> None:
    config = EngineConfig.from_settings(model="m", enable_cpu_offload=True)
    with pytest.raises(ConfigError, match="--enable-cpu-offload: needs an accelerator") as caught:
        offloading(config, toy_checkpoint(), CPU)
    assert [violation.field for violation in caught.value.failure.violations] == ["enable_cpu_offload"]


def test_a_budget_on_a_cpu_offloads_nothing() -> None:
    config = EngineConfig.from_settings(model="m", gpu_memory_budget=0.01)
    made = offloading(config, toy_checkpoint(), CPU)
    assert (made.config, made.staging, made.described) == (config, None, "")


def test_graphs_that_were_asked_for_do_not_go_with_a_budget_that_moves_blocks(tmp_path: Path) -> None:
    suite = Suite(ENTRIES["FluxPipeline"], tmp_path)
    checkpoint = open_checkpoint(suite.folder, name="tiny")
    config = EngineConfig.from_settings(
        model=str(suite.folder), gpu_memory_budget=least(suite) / GIB, cuda_graph_tokens=64
    )
    with pytest.raises(ConfigError, match=r"--gpu-memory-budget needs blocks to be offloaded.*--cuda-graph-tokens"):
        offloading(config, checkpoint, CPU, PretendMemory())
