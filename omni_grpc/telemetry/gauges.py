"""What can be read at any moment: computed from what the server keeps anyway, when somebody asks."""

from __future__ import annotations

import collections
import platform
from collections.abc import Iterable, Iterator, Mapping

from omni_grpc.engine import Engine, EngineState, EngineStats
from omni_grpc.engine.replica import ReplicaState
from omni_grpc.fleet import Fleet, Served
from omni_grpc.store.records import Counts
from omni_grpc.telemetry import declared
from omni_grpc.telemetry.declared import Metric
from omni_grpc.telemetry.instruments import OTHER, Labels
from omni_grpc.types.load_progress import LoadPhase
from omni_grpc.types.version import __version__
from omni_grpc.types.vitals import Vitals

Gauges = dict[Metric, dict[Labels, float]]


class Reading:
    """Collects values."""

    def __init__(self) -> None:
        self.values: Gauges = collections.defaultdict(dict)

    def put(self, metric: Metric, value: float, *labels: str) -> None:
        assert len(labels) == len(metric.labels), f"{metric.name} has {metric.labels}"
        self.values[metric][labels] = value

    def state(self, metric: Metric, states: Iterable[str], now: str, *labels: str) -> None:
        """1 for the state that it is in, 0 for the others."""
        for state in states:
            self.put(metric, float(state == now), *labels, state)


def read(fleet: Fleet, counts: Counts | None, *, tenants: int) -> Gauges:
    """Everything but the calls. `counts` are those of the store, None where it does not say; so many `tenants` have
    figures of their own. To be called on the loop of the fleet.
    """
    reading = Reading()
    reading.put(declared.BUILD, 1, __version__, platform.python_version())
    reading.state(declared.SERVER_STATE, EngineState, fleet.state)
    for model in fleet.models:
        _read_model(reading, model)
    stats = {model.name: model.engine.stats() for model in fleet.models if model.engine is not None}
    for name, of_engine in stats.items():
        _read_load(reading, name, of_engine)
    for (tenant, state), jobs in _tenants(stats.values(), tenants).items():
        reading.put(declared.TENANT_JOBS, jobs, tenant, state)
    _read_storage(reading, fleet, counts)
    return reading.values


def _read_model(reading: Reading, model: Served) -> None:
    name, ready = model.name, model.ready
    reading.state(declared.MODEL_STATE, EngineState, model.state, name)
    if model.engine is not None:
        _read_engine(reading, name, model.engine)
    if model.engine is not None and model.state is EngineState.STARTING:
        loading = model.engine.loading
        reading.state(declared.LOAD_PHASE, LoadPhase, loading.phase, name)
        if loading.phase is LoadPhase.DOWNLOADING:
            reading.put(declared.DOWNLOADED, loading.done_bytes, name)
            reading.put(declared.DOWNLOAD_SIZE, loading.total_bytes, name)
    if ready is None:
        return
    found = ready.found
    formats = " ".join(sorted(found.quantized_layers))
    reading.put(
        declared.MODEL_INFO, 1, name, ready.device, ready.dtype, found.attention_backend, formats, found.residency
    )
    reading.put(declared.LOAD_SECONDS, ready.load_seconds, name)
    reading.put(declared.WEIGHTS, model.bytes, name)
    if model.engine is not None and (adapters := model.engine.adapters.loaded(found)):
        for adapter in adapters:
            reading.put(declared.LORA_LOADED, 1, name, adapter.id)
        reading.put(declared.LORA_BYTES, sum(adapter.nbytes for adapter in adapters), name)


def _read_load(reading: Reading, name: str, stats: EngineStats) -> None:
    reading.put(declared.QUEUED, stats.queued, name)
    reading.put(declared.QUEUE_LIMIT, stats.max_queue, name)
    if stats.queue_delay is not None:
        reading.put(declared.QUEUE_DELAY, stats.queue_delay, name)
    reading.put(declared.WORK, stats.work, name)
    reading.put(declared.RUNNING, stats.running, name)


def _read_engine(reading: Reading, name: str, engine: Engine) -> None:
    reading.put(declared.RUNNING_ROWS, engine.running_rows, name)
    for replica in engine.replicas:
        number = str(replica.number)
        reading.state(declared.REPLICA_STATE, ReplicaState, replica.state, name, number)
        reading.put(declared.REPLICA_JOBS, replica.stats.running, name, number)
        reading.put(declared.COST_ERROR, replica.meter.cost_error, name, number)
        for rank, vitals in replica.vitals.items():
            _read_vitals(reading, name, number, str(rank), vitals)


def _read_vitals(reading: Reading, model: str, replica: str, rank: str, vitals: Vitals) -> None:
    reading.put(declared.WORKER_RESIDENT, vitals.resident_bytes, model, replica, rank)
    if not vitals.device:
        return
    reading.put(declared.DEVICE_USED, vitals.device_used_bytes, model, replica, rank, vitals.device)
    reading.put(declared.DEVICE_SIZE, vitals.device_total_bytes, model, replica, rank, vitals.device)
    if vitals.device.startswith("cuda"):
        reading.put(declared.GRAPH_CAPTURES, vitals.graph_captures, model, replica, rank)
        reading.put(declared.GRAPH_REPLAYS, vitals.graph_replays, model, replica, rank)
    for one in vitals.adapters:
        reading.put(declared.LORA_CACHE, one.used_bytes, model, replica, rank, one.name)
        reading.put(declared.LORA_CACHE_LIMIT, one.limit_bytes, model, replica, rank, one.name)
        reading.put(declared.LORA_EVICTIONS, one.evictions, model, replica, rank, one.name)
    for op, kernel in vitals.kernels:
        reading.put(declared.KERNELS, 1, model, op, kernel)


def _tenants(load: Iterable[EngineStats], most: int) -> Mapping[tuple[str, str], int]:
    """Jobs by tenant and state, over all models: of the tenants with the most jobs, and of the others together."""
    jobs: collections.Counter[tuple[str, str]] = collections.Counter()
    for of_engine in load:
        for tenant, stats in of_engine.tenants.items():
            jobs[tenant, "queued"] += stats.queued
            jobs[tenant, "running"] += stats.running
    of_each: collections.Counter[str] = collections.Counter()
    for (tenant, _), count in jobs.items():
        of_each[tenant] += count
    # of equal ones by name, so that who is shown does not change from one look to the next
    shown = sorted(of_each, key=lambda tenant: (-of_each[tenant], tenant))[:most]
    told: collections.Counter[tuple[str, str]] = collections.Counter()
    for (tenant, state), count in jobs.items():
        told[tenant if tenant in shown else OTHER, state] += count
    return told


def _read_storage(reading: Reading, fleet: Fleet, counts: Counts | None) -> None:
    storage, keeping = fleet.storage, fleet.config.keeping
    reading.put(declared.STORE_BYTES, storage.artifacts.size_bytes, "artifacts")
    reading.put(declared.STORE_BYTES, storage.assets.size_bytes, "assets")
    reading.put(declared.STORE_BUDGET, keeping.artifact_budget, "artifacts")
    reading.put(declared.STORE_BUDGET, keeping.asset_budget, "assets")
    reading.put(declared.STORE_WRITABLE, float(storage.journal.failure is None))
    reading.put(declared.UNWRITTEN, storage.journal.unwritten)
    reading.put(declared.INPUT_BYTES, fleet.inputs.size_bytes)
    reading.put(declared.INPUT_BUDGET, fleet.config.limits.input_budget)
    if counts is not None:
        for kind, rows in _rows(counts):
            reading.put(declared.STORE_ROWS, rows, kind)
        reading.put(declared.WEBHOOKS_OWED, counts.owed)


def _rows(counts: Counts) -> Iterator[tuple[str, int]]:
    yield "jobs", counts.jobs
    yield "artifacts", counts.artifacts
    yield "assets", counts.assets
