"""How much load a server of the bundled model takes: latencies over rates, with and without --max-step-ms, and the
highest rate of several mixes.

    python -m benchmarks.service saturation
    python -m benchmarks.service.saturation benchmarks/results/cpu-service-saturation.json docs/images/saturation.png

The first measures and writes the record, the second draws it. Requests are sent by `omni-grpc bench serve`, from a
process of its own on the same cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.service.report import Result
from benchmarks.service.server import ROOT, Server, served
from omni_grpc.cli.bench.serve.plot import plot
from omni_grpc.cli.bench.serve.report import seconds
from omni_grpc.config import BUNDLED
from omni_grpc.config.command_line import Parser
from omni_grpc.types.output_files import write_file

PLAIN = "default settings"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`rates` of `mix`, in requests per second, each for so many `seconds`, on servers with each of these `flags`; then
    the highest rate of each of `mixes`, with runs of `search_seconds` from the rate `first` on, down to `precision`.
    """

    mix: str = "128x128:20:3,256x256:20:1"
    rates: Sequence[float] = (0.5, 1, 2, 3, 4)
    seconds: float = 15.0
    slo: str = "e2e=4s,first_event=200ms"
    flags: Mapping[str, Sequence[str]] = dataclasses.field(
        default_factory=lambda: {PLAIN: (), "--max-step-ms 60": ("--max-step-ms", "60")}
    )
    mixes: Sequence[str] = ("128x128:20", "128x128:20:3,256x256:20:1", "256x256:20")
    search_seconds: float = 10.0
    precision: float = 0.15
    first: float = 1.0
    target: float = 0.95


def run(checkpoint: Path) -> Result:
    """`checkpoint` is not used: what is served is the bundled model."""
    return measure(BUNDLED, Numbers())


def measure(checkpoint: Path, numbers: Numbers) -> Result:
    curves: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    load = ("--slo", numbers.slo, "--target", numbers.target)
    search = ("--saturate", numbers.first, "--precision", numbers.precision, "--duration", numbers.search_seconds)
    for label, flags in numbers.flags.items():
        with served(checkpoint, "--device", "cpu", *flags) as server:
            rates = ",".join(f"{rate:g}" for rate in numbers.rates)
            curves[label] = _bench(
                server, *load, "--mix", numbers.mix, "--rates", rates, "--duration", numbers.seconds
            )["points"]
            for mix in numbers.mixes if not flags else ():
                found = _bench(server, *load, "--mix", mix, *search)
                highest[mix] = {**found["saturation"], "points": [_short(point) for point in found["points"]]}
    rows = [(label, *_cells(point)) for label, points in curves.items() for point in points]
    rows += [(f"highest rate of {mix}", _rate(found), *("",) * 7) for mix, found in highest.items()]
    return Result(
        columns=("server", "offered", "done", "within SLO", "SLO", "e2e p50", "e2e p95", "e2e p99", "step gap p99"),
        rows=rows,
        figures={
            "mix": numbers.mix,
            "slo": numbers.slo,
            "seconds": numbers.seconds,
            "target": numbers.target,
            "curves": {label: [_short(point) for point in points] for label, points in curves.items()},
            "highest": highest,
        },
        problems=[
            f"{label}: {what}" for label, points in curves.items() for point in points for what in _problems(point)
        ],
    )


def draw(record: Path, picture: Path) -> None:
    """The curves of a record as PNG."""
    content = json.loads(record.read_text(encoding="utf-8"))
    title = f"bundled model, {content['figures']['mix']}, {content['machine']['cores']} CPU cores"
    write_file(picture, plot(content["figures"]["curves"], title))


def _bench(server: Server, *flags: object) -> dict[str, Any]:
    """What `omni-grpc bench serve` measured. Raises RuntimeError, with what it said, where it failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [*("bench", "serve", "--server", server.address, "--json", file), *flags]
        done = subprocess.run(
            [sys.executable, "-m", "omni_grpc", *map(str, command)], cwd=ROOT, capture_output=True, text=True
        )
        if not file.is_file():
            raise RuntimeError(f"bench serve failed:\n{done.stderr[-2000:]}")
        content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return content


def _short(point: Mapping[str, Any]) -> dict[str, Any]:
    """A point without its requests and samples, which a record has no room for."""
    return {name: value for name, value in point.items() if name not in ("requests", "samples")}


def _cells(point: Mapping[str, Any]) -> tuple[str, ...]:
    found = point["summary"]
    e2e, gap = found["latency"]["e2e"], found["step_gap"]
    return (
        f"{point['rate']:g}/s",
        f"{found['completed_per_second']:.2f}/s",
        f"{found['goodput_per_second']:.2f}/s",
        f"{100 * found['attainment']:.0f} %",
        *(seconds(e2e and e2e[q]) for q in ("p50", "p95", "p99")),
        seconds(gap and gap["p99"]),
    )


def _rate(found: Mapping[str, Any]) -> str:
    return "none" if found["rate"] is None else f"{found['rate']:.2f}/s"


def _problems(point: Mapping[str, Any]) -> list[str]:
    return [f"{point['label']}: {count} failed with {what}" for what, count in point["summary"]["errors"].items()]


def _main() -> None:
    """Draws the curves of a record."""
    parser = Parser(description=_main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("record", type=Path, help="the record of `python -m benchmarks.service saturation`")
    parser.add_argument("picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    draw(options.record, options.picture)


if __name__ == "__main__":
    _main()
