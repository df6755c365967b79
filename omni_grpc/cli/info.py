"""`omni-grpc info`: what a server is, and what it keeps."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from omni_grpc import wire
from omni_grpc.cli import connect
from omni_grpc.cli.printing import as_dict, print_json
from omni_grpc.types.storage_info import StorageInfo
from omni_grpc.v1.admin_pb2 import GetServerInfoResponse


def add(commands: Any) -> None:
    """Adds `info`."""
    info = commands.add_parser("info", help="show a server's version, device, and where it keeps jobs")
    info.set_defaults(run=_info)
    connect.add_server(info)
    info.add_argument("--json", action="store_true", help="print JSON, with all settings")


def _info(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        found = client.server_info()
    if args.json:
        print_json(as_dict(found))
        return 0
    rows = list(_rows(found))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}}  {value}")
    return 0


def _rows(info: GetServerInfoResponse) -> Iterator[tuple[str, str]]:
    yield "version", info.version
    yield "instance", info.instance_id
    yield "started", f"{info.start_time.ToDatetime().isoformat(' ', 'seconds')} UTC"
    yield "device", ", ".join(gpu.name for gpu in info.gpus) or info.features.get("device", "not known yet")
    yield "queue", f"at most {info.max_queue} jobs wait"
    # an older server does not say it
    kept = str(wire.from_message(StorageInfo, info.storage)) if info.HasField("storage") else "not known"
    yield "jobs", kept.removeprefix("jobs are kept ")
