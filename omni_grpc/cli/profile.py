"""`omni-grpc profile`: records what a worker does, and saves the files."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.client import Client
from omni_grpc.types.output_files import write_file
from omni_grpc.v1.admin_pb2 import ProfileEnd, ProfileFile, ProfileFileKind, StopProfileResponse

SUFFIXES: Mapping[int, str] = {
    ProfileFileKind.PROFILE_FILE_KIND_TRACE: "trace.json.gz",
    ProfileFileKind.PROFILE_FILE_KIND_OPS: "ops.txt",
    ProfileFileKind.PROFILE_FILE_KIND_MEMORY: "memory.pickle.gz",
}
PATIENCE = 120.0
"""Seconds beyond the time limit in which the files are to be there."""


def add(commands: Any) -> None:
    """Adds `profile`."""
    parser = commands.add_parser("profile", help="record the next steps of a server's worker, and save the traces")
    parser.set_defaults(run=_profile)
    connect.add_server(parser)
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument("--model", default="", help="the model (default: the only one)")
    parser.add_argument("--job", default="", metavar="JOB_ID", help="only steps of this job")
    parser.add_argument("--steps", type=int, default=10, metavar="N", help="steps to record (default: 10)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="steps to leave out before (default: 0)")
    parser.add_argument(
        "--time-limit", type=float, metavar="SECONDS", help="end after this time, whatever has come (default: 60)"
    )
    parser.add_argument("--replica", type=int, metavar="N", help="the replica, from 0 (default: one that works)")
    parser.add_argument("--all-ranks", action="store_true", help="record every rank of the model, not the first alone")
    parser.add_argument(
        "--activity", action="append", default=[], choices=("cpu", "cuda"), help="what to record (default: all)"
    )
    parser.add_argument("--memory", action="store_true", help="a snapshot of device memory too (GPU alone)")
    parser.add_argument("--stacks", action="store_true", help="with Python stacks")
    parser.add_argument("--shapes", action="store_true", help="with the shapes of operands")


def _profile(args: argparse.Namespace) -> int:
    args.out.mkdir(parents=True, exist_ok=True)
    with connect.connect(args) as client:
        begun = client.admin.start_profile(
            model=args.model,
            job_id=args.job,
            start_step=args.skip,
            num_steps=args.steps,
            activities=args.activity,
            with_stack=args.stacks,
            record_shapes=args.shapes,
            memory=args.memory,
            replica=args.replica,
            all_ranks=args.all_ranks,
            time_limit=args.time_limit,
        )
        limit = begun.time_limit.ToTimedelta().total_seconds()
        what = " and ".join(begun.activities)
        print(f"recording {args.steps} steps of {begun.model} ({what}), for {limit:g} s at most", file=sys.stderr)
        try:
            found = client.admin.stop_profile(begun.profile_id, wait=True, timeout=limit + PATIENCE)
        except KeyboardInterrupt:
            # what there is by now is worth having
            found = client.admin.stop_profile(begun.profile_id, timeout=PATIENCE)
        return _save(client, found, args.out)


def _save(client: Client, found: StopProfileResponse, folder: Path) -> int:
    end = ProfileEnd.Name(found.end).removeprefix("PROFILE_END_").replace("_", " ").lower()
    print(f"{found.steps} steps recorded; ended by: {end}", file=sys.stderr)
    if not found.files:
        print("error: no step was taken meanwhile; send a job, or give more --time-limit", file=sys.stderr)
        return 1
    for file in found.files:
        path = folder / _name(file)
        write_file(path, client.download(file.artifact_id))
        print(f"{path}  {file.size_bytes} bytes")
    return 0


def _name(file: ProfileFile) -> str:
    return f"replica{file.replica}-rank{file.rank}.{SUFFIXES[file.kind]}"
