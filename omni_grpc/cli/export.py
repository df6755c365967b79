"""`omni-grpc jobs export`: writes all jobs of a server, as JSON lines or CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, TypeAlias

from google.protobuf.timestamp_pb2 import Timestamp

from omni_grpc.cli import connect
from omni_grpc.cli.jobs import add_filters, filters
from omni_grpc.cli.printing import as_dict
from omni_grpc.client.messages import state_name
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import Failure
from omni_grpc.types.output_files import check_writable, new_file
from omni_grpc.v1.job_pb2 import Job
from omni_grpc.v1.sampling_pb2 import Task
from omni_grpc.wire import from_status
from omni_grpc.wire.known import seconds

TOLD_EVERY = 100
"""Jobs between two updates of the progress on a terminal."""

Write: TypeAlias = Callable[[Job], None]


def main(argv: Sequence[str]) -> int:
    """Writes all jobs that fit, newest first, with a page of them in memory. Returns the exit code.

    Raises the OmniError that ended it; a file of --output is then as it was before.
    """
    args = _parser().parse_args(argv)
    if args.output is not None:
        check_writable(args.output)
    with connect.connect(args) as client, _target(args.output) as file, _counting(args.output) as count:
        write = FORMATS[args.format](file)
        for job in client.iter_jobs(**filters(args)):
            write(job)
            count()
    return 0


def _parser() -> Parser:
    jobs = Parser(prog="omni-grpc jobs", description="Without a command, it lists jobs.")
    commands = jobs.add_subparsers(title="commands", required=True, metavar="COMMAND")
    parser = commands.add_parser(
        "export",
        help="write all jobs",
        description="Writes all jobs that fit, newest first, to stdout or a file, and their number to stderr. Jobs "
        "that are made meanwhile are not among them. It changes nothing, so it can be repeated. A job has no prompt.",
    )
    connect.add_server(parser)
    add_filters(parser)
    parser.add_argument(
        "--format",
        choices=tuple(FORMATS),
        default="jsonl",
        help="jsonl: all of each job, as a JSON object per line; csv: its main fields (default: jsonl)",
    )
    parser.add_argument(
        "--output",
        "--out",
        type=Path,
        metavar="FILE",
        help="file to write, which is replaced once all jobs are in the new one (default: stdout)",
    )
    return jobs


@contextlib.contextmanager
def _target(path: Path | None) -> Iterator[BinaryIO]:
    if path is not None:
        with new_file(path) as file:
            yield file
        return
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@contextlib.contextmanager
def _counting(path: Path | None) -> Iterator[Callable[[], None]]:
    """Counts jobs, on a terminal as they come, and says at the end how many there were, and where they are."""
    done, live = 0, sys.stderr.isatty()

    def count() -> None:
        nonlocal done
        done += 1
        if live and done % TOLD_EVERY == 0:
            print(f"\r{done} jobs", end="", file=sys.stderr, flush=True)

    try:
        yield count
    finally:
        if live and done >= TOLD_EVERY:
            print("\r", end="", file=sys.stderr)
    print(f"{done} jobs" + (f" in {path}" if path else ""), file=sys.stderr)


# --- formats ---------------------------------------------------------------------------------------------------------


def _jsonl(file: BinaryIO) -> Write:
    return lambda job: _put(file, json.dumps(as_dict(job)) + "\n")


def _csv(file: BinaryIO) -> Write:
    line = io.StringIO()
    rows = csv.writer(line)

    def write(cells: Sequence[str]) -> None:
        line.seek(0)
        line.truncate()
        rows.writerow(cells)
        _put(file, line.getvalue())

    write(list(COLUMNS))
    return lambda job: write([column(job) for column in COLUMNS.values()])


def _put(file: BinaryIO, text: str) -> None:
    file.write(text.encode())


def _time(name: str) -> Callable[[Job], str]:
    def cell(job: Job) -> str:
        moment: Timestamp = getattr(job, name)
        return moment.ToJsonString() if job.HasField(name) else ""

    return cell


def _text(of: Callable[[Job], str]) -> Callable[[Job], str]:
    """Text of other people's: a spreadsheet would take some for a formula, so that one gets an apostrophe in front."""

    def cell(job: Job) -> str:
        text = of(job)
        return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text

    return cell


def _seconds(name: str) -> Callable[[Job], str]:
    return lambda job: f"{seconds(getattr(job.stats, name)):.3f}" if job.stats.HasField(name) else ""


def _effective(name: str) -> Callable[[Job], str]:
    return lambda job: str(getattr(job.effective, name)) if job.HasField("effective") else ""


def _failure(of: Callable[[Failure], str]) -> Callable[[Job], str]:
    return _text(lambda job: of(from_status(job.error)) if job.HasField("error") else "")


COLUMNS: Mapping[str, Callable[[Job], str]] = {
    "job_id": lambda job: job.job_id,
    "state": lambda job: state_name(job.state),
    "model": _text(lambda job: job.model),
    "task": lambda job: Task.Name(job.task).removeprefix("TASK_") if job.task in Task.values() else str(job.task),
    "tenant": _text(lambda job: job.tenant),
    **{name: _time(name) for name in ("create_time", "start_time", "end_time", "expire_time")},
    **{f"{name}_seconds": _seconds(name) for name in ("queue_wait", "denoise", "total")},
    "step": lambda job: str(job.step),
    "total_steps": lambda job: str(job.total_steps),
    **{name: _effective(name) for name in ("width", "height", "num_frames")},
    "seeds": lambda job: " ".join(map(str, job.effective.seeds)),
    "priority": lambda job: str(job.priority),
    "labels": lambda job: json.dumps(dict(job.labels), sort_keys=True) if job.labels else "",
    "client_job_id": _text(lambda job: job.client_job_id),
    "request_id": _text(lambda job: job.request_id),
    "artifact_ids": lambda job: " ".join(artifact.artifact_id for artifact in job.artifacts),
    "artifact_bytes": lambda job: str(sum(artifact.size_bytes for artifact in job.artifacts)),
    "error_code": _failure(lambda failure: failure.code.value),
    "error_reason": _failure(lambda failure: failure.reason),
    "error_message": _failure(lambda failure: failure.message),
}
"""What a row of CSV says, by the name of its column. Times are of RFC 3339; sizes are those of one output in pixels."""

FORMATS: Mapping[str, Callable[[BinaryIO], Write]] = {"jsonl": _jsonl, "csv": _csv}
