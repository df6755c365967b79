"""The command: one frame, or one frame after the other until q or Ctrl-C."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.client import Client
from omni_grpc.types.output_files import write_file
from omni_grpc.v1.admin_pb2 import ServerStats
from omni_grpc.v1.job_pb2 import Job

UNFINISHED = ("QUEUED", "RUNNING", "PREEMPTED")
MOST = 200
"""Jobs that are asked for: more than a screen has lines."""
SVG_COLUMNS = 150
CHROME = 14
"""Lines of a screen that are not jobs, beside those of models and replicas."""


def add(commands: Any) -> None:
    """Adds `top`."""
    parser = commands.add_parser("top", help="show what a server does, live: models, replicas, jobs")
    parser.set_defaults(run=_top)
    connect.add_server(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between frames (default: 1)")
    parser.add_argument(
        "--once", action="store_true", help="print one frame as plain lines, as without a terminal, and end"
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write one frame to this file as a picture, and end")


def _top(args: argparse.Namespace) -> int:
    with connect.connect(args) as client, contextlib.closing(client.admin.watch_stats(args.interval)) as watched:
        if args.svg is not None:
            stats = next(watched)
            write_file(args.svg, picture(stats, _jobs(client), client.address).encode())
            print(args.svg)
        elif args.once or not sys.stdout.isatty():
            _print(next(watched), client)
        else:
            _live(client, watched)
    return 0


def _print(stats: ServerStats, client: Client) -> None:
    from omni_grpc.cli.top.view import plain

    print(*plain(stats, _jobs(client)), sep="\n")


def _jobs(client: Client) -> list[Job]:
    from omni_grpc.cli.top.view import in_order

    return in_order(client.list_jobs(limit=MOST, states=UNFINISHED))


def picture(stats: ServerStats, jobs: list[Job], server: str) -> str:
    """A frame as SVG."""
    from rich._export_format import CONSOLE_SVG_FORMAT
    from rich.console import Console

    from omni_grpc.cli.top.view import frame

    console = Console(record=True, width=SVG_COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(frame(stats, jobs, server=server))
    # as it is, the template has whoever looks at the picture fetch a font from another host
    template = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    return console.export_svg(title=f"omni-grpc top --server {server}", code_format=template)


def _live(client: Client, watched: Iterator[ServerStats]) -> None:
    from rich.live import Live

    from omni_grpc.cli.top.view import frame

    with _keys() as asked_to_quit, Live(screen=True, auto_refresh=False) as live:
        for stats in watched:
            taken = CHROME + len(stats.models) + sum(len(model.replicas) for model in stats.models)
            rows = live.console.height - taken
            live.update(frame(stats, _jobs(client), server=client.address, rows=rows), refresh=True)
            if asked_to_quit():
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[], bool]]:
    """What says whether q was pressed, without waiting for it. Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield lambda: False
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)

    def pressed() -> bool:
        found = False
        while select.select([terminal], [], [], 0)[0]:
            found = b"q" in os.read(terminal, 100).lower() or found
        return found

    try:
        yield pressed
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)
