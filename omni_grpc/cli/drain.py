"""`omni-grpc drain`: a server, or one replica of a model, ends what it has."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.client import Client
from omni_grpc.types.errors import DeadlineExceeded, Unavailable
from omni_grpc.v1.admin_pb2 import ServerStats

LOOK_AGAIN = 0.5
"""Seconds between two looks."""


def add(commands: Any) -> None:
    """Adds `drain`."""
    parser = commands.add_parser(
        "drain", help="let a server end its jobs and take no new ones, or start one replica anew without losing a job"
    )
    parser.set_defaults(run=_drain)
    connect.add_server(parser)
    parser.add_argument("--model", default="", help="with --replica, the model (default: the only one)")
    parser.add_argument(
        "--replica", type=int, metavar="N", help="start this replica anew, from 0 (default: the server)"
    )
    parser.add_argument(
        "--drain-timeout", type=float, metavar="SECONDS", help="what has not ended then fails (default: the server's)"
    )
    parser.add_argument("--wait", action="store_true", help="return when that is done, and not at once")
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="with --wait, give up after this time")


def _drain(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        before = _restarts(client.admin.stats(), args) if args.replica is not None else 0
        left = client.admin.drain(model=args.model, replica=args.replica, timeout=args.drain_timeout)
        print(f"{left.running} jobs run, {left.queued} wait", flush=True)
        if args.wait:
            _wait(client, args, before)
            print("done")
    return 0


def _wait(client: Client, args: argparse.Namespace, before: int) -> None:
    until = None if args.timeout is None else time.monotonic() + args.timeout
    shown = None
    while True:
        try:
            stats = client.admin.stats()
        except Unavailable as error:
            if args.replica is None and error.reason == "SERVER_UNREACHABLE":
                # it has ended what it had, and itself
                return
            raise
        if _done(stats, args, before):
            return
        if shown != (shown := (stats.running, stats.queued)):
            print(f"{stats.running} jobs run, {stats.queued} wait", file=sys.stderr)
        if until is not None and time.monotonic() > until:
            raise DeadlineExceeded("it has not ended what it had", reason="NOT_DRAINED")
        time.sleep(LOOK_AGAIN)


def _done(stats: ServerStats, args: argparse.Namespace, before: int) -> bool:
    if args.replica is None:
        return stats.draining and not stats.running and not stats.queued
    replica = next((one for one in _replicas(stats, args) if one.replica == args.replica), None)
    return replica is not None and replica.restarts > before and replica.state == "READY"


def _restarts(stats: ServerStats, args: argparse.Namespace) -> int:
    return next((one.restarts for one in _replicas(stats, args) if one.replica == args.replica), 0)


def _replicas(stats: ServerStats, args: argparse.Namespace) -> Any:
    return [one for model in stats.models if args.model in ("", model.model) for one in model.replicas]
