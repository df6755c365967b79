"""Weights that sleep: what moves, what is kept, and what comes back, without a device."""

from __future__ import annotations

import functools
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from omni_grpc.nn.updates import LowRankUpdate
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.worker.base import LoadedModel
from omni_grpc.worker.host_copy import LARGEST_REGION, HostCopy, _chunks
from omni_grpc.worker.memory import host_memory_free
from omni_grpc.worker.reachable import tensors
from omni_grpc.worker.residency import HOST_RESERVE, Residency
from tests.worker.host_device import PretendMemory

CPU = torch.device("cpu")
PLENTY = 1 << 40


class Part(nn.Module):
    """Tied and viewed weights, a buffer, and tensors in attributes that no module registers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8, bias=False)
        self.tied = nn.Linear(8, 8, bias=False)
        self.tied.weight = self.one.weight
        self.register_buffer("scale", torch.arange(4.0))
        self.half = self.one.weight.detach()[:4]
        self.updates = {"lora": [LowRankUpdate(down=torch.ones(2, 8), up=torch.ones(8, 2), rows=slice(0, 8))]}
        self.waiting = deque([functools.partial(torch.add, torch.full((3,), 7.0))])

    def forward(self, x: Tensor) -> Tensor:
        update = self.updates["lora"][0]
        extra = self.waiting[0](torch.zeros(3)).sum() + self.half.sum()
        return self.tied(self.one(x)) + x @ update.down.T @ update.up.T + self.scale.sum() + extra


def held(part: nn.Module) -> int:
    return sum(dict(_storages(part)).values())


def _storages(part: Any) -> list[tuple[int, int]]:
    return [(t.untyped_storage()._cdata, t.untyped_storage().nbytes()) for t in tensors(part)]


def asleep(part: Any, **more: Any) -> tuple[Residency, PretendMemory]:
    memory = PretendMemory(lambda: held(part))
    runner: Any = SimpleNamespace()
    loaded = LoadedModel(runner=runner, weight_bytes=0, components={"part": part}, on_sleep=more.pop("on_sleep", ()))
    more.setdefault("host_free", lambda: PLENTY)
    return Residency(loaded, CPU, memory, **more), memory


@torch.inference_mode()
def test_all_that_a_model_holds_leaves_and_comes_back_shared_memory_once() -> None:
    part, x = Part().requires_grad_(False), torch.randn(3, 8)
    expected, pointers = part(x), len({key for key, _ in _storages(part)})
    residency, memory = asleep(part)
    everything = 4 * (64 + 4 + 16 + 16 + 3)
    assert residency.device_bytes == everything
    assert residency.sleep() == everything
    assert (residency.device_bytes, residency.host_bytes) == (0, everything)
    assert len(memory.saved) == pointers == 5
    assert held(part) == 0
    residency.wake()
    assert residency.device_bytes == everything
    assert torch.equal(part(x), expected)
    # what shared memory before shares it now
    part.one.weight.fill_(2.0)
    assert part.tied.weight[0, 0] == part.half[0, 0] == 2.0


def test_copies_are_kept_so_that_a_second_sleep_copies_nothing() -> None:
    residency, memory = asleep(Part())
    residency.sleep()
    residency.wake()
    first = len(memory.saved)
    assert residency.sleep() > 0
    assert len(memory.saved) == first
    assert memory.given_back == 2


def test_a_weight_that_was_written_to_is_copied_anew() -> None:
    part = Part().requires_grad_(False)
    residency, memory = asleep(part)
    residency.sleep()
    residency.wake()
    with torch.no_grad():
        part.scale.mul_(2)
    residency.sleep()
    assert memory.saved[5:] == [16]
    residency.wake()
    assert part.scale.tolist() == [0, 2, 4, 6]


def test_what_is_made_anew_goes_first_and_is_not_copied() -> None:
    part = Part()
    part.graphs = [torch.zeros(1000)]  # type: ignore[assignment]
    residency, memory = asleep(part, on_sleep=(part.graphs.clear,))
    residency.sleep()
    assert 4000 not in memory.saved


def test_what_a_runner_keeps_moves_too_and_its_copy_is_not_kept() -> None:
    part = Part()
    memory = PretendMemory(lambda: held(part))
    runner: Any = nn.Module()
    runner.cache = {"lengths": torch.arange(5.0)}
    residency = Residency(
        LoadedModel(runner=runner, weight_bytes=0, components={"part": part}), CPU, memory, host_free=lambda: PLENTY
    )
    residency.sleep()
    assert runner.cache["lengths"].untyped_storage().nbytes() == 0
    residency.wake()
    runner.cache["lengths"].mul_(2)
    residency.sleep()
    residency.wake()
    assert runner.cache["lengths"].tolist() == [0, 2, 4, 6, 8]


def test_a_host_without_room_refuses_and_nothing_has_moved() -> None:
    part = Part()
    residency, memory = asleep(part, host_free=lambda: HOST_RESERVE)
    with pytest.raises(ResourceExhausted, match=r"the host has 2\.15 GB of memory left.*drop its weights") as caught:
        residency.sleep()
    assert caught.value.failure.reason == "HOST_MEMORY"
    assert memory.saved == []
    assert residency.device_bytes == held(part) > 0


def test_a_host_that_got_short_of_memory_keeps_no_copies() -> None:
    free = [PLENTY]
    residency, memory = asleep(Part(), host_free=lambda: free[0])
    residency.sleep()
    free[0] = 0
    residency.wake()
    assert residency.host_bytes == 0
    free[0] = PLENTY
    residency.sleep()
    assert len(memory.saved) == 10


def test_a_device_without_room_leaves_the_model_asleep_and_the_next_wake_finds_it() -> None:
    part, x = Part().requires_grad_(False), torch.randn(3, 8)
    expected = part(x)
    residency, memory = asleep(part)
    residency.sleep()
    memory.fails = 2
    with pytest.raises(torch.OutOfMemoryError):
        residency.wake()
    assert held(part) == 0
    memory.fails = None
    residency.wake()
    assert torch.equal(part(x), expected)


def test_a_model_on_the_host_stays_where_it_is() -> None:
    part = Part()
    residency = Residency(LoadedModel(runner=SimpleNamespace(), weight_bytes=0, components={"part": part}), CPU)  # type: ignore[arg-type]
    before = held(part)
    assert residency.sleep() == 0
    residency.wake()
    assert held(part) == residency.device_bytes == before


def test_what_was_dropped_is_counted_only_where_it_is_gone() -> None:
    part, other = Part(), Part()
    loaded = LoadedModel(runner=SimpleNamespace(), weight_bytes=0, components={"part": part, "other": other})  # type: ignore[arg-type]
    residency = Residency(loaded, CPU)
    half = residency.device_bytes // 2
    residency.begin_drop()
    del loaded, part
    assert residency.end_drop() == half
    del other
    assert residency.end_drop() == 2 * half


def test_ranges_are_few_and_none_is_larger_than_it_may_be() -> None:
    sizes = [(number, (1 << 30) + number) for number in range(11)]
    chunks = _chunks(sizes)
    assert [pair for chunk in chunks for pair in chunk] == sizes
    assert len(chunks) == 4
    assert all(sum(size for _, size in chunk) <= LARGEST_REGION for chunk in chunks)
    assert _chunks([(0, 2 * LARGEST_REGION)]) == [[(0, 2 * LARGEST_REGION)]]


def test_the_only_copy_is_not_forgotten() -> None:
    copy = HostCopy(PretendMemory())
    copy.save([torch.ones(3)])
    tensor = torch.ones(4)
    copy.save([tensor])
    copy.release()
    assert copy.away
    with pytest.raises(AssertionError):
        copy.forget()
    copy.fetch()
    copy.forget()
    assert tensor.tolist() == [1.0] * 4


def test_memory_of_the_host_is_what_the_container_leaves(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  100 kB\nMemAvailable:  50 kB\n")
    assert host_memory_free(meminfo, tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert host_memory_free(meminfo, tmp_path) == 50 << 10
    (tmp_path / "memory.max").write_text("4000\n")
    (tmp_path / "memory.stat").write_text("anon 500\ninactive_file 100\nactive_file 200\nslab 5\n")
    assert host_memory_free(meminfo, tmp_path) == 3300
    assert host_memory_free() > 0
