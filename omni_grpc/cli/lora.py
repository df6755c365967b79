"""`python -m omni_grpc lora`: looks at the files of LoRA adapters."""

from __future__ import annotations

import argparse
import json
import pkgutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config.command_line import Parser
from omni_grpc.types.errors import ConfigError, OmniError
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.os_errors import reason

INSPECT = "omni_grpc.loading.adapters.inspect:inspect"
"""By name, since it imports torch, which other commands do not."""

OF_SERVER: Mapping[str, str] = {
    "load": "load an adapter into a running server",
    "list": "list the adapters of a running server",
    "unload": "unload an adapter of a running server",
}
"""The commands of `cli.lora_server`."""


def lines(report: Mapping[str, Any]) -> Iterator[str]:
    """A report as text."""
    form = report["format"] or "unknown layout"
    yield f"{report['file']}: {form}, {report['keys']} keys, {report['size_bytes']} bytes"
    yield f"sha256      {report['sha256']}"
    yield f"kinds       {_counts(report['kinds'])}"
    yield f"ranks       {', '.join(map(str, report['ranks'])) or '-'}"
    yield f"alphas      {', '.join(f'{alpha:g}' for alpha in report['alphas']) or '- (the rank of each layer)'}"
    yield f"components  {_counts(report['components'])}"
    yield "layers"
    for name, layer in report["layers"].items():
        rank = f", rank {layer['rank']}" if layer["rank"] else ""
        alpha = f", alpha {layer['alpha']:g}" if layer["alpha"] is not None else ""
        yield f"  {name}: {layer['kind']}{rank}{alpha}"
        yield from (f"    {key} {tuple(shape)}" for key, shape in layer["shapes"].items())
    if report["unknown"]:
        yield "keys of no known kind"
        yield from (f"  {key}" for key in report["unknown"])
    if "model" in report:
        yield from _model_lines(report["model"])


def _model_lines(model: Mapping[str, Any]) -> Iterator[str]:
    yield f"{model['path']}: {model['pipeline']}"
    for component, applied in model["applied"].items():
        whole = applied["bytes_of_whole_weights"]
        copies = applied["bytes_of_copies"]
        cost = f", {whole} bytes of whole weights (bfloat16)" if whole else ""
        cost += f", {copies} bytes or more of merged weights (bfloat16)" if copies else ""
        yield f"  {component}: {applied['keys']} keys apply ({_counts(applied['kinds'])}){cost}"
        yield from (f"    {layer} -> {', '.join(modules)}" for layer, modules in applied["layers"].items())
    if model["skipped"]:
        yield f"  skipped: {len(model['skipped'])} keys"
        yield from (f"    {key} ({why})" for key, why in model["skipped"].items())
    yield from (f"  warning: {warning}" for warning in model["warnings"])
    if model["refused"]:
        yield "  refused, so that --lora would not start"
        yield from (f"    {why}" for why in model["refused"].values())
    yield "  it can be used" if model["works"] else "  it cannot be used"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "-"


def _parser() -> Parser:
    parser = Parser(prog="omni-grpc lora", description="Looks at the files of LoRA adapters.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, what in OF_SERVER.items():
        # they need grpc, and are run by `main` itself
        commands.add_parser(name, help=what, add_help=False)
    look = commands.add_parser("inspect", help="show what is in a file, and what a model would take of it")
    look.add_argument("file", type=Path, metavar="FILE", help="safetensors file, or a folder with one")
    look.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder of a model that is to use it")
    look.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report. The exit code is 1 where the model would not take it, 2 where there is nothing to look at."""
    args: argparse.Namespace = _parser().parse_args(argv)
    quiet_libraries()
    try:
        checkpoint = None if args.model is None else open_checkpoint(args.model)
        report = pkgutil.resolve_name(INSPECT)(args.file, checkpoint)
    except ConfigError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 1
    except OmniError as error:
        print(f"error: {error.reason}: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error.filename or args.file}: {reason(error)}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print("\n".join(lines(report)))
    return 0 if report.get("model", {}).get("works", True) else 1
