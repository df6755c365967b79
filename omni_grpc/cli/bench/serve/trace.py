"""A trace: when requests came once, and which, in CSV or JSON lines."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omni_grpc.cli.bench.serve.mix import MixClass, name_of
from omni_grpc.cli.requests import option_pair
from omni_grpc.config.command_line import meant
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.request_options import ALL, IMAGE, options_of

_OWN = ("time", "class", "kind", "prompt")


@dataclasses.dataclass(frozen=True, slots=True)
class Trace:
    """`times` in seconds from the first request, in order; `names`: the class of each; `classes`: those that it brings
    along, beside those of the mix.
    """

    times: Sequence[float]
    names: Sequence[str]
    classes: Sequence[MixClass]


def read_trace(path: Path, mix: Sequence[MixClass], speed: float) -> Trace:
    """Each line has a `time` in seconds, and a `class` of the mix, or options of a request (`kind`, `prompt`, `width`,
    ...), or neither: then it is of the first class of the mix. `speed`: how much faster than it was. Raises
    ConfigError that names the line and the field that is wrong.
    """
    classes: dict[str, MixClass] = {}
    known, found = {klass.name: klass for klass in mix}, []
    for number, row in _rows(path):
        where = f"{path}: line {number}"
        time = row.get("time")
        if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
            raise _refused(f"{where}: time", f"is {time!r}, expected seconds from 0")
        found.append((float(time), _name(where, row, known, classes, mix)))
    if not found:
        raise _refused(str(path), "has no requests")
    found.sort(key=lambda it: it[0])
    first = found[0][0]
    return Trace([(time - first) / speed for time, _ in found], [name for _, name in found], list(classes.values()))


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise _refused(str(path), f"is not text in UTF-8: {error.reason} at byte {error.start}") from error
    if path.suffix == ".csv":
        for number, row in enumerate(csv.DictReader(text.splitlines()), start=2):
            if None in row:
                raise _refused(f"{path}: line {number}", "has more columns than the first line")
            # as in NAME=VALUE on the command line: a number where it is one
            yield number, dict(option_pair(f"{name}={value}") for name, value in row.items() if value)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            content = read_json(line)
        except ValueError as error:
            raise _refused(f"{path}: line {number}", f"is not JSON ({error}); a table needs the suffix .csv") from error
        if not isinstance(content, dict):
            raise _refused(f"{path}: line {number}", f"is {line.strip()[:40]}, expected a JSON object")
        yield number, content


def _name(
    where: str,
    row: Mapping[str, Any],
    known: Mapping[str, MixClass],
    classes: dict[str, MixClass],
    mix: Sequence[MixClass],
) -> str:
    """The class of a line, which is added to `classes`, by kind and options, where it is a new one."""
    options = {name: value for name, value in row.items() if name not in _OWN}
    if (name := row.get("class")) is not None:
        if str(name) not in known:
            raise _refused(f"{where}: class", f"is {name!r}, which is not in the mix{meant(str(name), known)}")
        if options or "prompt" in row:
            raise _refused(where, "has a class and options; give one of them")
        return str(name)
    if not options and "prompt" not in row and "kind" not in row:
        return mix[0].name
    kind = row.get("kind", IMAGE)
    if kind not in ALL:
        raise _refused(f"{where}: kind", f"is {kind!r}, expected one of {', '.join(ALL)}")
    names = [option.name for option in options_of(kind)]
    for name in options:
        if name not in names:
            raise _refused(f"{where}: {name}", f"is no option of {kind}{meant(name, (*names, *_OWN))}")
    # lines with the same options are one class, whose prompts follow each other
    key = json.dumps([kind, options], sort_keys=True)
    prompts = (str(row["prompt"]),) if "prompt" in row else ()
    if key in classes:
        classes[key] = dataclasses.replace(classes[key], prompts=(*classes[key].prompts, *prompts))
        return classes[key].name
    taken = {made.name for made in classes.values()} | known.keys()
    name = base = name_of(options)
    while name in taken:
        name = f"{base} ({len(classes) + 1})"
    classes[key] = MixClass(name=name, kind=kind, prompts=prompts, options=options)
    return name


def _refused(field: str, why: str) -> ConfigError:
    return ConfigError(f"{field} {why}", violations=(Violation(field, why),))
