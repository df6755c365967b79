"""The metrics of one server, as Prometheus reads them."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder, gzip_accepted
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from omni_grpc.config import MetricsConfig
from omni_grpc.gate import Gate
from omni_grpc.store.records import Counts
from omni_grpc.store.seam import StoreError
from omni_grpc.telemetry import declared, gauges
from omni_grpc.telemetry.instruments import Buckets, Instruments, Labels, Readings, families
from omni_grpc.telemetry.recorder import Calls, Recorder
from omni_grpc.types.shared_memory import BLOCKS, OWNED

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25
"""Between two looks at how late the event loop is."""
COUNT_SECONDS = 15.0
"""For how long the numbers of rows in the store are good: counting reads an index of each table."""


class Snapshot(Collector):
    """What was read last, as a collector of prometheus-client."""

    def __init__(self) -> None:
        self.readings: Readings = {}

    def describe(self) -> Iterator[Family]:
        return families({metric: {} for metric in declared.METRICS})

    def collect(self) -> Iterator[Family]:
        return families({metric: self.readings.get(metric, {}) for metric in declared.METRICS})


class Metrics:
    """Measures from when it is made, on the loop of the gate."""

    def __init__(self, gate: Gate, calls: Calls, config: MetricsConfig) -> None:
        self._gate, self._calls, self._config = gate, calls, config
        self._instruments = Instruments()
        Recorder(self._instruments, gate, calls)
        self._loop_lag = self._instruments.histogram(declared.LOOP_LAG).of()
        self._snapshot = Snapshot()
        self.registry = CollectorRegistry()
        """Those of this server alone."""
        self.registry.register(self._snapshot)
        ProcessCollector(registry=self.registry)
        self._reading = asyncio.Lock()
        self._counts: Counts | None = None
        self._counted = float("-inf")
        self._sampling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._sampling = asyncio.create_task(self._sample(), name="omni_grpc-loop-lag")

    async def stop(self) -> None:
        if self._sampling is not None:
            self._sampling.cancel()
            await asyncio.gather(self._sampling, return_exceptions=True)
            self._sampling = None

    async def text(self, accept: str = "", accept_encoding: str = "") -> tuple[bytes, Mapping[str, str]]:
        """All of them, and the headers that say how they are written: by what a client accepts in the text format of
        Prometheus or as OpenMetrics, compressed by gzip or not.
        """
        encode, content_type = choose_encoder(accept)
        headers = {"content-type": content_type, "cache-control": "no-store", "vary": "accept, accept-encoding"}
        zipped = gzip_accepted(accept_encoding)
        if zipped:
            headers["content-encoding"] = "gzip"
        async with self._reading:
            readings = await self._read()

            def write() -> bytes:
                self._snapshot.readings = readings | _shared_memory()
                text = encode(self.registry)
                return gzip.compress(text, compresslevel=1) if zipped else text

            # the loop has streams to serve meanwhile
            return await asyncio.to_thread(write), headers

    async def _read(self) -> dict[declared.Metric, Mapping[Labels, float | Buckets]]:
        counts = await self._count()
        found = gauges.read(self._gate.fleet, counts, tenants=self._config.metrics_tenants)
        found[declared.OPEN_CALLS] = {(): self._calls.open}
        found[declared.OPEN_STREAMS] = {(): self._calls.open_streams}
        return {**self._instruments.read(), **found}

    async def _count(self) -> Counts | None:
        """How much there is in the store, if that was read lately or can be now."""
        if time.monotonic() - self._counted >= COUNT_SECONDS:
            try:
                self._counts = await self._gate.fleet.storage.store.counts()
            except StoreError as error:
                if self._counts is not None:
                    logger.warning("the rows of the store cannot be counted: %s", error)
                self._counts = None
            self._counted = time.monotonic()
        return self._counts

    async def _sample(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + LOOK_SECONDS
            await asyncio.sleep(LOOK_SECONDS)
            self._loop_lag.observe(max(0.0, loop.time() - due))


def _shared_memory(folder: Path = BLOCKS) -> dict[declared.Metric, Mapping[Labels, float | Buckets]]:
    """The blocks of this process, those that it lets others make included."""
    mine, blocks, size = str(os.getpid()), 0, 0
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            owner = OWNED.match(entry.name)
            if owner is not None and owner[1] == mine:
                with contextlib.suppress(FileNotFoundError):  # taken meanwhile
                    size += entry.stat().st_size
                    blocks += 1
    return {declared.SHARED_BLOCKS: {(): blocks}, declared.SHARED_BYTES: {(): size}}


def metrics_of(gate: Gate, calls: Calls, config: MetricsConfig, *, readable: bool) -> Metrics | None:
    """None where they are turned off, or nobody could read them. `readable`: there is a port that serves them."""
    return Metrics(gate, calls, config) if config.enable_metrics and readable else None
