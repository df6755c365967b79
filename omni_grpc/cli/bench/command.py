"""`python -m omni_grpc bench`: the command line of the measurements."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench import accuracy, compare
from omni_grpc.cli.bench.accuracy import Caption, PictureSettings, Rendering
from omni_grpc.cli.bench.serve import command as load
from omni_grpc.config import EngineConfig
from omni_grpc.config.command_line import Parser
from omni_grpc.config.settings import settings
from omni_grpc.types.errors import OmniError
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.results import Effective

PROG = "omni-grpc bench prompt-accuracy"
EPILOG = (
    "Every setting of the server is a flag here too (`python -m omni_grpc.serve --help`): --model, --device, "
    "--max-num-seqs and so on. Intervals are 95 % intervals: Wilson's for a share, Agresti and Min's for the "
    "difference of shares of the same captions."
)


def main(argv: Sequence[str]) -> int:
    """Runs one measurement and returns the exit code. Raises the OmniError that ended it."""
    parser = Parser(
        prog="omni-grpc bench", description="Measures the outputs of a model, and servers under load.", others=True
    )
    commands = parser.add_subparsers(title="measurements", required=True, metavar="NAME")
    load.add(commands)
    compare.add(commands)
    measurement = commands.add_parser(
        "prompt-accuracy",
        help="measure whether images of shapes match their prompts",
        description="Generates images from held-out captions, and measures whether each matches its caption.",
        epilog=EPILOG,
        others=True,
    )
    _accuracy_arguments(measurement)
    measurement.set_defaults(run=lambda args, flags: _accuracy(args, flags, measurement.flags))
    args, flags = parser.parse_known_args(argv)
    code: int = args.run(args, flags)
    return code


def _accuracy_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--captions", type=_count, default=2000, metavar="N", help="number of captions (default: 2000)")
    parser.add_argument("--width", type=int, help="in pixels (default: the model's)")
    parser.add_argument("--height", type=int, help="in pixels (default: the model's)")
    parser.add_argument("--steps", type=int, help="number of denoising steps (default: the model's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the captions; caption i is drawn from seed + i")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="FLAGS",
        help="repeat the run with these flags and compare, e.g. --against '--quantization int8'; repeatable",
    )


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return count


def _accuracy(args: argparse.Namespace, flags: Sequence[str], also: Sequence[str]) -> int:
    # all of them before the first is loaded: a typing error must not end a long run
    configs = [_config([*flags, *shlex.split(more)], also) for more in ("", *args.against)]
    chosen = accuracy.captions(args.captions, args.seed)
    shape = PictureSettings(width=args.width, height=args.height, steps=args.steps)
    quiet_libraries()
    if args.json is not None:
        check_writable(args.json)
    base, report = None, {"captions": args.captions, "seed": args.seed, "flags": shlex.join(flags), "runs": []}
    for config, more in zip(configs, ["", *args.against], strict=True):
        made = _render(config, chosen, shape, more)
        found = accuracy.verdicts(chosen, made.pictures)
        run: dict[str, Any] = {"flags": more, "model": made.model, **_settings(made.effective)}
        run |= {"seconds_per_image": made.seconds / len(chosen), "latency_median": made.latency}
        run["blocks_run"] = made.blocks_run
        run["accuracy"] = accuracy.by_kind(chosen, found)
        if base is None:
            base = made, found
        else:
            run["against"] = accuracy.compared(base[1], found) | accuracy.likeness(base[0].pictures, made.pictures)
        report["runs"].append(run)
        print(*_table(run), sep="\n", flush=True)
    if args.json is not None:
        _save(args.json, json.dumps(report, indent=2) + "\n")
    return 0


def _save(path: Path, text: str) -> None:
    """Writes the figures; on stdout where that fails, since the runs took long."""
    try:
        write_file(path, text.encode())
    except OmniError as error:
        print(text)
        error.add_note("the figures are on stdout instead")
        raise


def _settings(effective: Effective) -> dict[str, Any]:
    return {
        "width": effective.width,
        "height": effective.height,
        "steps": effective.steps,
        "true_cfg_scale": effective.guidance.true_cfg_scale,
        "scheduler": effective.scheduler,
        "cache": None if effective.cache is None else dataclasses.asdict(effective.cache),
        "quantized_layers": dict(effective.quantized_layers),
        "kept_layers": effective.kept_layers,
        "batch_invariant": effective.batch_invariant,
    }


def _config(flags: Sequence[str], also: Sequence[str]) -> EngineConfig:
    return settings(flags, os.environ, prog=PROG, description="", also=also)


def _render(config: EngineConfig, chosen: Sequence[Caption], shape: PictureSettings, flags: str) -> Rendering:
    shares = max(1, len(chosen) // 10)

    def told(count: int) -> None:
        if count % shares == 0:
            print(f"{count} of {len(chosen)} captions", file=sys.stderr, flush=True)

    print(f"drawing {len(chosen)} captions with {config.model.model} {flags}".rstrip(), file=sys.stderr, flush=True)
    return accuracy.render(config, chosen, shape, told)


def _table(run: Mapping[str, Any]) -> list[str]:
    lines = [f"\n{run['model']} {run['flags']}".rstrip()]
    lines.append(
        f"{run['width']} x {run['height']}, {run['steps']} steps, true_cfg_scale {run['true_cfg_scale']:g}: "
        f"{run['seconds_per_image']:.4f} s per image, {run['latency_median']:.3f} s median latency"
    )
    if run["cache"] is not None:
        lines.append(f"{run['blocks_run']:.1%} of the blocks ran: {1 / run['blocks_run']:.2f}x fewer")
    lines.append(f"{'captions':<10}{'number':>8}{'correct':>9}{'95 % interval':>20}{'background':>12}")
    for kind, figures in run["accuracy"].items():
        low, high = figures["interval"]
        ground = "-" if figures["background"] is None else f"{figures['background']:.1%}"
        lines.append(
            f"{kind:<10}{figures['captions']:>8}{figures['accuracy']:>9.1%}{f'{low:.1%} to {high:.1%}':>20}{ground:>12}"
        )
    if (pair := run.get("against")) is not None:
        low, high = pair["interval"]
        lines.append(f"compared with the first run: {pair['difference']:+.2%} correct ({low:+.2%} to {high:+.2%})")
        lines.append(
            f"PSNR {pair['psnr_median']:.1f} dB (median), {pair['psnr_5th']:.1f} dB (5th percentile); "
            f"SSIM {pair['ssim_mean']:.4f} (mean); {pair['same']} images are identical bit for bit"
        )
    return lines
