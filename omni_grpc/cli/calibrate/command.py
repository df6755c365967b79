"""The command line of `calibrate`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.serve.plot import check_plot
from omni_grpc.cli.calibrate import fit, sweep
from omni_grpc.cli.calibrate.plot import plot
from omni_grpc.config import NATIVE_CACHES
from omni_grpc.config.command_line import Parser
from omni_grpc.config.settings import settings
from omni_grpc.omni import Omni
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.json_text import read_json
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.output_files import check_writable, write_file
from omni_grpc.types.request import Draft, Task
from omni_grpc.types.step_cache import CALIBRATE, CacheDraft

PROG = "omni-grpc calibrate"
PREFERENCES = "omni_grpc.json"
"""What a checkpoint brings beside the diffusers layout: see checkpoint/overrides.py."""

PROMPTS = (
    "a red circle left of a blue square",
    "two green triangles",
    "a yellow star above a purple ring",
    "a large blue square at the top",
    "three orange hearts",
    "a small red cross at the bottom right",
    "a green circle below a yellow triangle",
    "a purple star",
)
"""Prompts for where none are given. For a model of photographs, give some of your own."""

EPILOG = (
    "Every setting of the server is a flag here too (`python -m omni_grpc.serve --help`): --model, --device, --dtype "
    "and so on. `--cache-config @FILE` takes what --out writes."
)


def _parser() -> Parser:
    parser = Parser(
        prog=PROG,
        description="Measures a native text-to-image model for its step caches: TeaCache's polynomial, MagCache's "
        "ratios, and which settings --cache-quality stands for.",
        epilog=EPILOG,
        others=True,
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="prompts, one a line (default: eight of shapes)")
    parser.add_argument("--steps", type=int, help="number of denoising steps (default: the model's)")
    parser.add_argument("--width", type=int, help="in pixels (default: the model's)")
    parser.add_argument("--height", type=int, help="in pixels (default: the model's)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the first prompt; the next one has the next")
    parser.add_argument(
        "--methods", default=",".join(NATIVE_CACHES), help="methods to try (default: all), separated by commas"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures to this file, as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw blocks against PSNR as PNG (extra: plot)")
    parser.add_argument(
        "--write", action="store_true", help=f"write what was found into {PREFERENCES} beside the checkpoint"
    )
    return parser


def main(argv: Sequence[str]) -> int:
    """Measures and returns the exit code. Raises the OmniError that ended it."""
    parser = _parser()
    args, flags = parser.parse_known_args(argv)
    config = settings([*flags, "--cache-backend", CALIBRATE], os.environ, prog=PROG, description="", also=parser.flags)
    methods = args.methods.split(",")
    if unknown := sorted(set(methods) - set(NATIVE_CACHES)):
        parser.error(f"--methods: {', '.join(unknown)} is unknown; choose from {', '.join(NATIVE_CACHES)}")
    for path in filter(None, (args.out, args.plot)):
        check_writable(path)
    if args.plot is not None:
        check_plot()
    quiet_libraries()
    prompts = PROMPTS if args.prompts is None else _prompts(args.prompts)
    with Omni.of(config, alone=True) as omni:
        checkpoint = omni.checkpoint
        if Task.TEXT_TO_IMAGE not in checkpoint.tasks:
            message = f"{checkpoint.name} makes no images from text, which is what is measured"
            raise InvalidArgument(message, reason="TASK_NOT_SUPPORTED")
        drafts = [
            Draft(
                model=checkpoint.name,
                prompt=prompt,
                steps=args.steps,
                width=args.width,
                height=args.height,
                seeds=(args.seed + number,),
            )
            for number, prompt in enumerate(prompts)
        ]
        report = _measure(omni, drafts, methods)
    report = {"model": checkpoint.name, "prompts": list(prompts), "seed": args.seed, **report}
    if args.out is not None:
        write_file(args.out, (json.dumps(report, indent=2) + "\n").encode())
    if args.plot is not None:
        write_file(args.plot, plot(report["curve"], f"{report['model']}, {report['steps']} steps"))
    if args.write:
        _write(checkpoint.path, report["step_cache"])
    return 0


def _measure(omni: Omni, drafts: Sequence[Draft], methods: Sequence[str]) -> dict[str, Any]:
    """All figures, which are printed as they come."""
    base = sweep.draw(omni, drafts, None)
    observed = base.observed
    tea, mag = fit.better(observed), fit.curve(observed)
    print(f"TeaCache: by {tea.signal}, R^2 {tea.explained:.2f}, coefficients {_numbers(tea.coefficients)}")
    if tea.explained < 0.5 or tea.lowest < 0:
        print("  the fit is poor: prefer another method", file=sys.stderr)
    print(f"MagCache: ratios {_numbers(mag.ratios)}; largest spread {max(mag.spread):.3f}")
    known: dict[str, dict[str, Any]] = {
        "tea_cache": {"signal": tea.signal, "coefficients": list(tea.coefficients)},
        "mag_cache": {"ratios": list(mag.ratios)},
    }
    points = []
    print(f"{'method':<12}{'fewer blocks':>13}{'PSNR':>9}{'5th':>7}  setting")
    for method, given in sweep.settings(methods):
        draft = CacheDraft(method=method, given={**known.get(method, {}), **given})
        found = sweep.point(method, given, base, sweep.draw(omni, drafts, draft))
        points.append(found)
        shown = ", ".join(f"{name} {value}" for name, value in given.items())
        print(f"{method:<12}{found.fewer:>12.2f}x{found.psnr_median:>9.1f}{found.psnr_5th:>7.1f}  {shown}", flush=True)
    chosen = sweep.choose(points)
    for quality, floor in sweep.FLOORS.items():
        best = chosen.get(quality)
        told = (
            "no setting"
            if best is None
            else f"{best.method}, {best.fewer:.2f}x, {best.psnr_median:.1f} dB, {best.psnr_5th:.1f} dB"
        )
        print(f"{quality.lower()} (at least {floor.median:g} dB, 5th percentile {floor.worst:g} dB): {told}")
    for method in methods:
        if (best := sweep.own(points, method)) is not None:
            known[method] = {**known.get(method, {}), **best.given}
    qualities = {quality.lower(): {best.method: dict(best.given)} for quality, best in chosen.items()}
    return {
        "steps": len(mag.ratios),
        "tea_cache": dataclasses.asdict(tea),
        "mag_cache": dataclasses.asdict(mag),
        "curve": [dataclasses.asdict(each) for each in points],
        "frontier": [dataclasses.asdict(each) for each in sweep.frontier(points)],
        "step_cache": {**known, **qualities},
    }


def _prompts(path: Path) -> tuple[str, ...]:
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    if not any(lines):
        raise InvalidArgument(f"--prompts {path}: there is no prompt in it", reason="NO_PROMPTS")
    return tuple(line for line in lines if line)


def _write(folder: Path, found: Mapping[str, Any]) -> None:
    path = folder / PREFERENCES
    before = read_json(path.read_text(encoding="utf-8")) if path.is_file() else {}
    write_file(path, (json.dumps({**before, "step_cache": found}, indent=2) + "\n").encode())
    print(f"written to {path}")


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.4g}" for value in values)
