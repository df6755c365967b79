"""Makes the lines of a batch on a server, some at a time, each to its end: made, or failed and recorded as that."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from omni_grpc.cli.batch.lines import BatchLine
from omni_grpc.cli.batch.results import Results, failed
from omni_grpc.cli.requests import request_of
from omni_grpc.client import Client, JobStream, MediaResult
from omni_grpc.client.asked import asked_of
from omni_grpc.client.saving import with_parameters
from omni_grpc.types.errors import Code, FailedPrecondition, OmniError
from omni_grpc.types.os_errors import plain
from omni_grpc.types.output_files import write_file
from omni_grpc.types.output_names import numbered_names
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO

TRIES = 5
"""How often a line is sent, where its failure may pass."""
LONGEST_PAUSE = 30.0
"""Seconds between two tries at most."""
ENDS_ALL = frozenset({"SERVER_UNREACHABLE", "STREAM_LOST", "DISK_FULL", "FILE_NOT_WRITTEN", "MODEL_NOT_FOUND"})
"""Reasons that would fail every other line as well: the batch stops, to be run again."""
ENDS_ALL_CODES = frozenset({Code.UNAUTHENTICATED, Code.PERMISSION_DENIED})

Ended = Callable[[BatchLine, Mapping[str, Any], MediaResult | None], None]
"""Called with each line that has ended: its record, and its result if it was made."""


class Stopped(Exception):
    """The batch was stopped while this line was in work. Nothing is recorded of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Making:
    """How lines are made: of which model, and whether with parameters in the files. `server`: its version."""

    model: str
    server: str
    metadata: bool
    timeout: float | None
    tell: Callable[[str], None]


class BatchRunner:
    """Makes the lines that are not made yet."""

    def __init__(self, client: Client, results: Results, how: Making, ended: Ended) -> None:
        self._client, self._results, self._how, self._ended = client, results, how, ended
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._running: set[str] = set()

    def run(self, lines: Sequence[BatchLine], concurrency: int) -> None:
        """Returns when every line has ended. Raises the error that would have failed all of them; on an interrupt, the
        jobs that run are cancelled first.
        """
        with ThreadPoolExecutor(concurrency, thread_name_prefix="batch") as pool:
            futures = [pool.submit(self._line, line) for line in lines]
            try:
                wait(futures, return_when=FIRST_EXCEPTION)
                for future in futures:
                    if future.done() and (error := future.exception()) is not None:
                        raise error
            except BaseException as error:
                pool.shutdown(wait=False, cancel_futures=True)
                self._cancel(str(error) if isinstance(error, KeyboardInterrupt) else "the batch has stopped", error)
                raise

    def _cancel(self, reason: str, cause: BaseException) -> None:
        self._stop.set()
        with self._lock:
            running = list(self._running)
        for job_id in running:
            try:
                self._client.cancel_job(job_id, reason or "interrupted by the user")
            except OmniError as error:
                cause.add_note(f"job {job_id} could not be cancelled: {error}")

    def _line(self, line: BatchLine) -> None:
        if self._stop.is_set():
            return
        try:
            made = self._made(line)
            record = {"job_id": made.job_id, "files": self._write(line, made), **_about(made)}
        except Stopped:
            return
        except OmniError as error:
            if error.reason in ENDS_ALL or error.failure.code in ENDS_ALL_CODES:
                raise
            made, record = None, failed(error)
        except OSError as error:  # media that were there when the lines were checked
            made, record = None, failed(FailedPrecondition(plain(error), reason="FILE_NOT_READ"))
        with self._lock:
            self._ended(line, self._results.add(line, record), made)

    def _made(self, line: BatchLine) -> MediaResult:
        """The result of a line. A failure that may pass is met with another try, under another idempotency key."""
        first = self._results.failures(line)
        for attempt in range(first, first + TRIES):
            try:
                return self._ask(line, line.request_id(attempt))
            except OmniError as error:
                if self._stop.is_set():
                    raise Stopped from None
                last = attempt == first + TRIES - 1
                if last or error.reason in ENDS_ALL or not self._may_pass(error):
                    raise
                pause = 0.0 if error.reason == "JOB_CANCELLED" else 0.5 * 2 ** (attempt - first)
                if self._stop.wait(min(max(pause, error.failure.retry_after or 0.0), LONGEST_PAUSE)):
                    raise Stopped from None
        raise AssertionError("the last try returns or raises")

    def _may_pass(self, error: OmniError) -> bool:
        # what was cancelled is a job of the run before, which this one goes on with
        of_then = self._results.resumed and error.reason in ("JOB_CANCELLED", "ARTIFACT_NOT_FOUND")
        return of_then or error.failure.retryable

    def _ask(self, line: BatchLine, request_id: str) -> MediaResult:
        options: Mapping[str, Any] = {"model": self._how.model, "request_id": request_id, **line.options}
        methods: Mapping[str, Callable[..., JobStream]] = {
            IMAGE: self._client.stream,
            EDIT: self._client.stream_edit,
            VIDEO: self._client.stream_video,
            AUDIO: self._client.stream_audio,
        }
        method = methods[line.kind]
        try:
            with self._client_stream(method(line.prompt, timeout=self._how.timeout, **options)) as stream:
                made = stream.result()
        except OmniError as error:
            # media that were uploaded again have other ids, so that the server takes it for another request; the key
            # is made of what they hold
            job_id = error.failure.metadata.get("job_id")
            if error.reason != "REQUEST_ID_REUSED" or job_id is None:
                raise
            with self._client_stream(self._client.watch_job(job_id, timeout=self._how.timeout), job_id) as stream:
                made = stream.result()
        asked = made.asked or asked_of(request_of(line.kind, self._how.model, line.prompt, line.options))
        return dataclasses.replace(made, asked=dataclasses.replace(asked, server=self._how.server))

    @contextlib.contextmanager
    def _client_stream(self, stream: JobStream, job_id: str = "") -> Iterator[JobStream]:
        """The stream of a job, which is among those that run meanwhile."""
        with stream:
            job_id = job_id or stream.job_id
            with self._lock:
                self._running.add(job_id)
            try:
                if self._stop.is_set():  # it began while the others were cancelled: leaving the stream cancels it
                    raise Stopped
                yield stream
            finally:
                with self._lock:
                    self._running.discard(job_id)

    def _write(self, line: BatchLine, made: MediaResult) -> list[str]:
        files = with_parameters(made, self._tell(line)) if self._how.metadata else made.files
        names = numbered_names(line.number, made.seeds, made.effective.output_format)
        for name, data in zip(names, files, strict=True):
            write_file(self._results.folder / name, data)
        return names

    def _tell(self, line: BatchLine) -> Callable[[str], None]:
        return lambda text: self._how.tell(f"line {line.number}: {text}")


def _about(made: MediaResult) -> dict[str, Any]:
    warnings = [dataclasses.asdict(warning) for warning in made.warnings]
    return {"seeds": list(made.seeds), "warnings": warnings, "seconds": round(made.stats.total, 3)}
