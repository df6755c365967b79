"""`omni-grpc lora load`, `list` and `unload`: LoRA adapters of a running server."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli import connect
from omni_grpc.cli.printing import as_dict, print_json, print_table
from omni_grpc.client import Client
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.lora import LORA_FORMATS
from omni_grpc.v1.model_pb2 import Lora, LoraState
from omni_grpc.wire import from_status

HEAD = ("LORA", "MODEL", "STATE", "RANK", "BYTES", "FORMAT", "TARGETS", "IN USE", "SOURCE")


def main(argv: Sequence[str]) -> int:
    """Runs one of them, and returns the exit code. Raises OmniError."""
    parser = Parser(prog="omni-grpc lora", description="LoRA adapters of a running server.")
    add(parser.add_subparsers(dest="command", required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    code: int = args.run(args)
    return code


def add(commands: Any) -> None:
    """Adds the commands."""
    load = commands.add_parser("load", help="load an adapter into a running server")
    load.set_defaults(run=_load)
    connect.add_server(load)
    load.add_argument("name", metavar="NAME", help="what requests will call it")
    source = load.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "path", nargs="?", metavar="PATH", help="file or folder of the server's machine, below its --lora-roots"
    )
    source.add_argument("--hub", metavar="ORG/NAME[@REVISION]", help="repository of the Hugging Face hub")
    source.add_argument("--asset", metavar="ASSET_ID", help="file that was uploaded before")
    load.add_argument("--file", default="", metavar="NAME", help="which file of a folder or repository")
    load.add_argument("--sha256", type=_sha256, default=b"", metavar="HEX", help="hash that the file must have")
    load.add_argument("--format", default="", choices=LORA_FORMATS, help="layout that the file must have")
    load.add_argument("--pinned", action="store_true", help="never drop it from memory to make room")
    _add_model(load)
    load.add_argument("--json", action="store_true", help="print JSON")

    listed = commands.add_parser("list", help="list the adapters of a running server")
    listed.set_defaults(run=_list)
    connect.add_server(listed)
    listed.add_argument("--model", default="", help="only those of this model")
    listed.add_argument("--json", action="store_true", help="print JSON")

    unload = commands.add_parser("unload", help="unload an adapter of a running server")
    unload.set_defaults(run=_unload)
    connect.add_server(unload)
    unload.add_argument("name", metavar="NAME")
    unload.add_argument(
        "--wait", type=float, metavar="SECONDS", help="time for jobs that use it to end (default: refuse where some do)"
    )
    unload.add_argument("--force", action="store_true", help="fail jobs that use it, after --wait")
    _add_model(unload)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="the model it is for (default: the only one)")


def _sha256(text: str) -> bytes:
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != hashlib.sha256().digest_size:
        raise argparse.ArgumentTypeError("expected 64 hexadecimal digits")
    return value


def _model(client: Client, name: str) -> str:
    if name:
        return name
    models = [model.name for model in client.list_models()]
    if len(models) == 1:
        return models[0]
    message = f"is required: this server has several models: {', '.join(models)}"
    raise InvalidArgument(f"--model {message}", reason="MODEL_REQUIRED", violations=(Violation("model", message),))


def _load(args: argparse.Namespace) -> int:
    # a relative one is one of this folder, as far as the server is on this machine
    path = "" if args.path is None else os.path.abspath(Path(args.path).expanduser())
    with connect.connect(args) as client:
        lora = client.admin.load_lora(
            args.name,
            _model(client, args.model),
            path=path,
            hub_id=args.hub or "",
            asset_id=args.asset or "",
            filename=args.file,
            sha256=args.sha256,
            format=args.format,
            pinned=args.pinned,
        )
    if args.json:
        print_json(as_dict(lora))
        return 0
    targets = ", ".join(lora.targets) or "not known before its model is loaded"
    print(f"{lora.lora_id}  {_state(lora)}, {lora.size_bytes} bytes, {lora.keys_applied} keys applied ({targets})")
    for key in lora.keys_skipped:
        print(f"skipped: {key}", file=sys.stderr)
    return 0


def _list(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        loras = client.admin.list_loras(args.model)
    if args.json:
        print_json([as_dict(lora) for lora in loras])
        return 0
    print_table(HEAD, [_row(lora) for lora in loras])
    for lora in loras:
        if lora.HasField("error"):
            print(f"{lora.lora_id}: {from_status(lora.error).message}", file=sys.stderr)
    return 0


def _row(lora: Lora) -> tuple[str, ...]:
    return (
        lora.lora_id,
        lora.model,
        _state(lora),
        str(lora.rank or "-"),
        str(lora.size_bytes),
        lora.format or "-",
        ", ".join(lora.targets) or "-",
        str(lora.in_use),
        lora.source,
    )


def _state(lora: Lora) -> str:
    return LoraState.Name(lora.state).removeprefix("LORA_STATE_")


def _unload(args: argparse.Namespace) -> int:
    with connect.connect(args) as client:
        done = client.admin.unload_lora(args.name, _model(client, args.model), wait=args.wait, force=args.force)
    failed = f"; {done.failed_jobs} jobs that used it failed" if done.failed_jobs else ""
    print(f"{args.name} is unloaded{failed}")
    return 0
