"""Adapters that come and go on a CUDA device: pinned memory, one copy, and CUDA graphs that read them."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch

from omni_grpc.features.lora import LoraLinear
from omni_grpc.types.plan import Sleep, SleepLevel, Slept, UnloadAdapter, Wake, Woken
from tests.worker.adapted import served, use, write

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

ON_GPU: dict[str, Any] = {"device": "cuda", "cpu_threads": None}


def test_adapters_come_and_go_beside_graphs(tiny_qwen_image: Path, tmp_path: Path) -> None:
    """Each result is that of a worker which loaded the adapter at start, also where one has left and is back at another
    address.
    """
    files = {name: write(tmp_path / f"{name}.safetensors", seed) for seed, name in enumerate("abc")}
    with served(tiny_qwen_image, lora={name: str(path) for name, path in files.items()}, **ON_GPU) as it:
        made = {name: it.make(*use(name)) for name in files} | {"": it.make()}
        size = it.found.loras[0].nbytes
    with served(tiny_qwen_image, lora_device_cache=2 * size, **ON_GPU) as it:
        for _ in range(4):
            assert it.make() == made[""]
        for name in files:
            it.load(name, files[name])
        for turn in range(12):
            name = "aabc"[turn % 4]
            assert it.make(*use(name)) == made[name]
            assert it.make() == made[""]
        assert it.worker._counts["graph_replays"] > 0
        held = {part.host._region.pinned for part in it.adapters._entries["a@1"].parts if part.host is not None}
        assert held == {True}
        for level in SleepLevel:
            it.worker.order(Sleep(level=level))
            it.next(Slept)
            it.worker.order(Wake())
            it.next(Woken)
            assert [it.make(*use(name)) for name in "abc"] == [made[name] for name in "abc"]
        for name in files:
            it.worker.order(UnloadAdapter(uid=f"{name}@1"))
        it.worker._adapting._freeing.submit(lambda: None).result(60)
        gc.collect()
        assert not any(isinstance(part, LoraLinear) for part in it.worker._runner._pipeline.modules())
        assert it.make() == made[""]
