"""Bad input at size: requests of every rpc, connections, media, adapters and checkpoints, mutated from a seed.

What must hold: no answer is INTERNAL or UNKNOWN, every refusal of ours has an ErrorInfo, nothing hangs, no process
dies that is not meant to, nothing is kept, and a generation afterwards has the same bits as one before.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import secrets
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from . import fuzz_files, fuzz_media, fuzz_sockets, fuzz_wire
from .report import Result
from .server import Server, served

FLAGS = (
    *("--max-steps", "2", "--max-pixels", "4096", "--max-outputs", "2", "--max-prompt-chars", "2000"),
    *("--max-queue", "64", "--retention", "20", "--disconnect-grace", "1", "--warm-up-seconds", "0"),
    *("--max-input-bytes", "1000000", "--max-input-pixels", "1000000", "--input-timeout", "10"),
    *("--max-message-bytes", "4000000", "--asset-budget", "50000000", "--artifact-budget", "50000000"),
    *("--asset-retention", "20"),
)
"""What mutations make valid stays small."""
PARTS = ("wire", "media", "files")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Numbers:
    """`count` requests, and as many media and files; a fifth of each where several parts run."""

    count: int = 20_000
    seed: int = 0
    what: tuple[str, ...] = PARTS
    connections: int = fuzz_sockets.CONNECTIONS
    scenes: int = 30
    """Connections of each scene."""

    def of(self, part: str) -> int:
        return self.count if part == "wire" or len(self.what) == 1 else self.count // 5


Table = collections.Counter[tuple[str, str]]


def run(checkpoint: Path, numbers: Numbers | None = None) -> Result:
    numbers = numbers or Numbers()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = {"image": (checkpoint, 0.7)}
        if "wire" in numbers.what:
            checkpoints |= _others(Path(scratch))
        return measure(checkpoints, numbers)


def _others(folder: Path) -> dict[str, tuple[Path, float]]:
    """Models of other tasks, with their share of the requests: an edit takes a hundred times as long as an image."""
    from tools.tiny.images import build_flux_kontext
    from tools.tiny.videos import build_wan_ti2v

    return {"edit": (build_flux_kontext(folder / "edit"), 0.05), "video": (build_wan_ti2v(folder / "video"), 0.25)}


def measure(checkpoints: Mapping[str, tuple[Path, float]], numbers: Numbers) -> Result:
    """`checkpoints`: name -> folder, share of the requests. The first one is damaged as a file, too."""
    tables: dict[str, Table] = {}
    problems: list[str] = []
    if "wire" in numbers.what:
        tally, sockets = fuzz_wire.Tally(), Table()
        first = 0
        for index, (folder, share) in enumerate(checkpoints.values()):
            with served(folder, *FLAGS) as server:
                count = round(numbers.count * share)
                asyncio.run(fuzz_wire.fuzz(server, count, numbers.seed, tally, first=first))
                first += count
                if index == 0:
                    sockets = connections(server, numbers, tally)
                problems += [f"logged: {line}" for line in tracebacks(server.logged())]
        tables |= {"requests": tally.answers, "how": Table({(kind, ""): n for kind, n in tally.kinds.items()})}
        tables["connections"] = sockets
        problems += tally.problems
    if "media" in numbers.what:
        tables["media"], found = fuzz_media.fuzz(numbers.of("media"), numbers.seed)
        problems += found
    if "files" in numbers.what:
        folder = next(iter(checkpoints.values()))[0]
        tables["files"], found = fuzz_files.fuzz(folder, numbers.of("files"), numbers.seed)
        problems += found
    return _result(numbers, tables, problems)


def connections(server: Server, numbers: Numbers, tally: fuzz_wire.Tally) -> Table:
    """Connections by hand, and many at once while a usual request is made."""
    before = asyncio.run(fuzz_wire.settled(server))
    known, bits = asyncio.run(fuzz_wire.usual(server))
    with fuzz_sockets.crowd(server, numbers.connections):
        if asyncio.run(fuzz_wire.usual(server))[1] != bits:
            tally.problems.append(f"among {numbers.connections} connections a generation has other bits")
    outcomes = fuzz_sockets.fuzz(server, numbers.scenes, numbers.seed, known)
    outcomes["open at once", "a generation meanwhile has the same bits"] = numbers.connections
    after = asyncio.run(fuzz_wire.settled(server))
    tally.problems += [f"connections: {problem}" for problem in after.grown_since(before)]
    if asyncio.run(fuzz_wire.usual(server))[1] != bits:
        tally.problems.append("after the connections a generation has other bits")
    return outcomes


def tracebacks(log: str) -> list[str]:
    """The last lines of tracebacks: what nobody expected. gRPC prints one for metadata that are not UTF-8, which it
    then hands over as bytes.
    """
    found, inside, before = [], False, ""
    for line in log.splitlines():
        if line.startswith("Traceback"):
            inside = "cygrpc: Invalid encoding" not in before
        elif inside and not line.startswith((" ", "\t")):
            inside = False
            found.append(line[:300])
        before = line
    return found[:20]


def _result(numbers: Numbers, tables: Mapping[str, Table], problems: list[str]) -> Result:
    rows = []
    figures: dict[str, Any] = {"numbers": dataclasses.asdict(numbers)}
    for part, table in tables.items():
        grouped: dict[str, Table] = {}
        for (name, outcome), count in sorted(table.items()):
            grouped.setdefault(name, collections.Counter())[outcome] += count
        figures[part] = {name: dict(outcomes) for name, outcomes in grouped.items()}
        for name, outcomes in grouped.items():
            listed = ", ".join(f"{outcome} {count}" for outcome, count in outcomes.most_common() if outcome)
            rows.append((part, name, str(sum(outcomes.values())), listed))
    return Result(columns=("part", "what", "count", "outcomes"), rows=rows, figures=figures, problems=problems)


def fresh_seed() -> int:
    return secrets.randbelow(1 << 31)
