"""Each metric that is declared, seen to move on a real server with a worker that tests hold."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.items import Lane
from omni_grpc.store.open import open_storage
from omni_grpc.store.seam import StoreError
from omni_grpc.telemetry import declared, metrics
from omni_grpc.telemetry.declared import METRICS, Kind
from omni_grpc.types import shared_memory
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import SharedBytes
from omni_grpc.types.vitals import AdapterMemory, Vitals
from omni_grpc.v1 import admin_pb2, job_pb2
from tests.server.fake_executor import READY, FakeExecutor
from tests.server.service import (
    CHECKPOINT,
    Service,
    downloading,
    image,
    refusal,
    served,
    starting,
    until,
)
from tests.server.test_loras import adapter, load
from tests.telemetry.scraping import Figures, scrape

pytestmark = pytest.mark.service

STYLE = Adapter(id="style", file="s", sha256="", format="peft", rank=4, size_bytes=9, applied={"transformer": 1})
LORAS = dataclasses.replace(
    READY, device_bytes=1234, found=WorkerFindings(loras=(STYLE,), attention_backend="torch_sdpa")
)
VITALS = Vitals(
    resident_bytes=5000,
    device="cuda:0",
    device_used_bytes=300,
    device_total_bytes=1000,
    graph_captures=2,
    graph_replays=70,
    kernels=(("attention", "fa3"), ("gemm_q", "torch")),
    adapters=(AdapterMemory(name="device", used_bytes=70, limit_bytes=90, evictions=4),),
)
SETTINGS = {
    "model": "toy",
    "port": 0,
    "restart_backoff": 0,
    "metrics_port": 0,
    "max_num_seqs": 1,
    "cache_backend": "tea_cache",
    "cache_config": {"rel_l1_thresh": 0.3, "coefficients": [2.0, 0.0]},
    "webhook_hosts": ("127.0.0.1:9",),
    "lora": {"style": "s"},
}


class Telling(FakeExecutor):
    """Says how it is, as a worker on a GPU does."""

    def all_vitals(self) -> Mapping[int, Vitals]:
        return {0: VITALS}


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    config = EngineConfig.from_settings(**SETTINGS, state_dir=str(tmp_path / "kept"), lora_roots=str(tmp_path))
    executor = Telling(LORAS)
    async with served(config, Engine(config, CHECKPOINT, executor, open_storage(config)), executor) as service:
        yield service


def names_of(metric: declared.Metric) -> str:
    return metric.name + ("_count" if metric.kind is Kind.HISTOGRAM else "")


class Seen:
    """The largest value of each metric over several scrapes."""

    def __init__(self, address: str | None) -> None:
        self._address = address
        self.most: dict[str, float] = {}

    async def look(self) -> Figures:
        figures = await scrape(self._address)
        for metric in METRICS:
            values = [one.value for one in figures.samples if one.name == names_of(metric)]
            self.most[metric.name] = max([self.most.get(metric.name, 0.0), *values])
        return figures


@contextlib.asynccontextmanager
async def things_in_memory(service: Service) -> AsyncIterator[None]:
    """A block in shared memory and decoded inputs, as jobs have them for moments."""
    block = f"{shared_memory.own_prefix()}0"
    shared_memory.store(b"abc", block)
    service.fleet.inputs.reserve([SharedBytes(name="metrics-input", size=77)])
    try:
        yield
    finally:
        service.fleet.inputs.free_blocks(["metrics-input"])
        shared_memory.discard_all([SharedBytes(name=block, size=3)])


async def one_that_is_written_late(service: Service, seen: Seen) -> None:
    """A job while the store takes nothing."""
    rows = service.engine.storage.store.jobs
    write, came, on = rows.write, asyncio.Event(), asyncio.Event()

    async def later(writes):
        came.set()
        await on.wait()
        raise StoreError("no room")

    async def never(job_ids, cause):
        raise StoreError("no room")

    rows.write, delete, rows.delete = later, rows.delete, never  # type: ignore[method-assign]
    creating = asyncio.ensure_future(refusal(service.jobs.CreateJob(job_pb2.CreateJobRequest(generate_image=image()))))
    await came.wait()
    assert (await seen.look()).of("omni_grpc_store_unwritten_jobs") == 1
    on.set()
    await creating
    assert (await seen.look()).of("omni_grpc_store_writable") == 0
    rows.write, rows.delete = write, delete  # type: ignore[method-assign]


async def test_each_metric_moves(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "COUNT_SECONDS", 0.0)
    seen = Seen(service.server.metrics_address)
    before = await seen.look()
    assert before.of("omni_grpc_queue_jobs") == 0
    gate = service.executor.gates[Lane.STEP]
    gate.close()
    hook = {"webhook": {"url": "https://127.0.0.1:9/hook"}}
    await load(service, adapter(Path(service.engine.config.fleet.lora_roots[0])), "other")
    first = await service.create(options=hook, sampling={"steps": 12, "loras": [{"lora_id": "style", "scale": 1.0}]})
    second = await service.create()
    slowly = Duration(seconds=60)
    watching = [
        asyncio.ensure_future(service.watch(first.job_id)),
        asyncio.ensure_future(service.watch(first.job_id, min_progress_interval=slowly)),
    ]
    await until(lambda: service.engine.jobs.get(first.job_id).watchers == 2)
    async with things_in_memory(service):
        gate.let(2)
        await until(lambda: service.engine.jobs.get(first.job_id).step == 2)
        figures = await seen.look()
    assert figures.of("omni_grpc_queue_jobs", model="toy") == 1
    assert figures.of("omni_grpc_running_jobs", model="toy") == 1
    assert figures.of("omni_grpc_running_rows", model="toy") == 1
    assert figures.of("omni_grpc_tenant_jobs", tenant="", state="queued") == 1
    assert figures.of("omni_grpc_open_streams") == 2
    assert figures.of("omni_grpc_input_bytes") == 77
    assert figures.of("omni_grpc_shared_memory_bytes") >= 3
    gate.open()
    await asyncio.gather(*watching)
    await service.watch(second.job_id)
    service.executor.failures[Lane.PREPARE] = Failure(code=Code.INTERNAL, reason="PHASE_FAILED", message="no")
    await service.finished()
    refused = await refusal(service.jobs.GetJob(job_pb2.GetJobRequest(job_id="job_none")))
    await service.executor.die()
    await until(lambda: service.executor.starts == 2)
    await until(lambda: service.executor._alive)
    await one_that_is_written_late(service, seen)
    await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    async with asyncio.timeout(30):
        while (figures := await seen.look()).of("omni_grpc_webhook_attempts_total", outcome="failed") == 0:  # noqa: ASYNC110 (each look is a scrape)
            await asyncio.sleep(0.1)
    assert figures.of("omni_grpc_refusals_total", reason=refused.reason) == 1
    assert figures.of("omni_grpc_jobs_total", state="FAILED", reason="PHASE_FAILED") == 1
    assert figures.of("omni_grpc_jobs_total", state="SUCCEEDED") == 2
    assert figures.of("omni_grpc_worker_restarts_total", cause="WORKER_DIED") == 1
    assert figures.of("omni_grpc_lora_jobs_total", adapter="style") == 1
    # the one that was never written ran meanwhile
    assert 15 <= figures.of("omni_grpc_steps_total") <= 18
    assert figures.of("omni_grpc_cuda_graph_replays_total", replica="0", rank="0") == 70
    cache = {"replica": "0", "rank": "0", "cache": "device"}
    found = [
        figures.of(f"omni_grpc_lora_{name}", **cache)
        for name in ("cache_bytes", "cache_limit_bytes", "evictions_total")
    ]
    assert found == [70, 90, 4]
    async with starting(metrics_port=0) as (loading, _):
        loading.executor._deliver(downloading(100))
        later = Seen(loading.server.metrics_address)
        figures = await later.look()
    assert figures.of("omni_grpc_model_load_phase", phase="DOWNLOADING") == 1
    assert (figures.of("omni_grpc_model_downloaded_bytes"), figures.of("omni_grpc_model_download_size_bytes")) == (
        100,
        1000,
    )
    most = {metric.name: max(seen.most[metric.name], later.most[metric.name]) for metric in METRICS}
    assert [name for name, value in most.items() if value <= 0] == []
