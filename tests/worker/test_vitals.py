"""What a worker process says of itself once a second, and how that gets to the engine."""

from __future__ import annotations

import asyncio
import collections
import logging
import os
from pathlib import Path

import psutil
import pytest
import torch

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import ProcessExecutor, Vital
from omni_grpc.types.plan import Ready, Report
from omni_grpc.types.vitals import Vitals
from omni_grpc.worker import vitals
from omni_grpc.worker.memory import host_memory
from omni_grpc.worker.vitals import Looker, vitals_of


def test_a_process_knows_its_memory_and_that_of_its_device() -> None:
    found = vitals_of(torch.device("cpu"), collections.Counter(graph_replays=3, graph_captures=1))
    own = psutil.Process().memory_info().rss
    assert 0.5 * own < found.resident_bytes < 2 * own
    assert (found.device, found.graph_replays, found.graph_captures) == ("cpu", 3, 1)
    assert 0 < found.device_used_bytes < found.device_total_bytes <= psutil.virtual_memory().total
    assert vitals_of(None, {}).device_total_bytes == 0


def test_the_memory_of_a_container_is_what_it_may_use(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  1000 kB\nMemAvailable:  900 kB\n", encoding="utf-8")
    assert host_memory(meminfo, tmp_path) == (100 * 1024, 1000 * 1024)
    for name, text in (("memory.max", "512000"), ("memory.current", "412000"), ("memory.stat", "anon 5\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert host_memory(meminfo, tmp_path) == (412000, 512000)


def test_a_look_that_fails_is_logged_and_nothing_old_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(vitals, "LOOK_SECONDS", 0.001)
    answers = iter([Vitals(resident_bytes=1)])
    looker = Looker(lambda: next(answers))
    with caplog.at_level(logging.ERROR):
        looker.start()
        looker._thread.join(10)
    assert looker.newest is None
    assert "cannot be told any more" in caplog.text


async def test_the_engine_hears_from_the_process_of_a_worker() -> None:
    config = EngineConfig.from_settings(warm_up_seconds=0, device="cpu")
    executor = ProcessExecutor(config, open_model(config.model, apply=lambda found: found))
    assert isinstance(executor, Vital)
    assert executor.all_vitals() == {}
    ready = asyncio.get_running_loop().create_future()

    def deliver(report: Report) -> None:
        if isinstance(report, Ready) and not ready.done():
            ready.set_result(report)

    executor.start(deliver)
    try:
        async with asyncio.timeout(60):
            told = await ready
            while not (found := executor.all_vitals()) or not found[0].device:  # noqa: ASYNC110 (it comes by itself)
                await asyncio.sleep(0.05)
        assert told.pid != os.getpid()
        assert found[0].device == "cpu"
        own = psutil.Process(told.pid).memory_info().rss
        assert 0.5 * own < found[0].resident_bytes < 2 * own
    finally:
        await executor.close()
