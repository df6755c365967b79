"""`python -m omni_grpc lora merge|extract`: adapters into checkpoints, and out of them."""

from __future__ import annotations

import argparse
import json
import pkgutil
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.registry import open_checkpoint

MERGE = "omni_grpc.loading.adapters.merge:"
EXTRACT = "omni_grpc.loading.adapters.extract:extract"
"""By name, since they import torch, which other commands do not."""

_COMPONENT = re.compile(r"(?P<path>.+)@(?P<component>(?:transformer|unet|text_encoder)(?:_\d+)?)")


def add(commands: Any) -> None:
    """Adds both commands to the parser of `lora`."""
    merge = commands.add_parser("merge", help="write a checkpoint with adapters folded into its weights")
    merge.add_argument("model", type=Path, metavar="DIR", help="checkpoint folder of a native model")
    merge.add_argument(
        "--lora",
        action="append",
        required=True,
        type=fold,
        metavar="PATH[@COMPONENT][:SCALE]",
        help="adapter; repeatable, merged in this order",
    )
    merge.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to create")
    merge.add_argument("--link", action="store_true", help="hard-link the files that do not change instead of copying")
    merge.add_argument("--json", action="store_true", help="print JSON")
    extract = commands.add_parser("extract", help="write a LoRA with the difference of two checkpoints")
    extract.add_argument("base", type=Path, metavar="BASE", help="checkpoint folder of a native model")
    extract.add_argument("model", type=Path, metavar="TUNED", help="the same model with other weights")
    extract.add_argument("--rank", type=int, metavar="R", help="largest rank of a layer")
    extract.add_argument("--energy", type=float, metavar="SHARE", help="share of each layer's difference to keep, 0.99")
    extract.add_argument("--full", action="store_true", help="also biases, norms and tables of modulation, as they are")
    extract.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    extract.add_argument("--device", default="cpu", help="where to decompose (cpu)")
    extract.add_argument("--out", type=Path, required=True, metavar="FILE", help="safetensors file to create")
    extract.add_argument("--json", action="store_true", help="print JSON")


def fold(text: str) -> tuple[Path, float, str]:
    """PATH[@COMPONENT][:SCALE]. What follows the last colon is a scale where it is a number."""
    path, colon, last = text.rpartition(":")
    scale = 1.0
    if colon:
        try:
            scale, text = float(last), path
        except ValueError:
            if re.fullmatch(r"[\d.+-]\S*", last):
                raise argparse.ArgumentTypeError(f"{last!r} is no scale; give a number, as in {path}:0.8") from None
    found = _COMPONENT.fullmatch(text)
    if not text:
        raise argparse.ArgumentTypeError("is empty; name a file or a folder")
    return (Path(found["path"]), scale, found["component"]) if found else (Path(text), scale, "")


def run(args: argparse.Namespace) -> int:
    """Carries out what `add` added. Raises OmniError where that cannot be done."""
    if args.command == "merge":
        made, merge = (pkgutil.resolve_name(MERGE + name) for name in ("Fold", "merge"))
        folds = [made(path=path, scale=scale, component=component) for path, scale, component in args.lora]
        report = merge(open_checkpoint(args.model), folds, args.out, link=args.link)
        lines = merge_lines
    else:
        report = pkgutil.resolve_name(EXTRACT)(
            open_checkpoint(args.base),
            open_checkpoint(args.model),
            args.out,
            rank=args.rank,
            energy=args.energy,
            full=args.full,
            dtype=args.dtype,
            device=args.device,
        )
        lines = extract_lines
    print(json.dumps(report, indent=2) if args.json else "\n".join([*lines(report), str(args.out)]))
    return 0


def merge_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for one in report["merged"]:
        keys = ", ".join(f"{count} keys to {component}" for component, count in one["keys"].items())
        yield f"{one['file']} x {one['scale']:g}: {keys}"
    for component, count in report["tensors"].items():
        yield f"{component}: {count} tensors changed"
    yield from (f"warning: {text}" for text in report["warnings"])
    yield from _listed("skipped", [f"{key} ({why})" for key, why in report["skipped"].items()])
    yield from _listed("left out, since they have the old weights", report["left_out"])


def extract_lines(report: Mapping[str, Any]) -> Iterator[str]:
    for component, layers in report["components"].items():
        for name, layer in layers.items():
            yield f"{component}.{name}: rank {layer['rank']}, {layer['lost']:.4%} of the difference lost"
    yield from _listed("left out", [f"{key} ({why})" for key, why in report["left_out"].items()])
    yield f"{report['layers']} layers, {report['size_bytes']} bytes, {report['lost']:.4%} of all differences lost"


def _listed(what: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"{what}: {len(lines)}"
        yield from (f"  {line}" for line in lines)
