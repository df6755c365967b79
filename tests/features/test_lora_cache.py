"""Adapters beside a device that has memory of its own, the books of what is there, and what goes by their tensors."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.config import WorkerConfig
from omni_grpc.features import Context, cuda_graphs
from omni_grpc.features.cuda_graphs import Graphs
from omni_grpc.features.lora import Adapters, LoraLinear
from omni_grpc.features.lora.cache import ByteCache
from omni_grpc.nn.stack import main_stack
from omni_grpc.types.lora import Lora
from omni_grpc.types.plan import LoadAdapter
from omni_grpc.worker.reachable import tensors
from tests.features.graphed import Again
from tests.models.cases import ENTRIES
from tests.models.model import Model, Result
from tests.worker.adapted import write
from tests.worker.host_device import PretendMemory

ENTRY = ENTRIES["QwenImagePipeline"]


def test_the_books_of_a_cache_on_random_sequences() -> None:
    """Against a list of keys in the order of their use, searched from its begin."""
    for seed in range(300):
        chance = random.Random(seed)
        cache, order, sizes = ByteCache(100), [], {}
        for _ in range(40):
            key, size = chance.choice("abcdefgh"), chance.randrange(1, 60)
            kept = set(chance.sample("abcdefgh", chance.randrange(4)))
            if key in order:
                cache.touch(key)
                order.append(order.pop(order.index(key)))
            else:
                going: list[str] | None = []
                for other in [None, *(one for one in order if one not in kept)]:
                    if other is not None and going is not None:
                        going.append(other)
                    if sum(sizes[one] for one in order if one not in (going or [])) + size <= 100:
                        break
                else:
                    going = None
                assert cache.in_the_way(size, lambda one, kept=kept: one not in kept) == going  # type: ignore[misc]
                if going is None:
                    continue
                for one in going:
                    cache.remove(one)
                    order.remove(one)
                cache.add(key, size)
                order.append(key)
                sizes[key] = size
            assert list(cache.keys) == order
            assert cache.used == sum(sizes[one] for one in order) <= 100


class Beside:
    """A model whose device has memory of its own, and adapters."""

    def __init__(self, folder: Path, files: Path, count: int = 3, **settings: object) -> None:
        self.memory = PretendMemory()
        self.model = Model(ENTRY, folder, memory=self.memory, **settings)
        adapters = self.model.residency.adapters
        assert isinstance(adapters, Adapters)
        self.adapters = adapters
        self.files = [write(files / f"{number}.safetensors", number) for number in range(count)]

    def load(self, number: int, *, pinned: bool = False) -> None:
        order = LoadAdapter(id=f"{number}", uid=f"{number}@1", path=str(self.files[number]), pinned=pinned)
        self.adapters.attach(self.adapters.load(order))

    def run(self, *numbers: int) -> Result:
        """What comes of a request, as the worker treats it."""
        loras = tuple(Lora(lora_id=f"{number}", uid=f"{number}@1") for number in numbers)
        request = dataclasses.replace(self.model.request(self.model.draft(steps=2)), loras=loras)
        self.adapters.admit(request)
        (result,) = self.model.run_requests(request)
        self.adapters.release(request.id)
        return result

    def parts(self) -> list[Tensor]:
        found = [part for part in self.model.pipeline.modules() if isinstance(part, LoraLinear)]
        return list(tensors([part.parts for part in found]))


@pytest.fixture
def beside(tiny_qwen_image: Path, tmp_path: Path) -> Beside:
    return Beside(tiny_qwen_image, tmp_path, lora_device_cache=1 << 20, lora_merged_cache=0)


def same(one: Result, other: Result) -> bool:
    return torch.equal(one.latents, other.latents)


def test_one_copy_brings_an_adapter_and_none_is_needed_while_it_is_there(beside: Beside) -> None:
    size = len(beside.memory.filled)
    beside.load(0)
    assert len(beside.memory.filled) == size + 1
    first = beside.run(0)
    assert same(first, beside.run(0))
    assert len(beside.memory.filled) == size + 1
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in beside.parts()}
    assert sum(storages.values()) <= beside.adapters.device.used == beside.adapters.found[0].nbytes
    assert all(part.data_ptr() % 64 == 0 for part in beside.parts())


def test_a_sleeping_model_gives_the_memory_of_adapters_back(beside: Beside) -> None:
    beside.load(0)
    beside.load(1, pinned=True)
    before = [beside.run(0), beside.run(1), beside.run(0, 1), beside.run()]
    held = beside.adapters.device.used
    saved = sum(beside.memory.saved)
    beside.model.residency.sleep()
    assert beside.adapters.device.used == 0 < held
    assert beside.parts() == []
    assert sum(beside.memory.saved) - saved == beside.model.residency.host_bytes, "they have a copy already"
    # what is loaded meanwhile stays on the host
    filled = len(beside.memory.filled)
    beside.load(2)
    assert len(beside.memory.filled) == filled
    beside.model.residency.wake()
    beside.adapters.wake()
    assert beside.adapters.device.keys == ("1@1",)
    after = [beside.run(0), beside.run(1), beside.run(0, 1), beside.run()]
    assert all(map(same, before, after))
    assert not same(beside.run(2), before[3])


def test_a_device_without_room_leaves_no_trace_of_a_load(beside: Beside) -> None:
    beside.load(0)
    before = beside.run()
    beside.memory.fails = len(beside.memory.filled)
    with pytest.raises(torch.OutOfMemoryError):
        beside.load(1)
    beside.memory.fails = None
    assert [adapter.key for adapter in beside.adapters.found] == ["0@1"]
    assert beside.adapters.device.keys == beside.adapters.host.keys == ("0@1",)
    beside.load(1)
    assert same(beside.run(), before)


def test_the_room_for_adapters_is_what_no_request_is_promised(beside: Beside) -> None:
    assert (beside.adapters.room, beside.adapters.copies.limit) == (1 << 20, 0)
    beside.load(0)
    assert beside.adapters.room == (1 << 20) - beside.adapters.found[0].nbytes


def test_adapters_of_the_settings_have_room_without_another_setting(tiny_qwen_image: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "a.safetensors", 0)
    beside = Beside(tiny_qwen_image, tmp_path, lora={"a": str(file)})
    assert beside.adapters.device.limit == 2 << 30
    assert beside.adapters.host.limit == 8 << 30
    (adapter,) = beside.adapters.found
    assert (adapter.uid, adapter.nbytes) == ("a", beside.adapters.device.used)


def test_graphs_that_read_an_adapter_which_left_are_forgotten(
    tiny_qwen_image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one that comes back, to another place, would be read where it was."""
    made: list[Graphs] = []

    def around(module: nn.Module, config: WorkerConfig, context: Context) -> None:
        _, stack = main_stack(module)
        made.append(Graphs(stack, 1 << 20, Again()))
        stack.wrap(made[0].around)
        context.effects.stale.append(made[0].forget_where)

    monkeypatch.setattr(cuda_graphs, "apply", around)
    beside = Beside(tiny_qwen_image, tmp_path, lora_device_cache=40_000)
    beside.load(0)
    beside.load(1)
    expected = [beside.run(number) for number in (0, 1)]
    base = beside.run()
    for _ in range(3):
        assert same(beside.run(0), expected[0])
        assert same(beside.run(), base)
    (graphs,) = made
    assert isinstance(graphs.recorder, Again)
    assert graphs.recorder.replayed
    of_zero = [key for key in graphs.kept if "0@1" in repr(key)]
    assert of_zero
    assert same(beside.run(1), expected[1])
    assert not any("0@1" in repr(key) for key in graphs.kept)
    assert any("0@1" not in repr(key) for key in graphs.kept), "others stay"
    for _ in range(3):
        assert same(beside.run(0), expected[0])
