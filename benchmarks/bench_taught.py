"""How well adapters teach the bundled model words that it does not know, by the ruler of `bench prompt-accuracy`.

    python -m benchmarks.bench_taught [--captions 200] [--json FILE] [--base none --base int8 ...]

Held-out captions with the new shape, with the new colour, with both, and with neither are drawn from the same seeds
without adapters, with one, and with both at once; on the model as it is, quantized to INT8 and to FP8 as it is loaded,
and with both adapters merged into a checkpoint. All requests of a base share its batches, whichever adapters they have.
The adapters are those of tools/train_demo/lora.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.cli.bench import accuracy
from omni_grpc.cli.bench.accuracy import ALL, Caption, PictureSettings
from omni_grpc.config import BUNDLED
from omni_grpc.config.command_line import Parser
from omni_grpc.config.settings import settings
from omni_grpc.loading.adapters.merge import Fold, merge
from omni_grpc.scenes.captions import say
from omni_grpc.scenes.judge import Verdict
from omni_grpc.scenes.shapes import EVERY
from omni_grpc.scenes.wish import Wish, draw_new, draw_wish
from omni_grpc.types.library_logs import quiet_libraries

SHAPE, COLOUR = "arrow", "brown"
FOLDER = Path(__file__).resolve().parents[1] / "examples" / "lora"
FILES = {word: FOLDER / f"{word}.safetensors" for word in (SHAPE, COLOUR)}

SETS = (SHAPE, COLOUR, "both", "neither")
"""New words that captions have."""

NONE, ONE, OTHER, TWO = {}, {SHAPE: 1.0}, {COLOUR: 1.0}, {SHAPE: 1.0, COLOUR: 1.0}
TEACHING: Sequence[tuple[str, Mapping[str, float]]] = (
    *((name, NONE) for name in SETS),
    (SHAPE, ONE), (COLOUR, OTHER), ("neither", ONE), ("neither", OTHER),
    *((name, TWO) for name in SETS),
)  # fmt: skip
"""Captions, and the adapters that they are drawn with."""

EVERY_BUT_SHAPE = dataclasses.replace(EVERY, shapes=tuple(shape for shape in EVERY.shapes if shape != SHAPE))
"""Words beside the new shape where a caption may have both."""

BASES: Mapping[str, str] = {"none": "", "int8": "--quantization int8", "fp8": "--quantization fp8"}
MERGED = "merged"


def captions(words: str, count: int, seed: int) -> list[Caption]:
    """Held-out captions with these new words. The same arguments give the same ones."""
    rng = random.Random(f"{words}/{seed}")
    chosen: list[Caption] = []
    while len(chosen) < count:
        if (wish := _wish(words, rng)).held_out:
            chosen.append(Caption(wish, say(wish, rng), seed + len(chosen)))
    return chosen


def _wish(words: str, rng: random.Random) -> Wish:
    if words == "neither":
        return draw_wish(rng)
    if words in (SHAPE, COLOUR):
        return draw_new(words, rng)
    while True:
        wish = draw_new(SHAPE, rng, EVERY_BUT_SHAPE)
        if any(noun.colour == COLOUR for noun in wish.nouns):
            return wish


def measure(base: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each set of captions and adapters, on one base. A merged checkpoint has its adapters in it."""
    teaching = [(name, loras) for name, loras in TEACHING if base == "none" or loras == TWO]
    flags = ["--max-num-seqs", str(args.max_num_seqs), *BASES.get(base, "").split()]
    if base == MERGED:
        folds = [Fold(path=file) for file in FILES.values()]
        merge(open_checkpoint(Path(BUNDLED)), folds, folder / MERGED)
        flags += ["--model", str(folder / MERGED)]
    else:
        flags += [part for word, file in FILES.items() for part in ("--lora", f"{word}={file}")]
    chosen = [
        dataclasses.replace(caption, loras={} if base == MERGED else loras)
        for name, loras in teaching
        for caption in captions(name, args.captions, args.seed)
    ]
    config = settings(flags, {}, prog="bench_taught", description="")
    print(f"{base}: {len(chosen)} pictures", file=sys.stderr, flush=True)
    made = accuracy.render(config, chosen, PictureSettings(), _told)
    found = accuracy.verdicts(chosen, made.pictures, EVERY)
    rows = []
    for place, (name, loras) in enumerate(teaching):
        mine = slice(place * args.captions, (place + 1) * args.captions)
        rows.append(
            _row(base, name, loras, chosen[mine], found[mine]) | {"right_of_each": [v.right for v in found[mine]]}
        )
    return rows


def _row(
    base: str, name: str, loras: Mapping[str, float], chosen: Sequence[Caption], found: Sequence[Verdict]
) -> dict[str, Any]:
    return {"base": base, "words": name, "adapters": list(loras), "accuracy": accuracy.by_kind(chosen, found)}


def _told(count: int) -> None:
    if count % 100 == 0:
        print(f"{count} pictures", file=sys.stderr, flush=True)


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Adds to each row how it differs from the same captions without adapters, and from both adapters on the model as
    it is; takes away what it needs for that.
    """
    by_key = {(row["base"], row["words"], tuple(row["adapters"])): row["right_of_each"] for row in rows}
    for row in rows:
        for name, key in {
            "against_no_adapter": ("none", row["words"], ()),
            "against_both_on_the_model": ("none", row["words"], tuple(TWO)),
        }.items():
            if key in by_key and by_key[key] is not row["right_of_each"]:
                mean, interval = accuracy.figures.difference(by_key[key], row["right_of_each"])
                row[name] = {"difference": mean, "interval": interval}
    for row in rows:
        del row["right_of_each"]


def lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The table of docs/lora.md."""
    made = ["| base | new words in captions | adapters | correct | 95 % interval |", "|---|---|---|---|---|"]
    for row in rows:
        found = row["accuracy"][ALL]
        low, high = found["interval"]
        adapters = " and ".join(row["adapters"]) or "none"
        made.append(
            f"| {row['base']} | {row['words']} | {adapters} | {found['accuracy']:.1%} | {low:.1%} to {high:.1%} |"
        )
    return made


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--captions", type=int, default=200, metavar="N", help="of each set")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--base", action="append", choices=(*BASES, MERGED), help="repeatable (default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    args = parser.parse_args()
    quiet_libraries()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for base in args.base or (*BASES, MERGED):
            rows += measure(base, args, Path(folder))
    compare(rows)
    print(*lines(rows), sep="\n")
    if args.json is not None:
        record = provenance.about("benchmarks/bench_taught.py") | {"captions": args.captions, "seed": args.seed}
        args.json.write_text(json.dumps(record | {"rows": rows}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
