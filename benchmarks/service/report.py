"""What a benchmark found: a table for people, figures for the results file, and where they came from."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from omni_grpc.types.output_files import write_file


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """`rows` are the table's cells; `figures` go to the results file; `problems` are promises that were not kept.

    `variant` is a part of that file's name, for a benchmark that is run in several ways; `arguments` how this was run.
    """

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    figures: Mapping[str, Any]
    problems: Sequence[str] = ()
    variant: str = ""
    arguments: str = ""

    def table(self) -> str:
        """As Markdown."""
        lines = (self.columns, ("---",) * len(self.columns), *self.rows)
        return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


@dataclasses.dataclass
class Load:
    """What other processes did meanwhile, and what the host took: in cores, of those the machine has."""

    seconds: float = 0.0
    others: float = 0.0
    stolen: float = 0.0


@contextlib.contextmanager
def load() -> Iterator[Load]:
    """Measures the block. Every process that the block starts must have ended with it, or counts as another's."""
    result = Load()
    began, busy, stolen, own = time.monotonic(), *_machine_seconds(), _own_seconds()
    yield result
    result.seconds = time.monotonic() - began
    now_busy, now_stolen = _machine_seconds()
    result.others = max(0.0, now_busy - busy - (_own_seconds() - own)) / result.seconds
    result.stolen = (now_stolen - stolen) / result.seconds


def write(folder: Path, name: str, result: Result, meanwhile: Load, *, module: str = "") -> Path:
    """Writes the results file of a benchmark and returns its path. `module`: what was run with which arguments, where
    that is not `benchmarks.service NAME`.
    """
    content = {
        **provenance.about(f"python -m {module or f'benchmarks.service {name} {result.arguments}'}".rstrip()),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "load": dataclasses.asdict(meanwhile),
        "problems": list(result.problems),
        "figures": result.figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"cpu-service-{name}{result.variant and '-'}{result.variant}.json"
    write_file(path, (json.dumps(_rounded(content), indent=1) + "\n").encode())
    return path


def spread(values: Sequence[float], unit: str = "", digits: int = 1) -> str:
    """Median, with the least and the most."""
    least, middle, most = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({least} to {most}){unit and ' ' + unit}"


def _machine_seconds() -> tuple[float, float]:
    """CPU time of everything that ran on the machine, and time that its host gave to others."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in first[:8])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _own_seconds() -> float:
    """CPU time of this process and of those it started, as far as they have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def _rounded(value: Any) -> Any:
    """Floats with six digits: more would be noise."""
    match value:
        case float():
            return float(f"{value:.6g}")
        case Mapping():
            return {key: _rounded(item) for key, item in value.items()}
        case list() | tuple():
            return [_rounded(item) for item in value]
    return value
