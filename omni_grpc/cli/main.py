"""`omni-grpc` and `python -m omni_grpc`: generate images, video and sound, manage jobs, start a server.

Exit codes: 0 done, 1 an error (one line on stderr), 2 a wrong command line or setting, 128 and its number for a signal:
130 Ctrl-C, 143 SIGTERM, 129 SIGHUP. Results go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from omni_grpc.cli import (
    alone,
    calibrate,
    connect,
    drain,
    export,
    health,
    info,
    jobs,
    like,
    listing,
    lora_server,
    profile,
    serve,
    signals,
)
from omni_grpc.cli import generate as making
from omni_grpc.cli.batch import command as batch
from omni_grpc.cli.bench import command as bench
from omni_grpc.cli.printing import as_dict, print_json, print_table
from omni_grpc.cli.top import command as top
from omni_grpc.client import LoadEvent, ModelReady
from omni_grpc.client.channel import Deadline
from omni_grpc.client.messages import state_name
from omni_grpc.client.progress import describe
from omni_grpc.config.command_line import USAGE_ERROR
from omni_grpc.config.flags import SettingsParser
from omni_grpc.types.errors import ConfigError, OmniError, Unavailable
from omni_grpc.types.os_errors import plain
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.version import __version__
from omni_grpc.v1.model_pb2 import Model, ModelState
from omni_grpc.v1.sampling_pb2 import Task
from omni_grpc.wire import read_event

LOOK_AGAIN = 0.5
"""Seconds between two looks for a server that does not listen yet."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["serve"]:
        return int(serve.main(arguments[1:]))
    return signals.run(lambda: _run(arguments))


def _run(arguments: list[str]) -> int:
    command = arguments[0] if arguments else ""
    if alone.is_alone(arguments):
        return alone.run(command, arguments[1:])
    try:
        if command == "lora":
            return lora_server.main(arguments[1:])
        if command == "bench":
            return bench.main(arguments[1:])
        if command == "calibrate":
            return calibrate.main(arguments[1:])
        if command == "jobs" and arguments[1:2] and not arguments[1].startswith("-"):
            return export.main(arguments[1:])
        args = _parser().parse_args(arguments)
        code: int = args.run(args)
    except OmniError as error:
        _complain(error)
        return USAGE_ERROR if isinstance(error, ConfigError) else 1
    except BrokenPipeError:
        # whoever reads stdout has had enough: what is still buffered goes nowhere, and not to an error at the end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except OSError as error:
        print(f"error: {plain(error)}", file=sys.stderr)
        return 1
    return code


# --- jobs and models --------------------------------------------------------------------------------------------------


def _models(args: argparse.Namespace) -> int:
    if args.server is None:
        connect.refuse_without_server(args)
        return _native_models(args)
    with connect.connect(args) as client:
        models = client.list_models()
    if args.json:
        print_json([as_dict(model) for model in models])
        return 0
    print_table(("MODEL", "STATE", "FAMILY", "TASKS", "SIZE", "STEPS"), [_model_row(model) for model in models])
    return 0


def _native_models(args: argparse.Namespace) -> int:
    records = listing.native_models(features=args.features)
    if args.json:
        print_json(records)
        return 0
    head, *rows = listing.features_table(records) if args.features else listing.models_table(records)
    print_table(head, rows)
    return 0


def _model_row(model: Model) -> tuple[str, ...]:
    return (
        model.name,
        ModelState.Name(model.state).removeprefix("MODEL_STATE_"),
        model.family,
        ", ".join(Task.Name(task).removeprefix("TASK_") for task in model.tasks),
        # a model that is still on its way has not said what it takes
        f"{model.limits.default_width} x {model.limits.default_height}" if model.HasField("limits") else "-",
        str(model.defaults.steps) if model.HasField("defaults") else "-",
    )


def _watch(args: argparse.Namespace) -> int:
    with connect.connect(args) as client, client.watch_job(args.job_id, args.after_seq) as stream:
        for message in stream:
            event = read_event(message)
            if args.json:
                print(json.dumps(as_dict(message)), flush=True)
            else:
                line = message.WhichOneof("event") if event is None else describe(event)
                print(f"{message.seq:>5}  {line}", flush=True)
        if stream.error is not None:
            raise stream.error
    return 0


def _cancel(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        job = client.cancel_job(args.job_id, args.reason)
    print(f"{job.job_id}  {state_name(job.state)}")
    return 0


def _download(args: argparse.Namespace) -> int:
    check_writable(args.out)
    with connect.connect(args) as client:
        data = client.download(args.artifact_id)
    try:
        write_file(args.out, data)
    except OmniError as error:
        error.add_note("the output is still on the server: mend that and run this command again")
        raise
    print(f"{args.out}  {len(data)} bytes")
    return 0


def _wait(args: argparse.Namespace) -> int:
    deadline, told = Deadline(args.timeout), False
    while True:
        try:
            with connect.connect(args) as client:
                _follow_loading(client.load_model(args.model or None, timeout=deadline.remaining()))
            return 0
        except Unavailable as error:
            if error.reason != "SERVER_UNREACHABLE" or deadline.within(LOOK_AGAIN) < LOOK_AGAIN:
                raise
        if not told:
            print(f"no server at {args.server} yet, waiting", file=sys.stderr)
            told = True
        time.sleep(LOOK_AGAIN)


def _follow_loading(events: Iterable[LoadEvent]) -> None:
    """A line for each phase, and for every 5 percent of its bytes."""
    shown = None
    for event in events:
        if isinstance(event, ModelReady):
            print(f"{event.model.name} is ready", flush=True)
        elif shown != (shown := (event.phase, 20 * event.done_bytes // max(1, event.total_bytes))):
            print(event, flush=True)


# --- output -----------------------------------------------------------------------------------------------------------


def _complain(error: OmniError) -> None:
    """One line with the code, the reason and what to do; below it, details that the message does not contain."""
    failure = error.failure
    # a reason that only repeats the code says nothing more
    named = " ".join(dict.fromkeys((failure.code, failure.reason)))
    lines = [f"error: {named}: {' '.join(failure.message.split())}"]
    lines += [f"  {v.field}: {v.description}" for v in failure.violations if v.description not in failure.message]
    if failure.retry_after is not None:
        lines.append(f"  retry after {failure.retry_after:g} s")
    if trace_id := failure.metadata.get("trace_id"):
        lines.append(f"  trace {trace_id}")
    lines += [f"  {note}" for note in getattr(error, "__notes__", ())]
    print(*lines, sep="\n", file=sys.stderr)


# --- the command line -------------------------------------------------------------------------------------------------


def _parser() -> SettingsParser:
    parser = SettingsParser(
        prog="omni-grpc",
        description="Serve diffusion models over gRPC, with streaming progress and continuous batching.",
    )
    parser.add_argument("--version", action="version", version=f"omni-grpc {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    making.add_commands(commands)
    batch.add(commands)
    like.add_show(commands)

    models = commands.add_parser("models", help="list the native models, or the models of a server")
    models.set_defaults(run=_models)
    asked = models.add_mutually_exclusive_group()
    asked.add_argument(
        "--server",
        type=connect.server_address,
        metavar="ADDRESS",
        help="list the models of this server (default: the native models)",
    )
    asked.add_argument("--features", action="store_true", help="list the features that each native model supports")
    models.add_argument("--json", action="store_true", help="print JSON")
    connect.add_credentials(models)

    jobs.add(commands)
    info.add(commands)
    health.add(commands)

    watch = commands.add_parser("watch", help="follow a job to its end")
    watch.set_defaults(run=_watch)
    connect.add_server(watch)
    watch.add_argument("job_id", metavar="JOB_ID")
    watch.add_argument("--after-seq", type=int, default=0, help="skip the events up to this one (default: 0)")
    watch.add_argument("--json", action="store_true", help="print one JSON object per event")

    wait = commands.add_parser("wait", help="wait until a server is up and its model is ready")
    wait.set_defaults(run=_wait)
    connect.add_server(wait)
    wait.add_argument("--model", default="", help="the model to wait for (default: the only one)")
    wait.add_argument("--timeout", type=float, metavar="SECONDS", help="give up after this time (default: never)")

    drain.add(commands)
    top.add(commands)
    profile.add(commands)

    cancel = commands.add_parser("cancel", help="cancel a job")
    cancel.set_defaults(run=_cancel)
    connect.add_server(cancel)
    cancel.add_argument("job_id", metavar="JOB_ID")
    cancel.add_argument("--reason", default="", help="reason that appears in the job's last event")

    download = commands.add_parser("download", help="download an output")
    download.set_defaults(run=_download)
    connect.add_server(download)
    download.add_argument("artifact_id", metavar="ARTIFACT_ID")
    download.add_argument("--out", type=Path, required=True, metavar="FILE", help="file to write")

    commands.add_parser(
        "doctor", help="show versions, devices and ops, or whether a model fits this machine", add_help=False
    )
    commands.add_parser("token", help="make, list and revoke the tokens of a server's callers", add_help=False)
    commands.add_parser("bench", help="send load to a server, or measure a model's prompt accuracy", add_help=False)
    commands.add_parser("calibrate", help="measure a model for its step caches", add_help=False)
    commands.add_parser("pull", help="download a checkpoint from the Hugging Face hub", add_help=False)
    commands.add_parser("convert", help="make safetensors of the pickled weights of a checkpoint", add_help=False)
    commands.add_parser(
        "lora", help="load LoRA adapters into a server, list and unload them, or look at a file", add_help=False
    )
    commands.add_parser("serve", help="start a server (same as python -m omni_grpc.serve)", add_help=False)
    return parser


if __name__ == "__main__":
    sys.exit(main())
