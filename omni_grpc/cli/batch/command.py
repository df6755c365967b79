"""The command `batch`: its arguments, and what it prints."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.cli import connect, destination
from omni_grpc.cli.batch import limits
from omni_grpc.cli.batch.lines import BatchLine, prompts_as_json, read_lines
from omni_grpc.cli.batch.results import NAME, Results
from omni_grpc.cli.batch.runner import BatchRunner, Making
from omni_grpc.cli.requests import chosen_model, option_pair
from omni_grpc.client import MediaResult
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.output_files import check_writable

CONCURRENCY = 4
"""Requests at a time, by default: enough for a server to batch."""
DESCRIPTION = f"""Make a file of requests on a server, one JSON object a line, for example
  {{"prompt": "a red circle", "seed": 7, "width": 512}}
with the options of a request by name ("kind": image, edit, video or audio). Every line is checked
before any work. Run again after an interrupt, it goes on where it stopped: DIR/{NAME} has what
was made, and a line without a seed gets one that is the same at every run."""


def add(commands: Any) -> None:
    """Adds the command to the subparsers of a command line."""
    parser = commands.add_parser(
        "batch",
        help="make a file of requests, one a line; run again, it goes on where it stopped",
        description=DESCRIPTION,
    )
    parser.set_defaults(run=_run, parser=parser)
    parser.add_argument("file", metavar="FILE", help="JSON lines, plain prompts if it ends in .txt, or - for stdin")
    destination.add_folder(parser, required=True)
    connect.add_server(parser)
    parser.add_argument("--model", help="model of the server (default: its only one)")
    parser.add_argument("--text", action="store_true", help="every line is a prompt, whatever the name of FILE")
    parser.add_argument(
        "--set",
        action="append",
        type=option_pair,
        metavar="NAME=VALUE",
        help="an option for the lines that do not say it themselves, as JSON or text, such as steps=20; repeatable",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        default=CONCURRENCY,
        metavar="N",
        help=f"requests at a time (default: {CONCURRENCY})",
    )
    parser.add_argument("--timeout", type=float, metavar="S", help="give up a line after this many seconds")
    destination.add_metadata(parser)
    parser.add_argument("--json", action="store_true", help=f"print the lines of {NAME} as they are written")
    parser.add_argument("--quiet", action="store_true", help="do not show progress")


def _run(args: argparse.Namespace) -> int:
    if args.concurrency < 1:
        args.parser.error(f"--concurrency is {args.concurrency}, expected 1 or more")
    where = "stdin" if args.file == "-" else args.file
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        message = f"{where} is not text in UTF-8: {error.reason} at byte {error.start}"
        raise ConfigError(message, reason="BATCH_INVALID", violations=(Violation(where, message),)) from error
    if args.text or args.file.endswith(".txt"):
        text = prompts_as_json(text)
    with connect.connect(args) as client:
        model = chosen_model(client.list_models(), args.model)
        lines = read_lines(text, where, model.name, dict(args.set or ()), lambda *line: limits.faults(model, *line))
        folder = destination.made_folder(args)
        check_writable(folder / "probe")
        with Results(folder) as results:
            results.begin(lines)
            todo = [line for line in lines if not results.done(line)]
            with _Told(args, len(lines), len(lines) - len(todo), folder).shown() as told:
                job = Making(
                    model=model.name,
                    server=destination.asked_server(client) if args.metadata and todo else "",
                    metadata=args.metadata,
                    timeout=args.timeout,
                    tell=destination.tell,
                )
                BatchRunner(client, results, job, told.ended).run(todo, args.concurrency)
    told.summary(results.path)
    return 1 if told.failed else 0


class _Told:
    """What the user sees: a line on stdout for each line that ended, a bar or lines of progress on stderr."""

    def __init__(self, args: argparse.Namespace, total: int, before: int, folder: Path) -> None:
        self._args, self._total, self._before, self._folder = args, total, before, folder
        self.made, self.failed = 0, 0
        self._bar: Any = None

    @contextlib.contextmanager
    def shown(self) -> Iterator[_Told]:
        if self._args.quiet or not sys.stderr.isatty():
            if self._before and not self._args.quiet:
                print(f"{self._before} of {self._total} lines were made before", file=sys.stderr)
            yield self
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("lines"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"))
        # what goes to a file or a pipe must not be taken for what goes to the terminal
        with Progress(
            *columns,
            TimeRemainingColumn(),
            console=Console(file=sys.stderr),
            redirect_stdout=sys.stdout.isatty(),
        ) as bar:
            task = bar.add_task("", total=self._total, completed=self._before, note="")
            self._bar = lambda: bar.update(task, completed=self._ended, note=f"{self.failed} failed")
            yield self

    @property
    def _ended(self) -> int:
        return self._before + self.made + self.failed

    def ended(self, line: BatchLine, record: Mapping[str, Any], made: MediaResult | None) -> None:
        if made is None:
            self.failed += 1
            error = record["error"]
            named = " ".join(dict.fromkeys((error["code"], error["reason"])))
            print(f"line {line.number}: error: {named}: {' '.join(error['message'].split())}", file=sys.stderr)
        else:
            self.made += 1
        if self._args.json:
            print(json.dumps(record), flush=True)
        elif made is not None:
            for name, artifact in zip(record["files"], made.artifacts, strict=True):
                print(self._folder / name, f"line {line.number}", f"seed {artifact.seed}", sep="  ", flush=True)
        if self._bar is not None:
            self._bar()
        elif not self._args.quiet and self._ended * 10 // self._total > (self._ended - 1) * 10 // self._total:
            print(f"{self._ended} of {self._total} lines, {self.failed} failed", file=sys.stderr)

    def summary(self, results: Path) -> None:
        if self._args.quiet and not self.failed:
            return
        before = f", {self._before} made before" if self._before else ""
        again = "; run the same command again to try those that failed" if self.failed else ""
        print(f"{self.made} made{before}, {self.failed} failed: {results}{again}", file=sys.stderr)
