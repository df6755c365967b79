"""Recording: torch's profiler over some steps of a worker, and the files that come of it.

All of it happens on the step lane, between two steps, but for the writing of files, which has a thread of its own, so
that steps do not wait for it.
"""

from __future__ import annotations

import contextlib
import gzip
import itertools
import logging
import pickle
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, record_function

from omni_grpc.types import shared_memory as shared
from omni_grpc.types.plan import ProfileFileKind, Record, Recorded, RecordedFile, RecordingEnd, SharedBytes
from omni_grpc.worker.failure import failure

logger = logging.getLogger(__name__)

ROWS = 60
"""Ops in the table."""
MEMORY_ENTRIES = 200_000
"""Most allocations in a snapshot; older ones are left out."""
FILES: Mapping[ProfileFileKind, str] = {
    ProfileFileKind.TRACE: "trace.json.gz",
    ProfileFileKind.OPS: "ops.txt",
    ProfileFileKind.MEMORY: "memory.pickle.gz",
}


class Recording:
    """One recording. `begin`, `end` and the block of `step` are on the same thread: torch wants that."""

    def __init__(self, order: Record) -> None:
        self.order = order
        self.steps = 0
        self._seen = 0
        self._profile: profile | None = None
        if not order.job_id and not order.start_step:
            # what comes before the first step, such as encoding prompts, is of interest too
            self._begin()

    @contextlib.contextmanager
    def step(self, ids: Sequence[str]) -> Iterator[None]:
        """A step of these requests, which is recorded if it is one of those that were asked for."""
        order = self.order
        counts = not order.job_id or order.job_id in ids
        if counts and self._profile is None and self._seen == order.start_step:
            self._begin()
        if self._profile is None:
            yield
        else:
            # of a job's recording, the steps between its own are in the trace too: told apart by their name
            name = f"step {self.steps} of {', '.join(ids)}" if counts else f"step of others: {', '.join(ids)}"
            with record_function(name):
                yield
            self.steps += counts
        self._seen += counts

    @property
    def complete(self) -> bool:
        """Whether all steps that were asked for have been recorded."""
        return self.order.num_steps is not None and self.steps >= self.order.num_steps

    def _begin(self) -> None:
        order = self.order
        if order.memory:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES, stacks="python")
        self._profile = profile(
            activities=[getattr(ProfilerActivity, name.upper()) for name in order.activities],
            record_shapes=order.record_shapes,
            profile_memory=order.memory,
            with_stack=order.with_stack,
            acc_events=True,
            # the other lanes too: encoding and decoding run beside the steps
            experimental_config=_ExperimentalConfig(profile_all_threads=True),
        )
        self._profile.start()

    def end(self) -> Callable[[Path], None]:
        """Stops it, and returns what writes its files into a folder, on any thread."""
        recorded, memory, snapshot = self._profile, self.order.memory, None
        if recorded is not None:
            recorded.stop()
            if memory:
                snapshot = torch.cuda.memory._snapshot()
                torch.cuda.memory._record_memory_history(enabled=None)

        def write(folder: Path) -> None:
            if recorded is None or not self.steps:
                return
            recorded.export_chrome_trace(str(folder / FILES[ProfileFileKind.TRACE]))
            (folder / FILES[ProfileFileKind.OPS]).write_text(self._table(recorded), encoding="utf-8")
            if snapshot is not None:
                with gzip.open(folder / FILES[ProfileFileKind.MEMORY], "wb", compresslevel=3) as file:
                    pickle.dump(snapshot, file)

        return write

    def _table(self, recorded: profile) -> str:
        key = "self_device_time_total" if "cuda" in self.order.activities else "self_cpu_time_total"
        averages = recorded.key_averages(group_by_input_shape=self.order.record_shapes)
        table: str = averages.table(sort_by=key, row_limit=ROWS, max_name_column_width=80)
        return table


class Recordings:
    """The recording of a worker, at most one at a time. `rank` is the worker's among those of its model. Nothing that
    goes wrong with a recording is the failure of a step: `send` gets it as the recording's own.
    """

    def __init__(self, rank: int, prefix: str, send: Callable[[Recorded], None]) -> None:
        self._rank, self._prefix, self._send = rank, prefix, send
        self._numbers = itertools.count()
        self._it: Recording | None = None

    def begin(self, order: Record) -> None:
        """Carries the order out, if it is for this rank."""
        if self._rank and not order.all_ranks:
            return
        self.end(RecordingEnd.STOPPED)
        with self._told(order, "beginning a profile"):
            self._it = Recording(order)
            logger.info("profile %s has begun", order.id)

    @contextlib.contextmanager
    def step(self, ids: Sequence[str]) -> Iterator[None]:
        """Has the step in the block recorded, if it is to be."""
        it = self._it
        if it is None:
            yield
            return
        with contextlib.ExitStack() as stack:
            with self._told(it.order, "profiling"):
                stack.enter_context(it.step(ids))
            yield
        if it.complete:
            self.end(RecordingEnd.STEPS)

    def end(self, end: RecordingEnd, profile_id: str | None = None) -> None:
        """Ends the recording, if there is one, of this id where one is given. Its report follows."""
        it = self._it
        if it is None or profile_id not in (None, it.order.id):
            return
        self._it = None
        with self._told(it.order, "ending a profile"):
            write = it.end()
            threading.Thread(target=self._finish, args=(it, end, write), name="omni_grpc-profile", daemon=True).start()

    def _finish(self, it: Recording, end: RecordingEnd, write: Callable[[Path], None]) -> None:
        order = it.order
        with (
            self._reachable(),
            self._told(order, "writing a profile"),
            tempfile.TemporaryDirectory(prefix="omni-profile-") as folder,
        ):
            write(Path(folder))
            files = tuple(
                RecordedFile(kind=kind, data=self._handed((Path(folder) / name).read_bytes()))
                for kind, name in FILES.items()
                if (Path(folder) / name).exists()
            )
            logger.info("profile %s has ended after %d steps", order.id, it.steps)
            self._send(Recorded(id=order.id, end=end, steps=it.steps, rank=self._rank, files=files))

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            logger.info("the engine is gone, a profile was not delivered")

    def _handed(self, data: bytes) -> SharedBytes:
        # numbers of their own: those of outputs are counted elsewhere
        prefix = self._prefix and f"{self._prefix}profile-"
        return shared.hand(data, prefix, next(self._numbers))

    @contextlib.contextmanager
    def _told(self, order: Record, doing: str) -> Iterator[None]:
        """Whatever goes wrong inside ends the recording, and is reported."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - it is the recording's failure, and reported as such
            self._it = None
            told = failure(error, f"{doing} ({order.id})")
            self._send(Recorded(id=order.id, end=RecordingEnd.STOPPED, rank=self._rank, failure=told))
