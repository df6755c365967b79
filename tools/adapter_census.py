"""What the adapter can do with each pipeline class of the installed diffusers, as a table in docs/adapter.md.

    python tools/adapter_census.py            print the totals
    python tools/adapter_census.py --write    put the table into docs/adapter.md
    python tools/adapter_census.py --check    exit with 1 where the table there is not current

It reads signatures and loads no weights.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import diffusers

from omni_grpc.adapter.abilities import Ability, ability
from omni_grpc.config.command_line import Parser

PAGE = Path(__file__).resolve().parent.parent / "docs" / "adapter.md"
BEGIN, END = "<!-- census: begin -->", "<!-- census: end -->"


def classes() -> Iterator[type]:
    """The pipelines that diffusers exports, also those whose own packages are missing here."""
    for name in sorted(dir(diffusers)):
        kind = getattr(diffusers, name) if name.endswith("Pipeline") else None
        if not inspect.isclass(kind) or kind is diffusers.DiffusionPipeline:
            continue
        if issubclass(kind, diffusers.DiffusionPipeline) or _missing(kind):
            yield kind


def census() -> dict[str, Ability | str]:
    """Each class by name, with what it can do, or the packages that it needs and that are missing."""
    return {kind.__name__: _missing(kind) or ability(kind) for kind in classes()}


def totals(found: dict[str, Ability | str]) -> dict[str, int]:
    """How many classes there are, can be served, do each task, and cannot be served for each reason."""
    able = [entry for entry in found.values() if isinstance(entry, Ability)]
    served = [entry for entry in able if not entry.reason]
    tasks = Counter(task.value for entry in served for task in entry.tasks)
    return {
        "classes": len(found),
        "served": len(served),
        "not served": len(able) - len(served),
        "package missing": len(found) - len(able),
        **dict(sorted(tasks.items())),
    }


def page(found: dict[str, Ability | str]) -> str:
    """The generated part of the page, in Markdown."""
    lines = [f"diffusers {diffusers.__version__}:", "", "| | classes |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in totals(found).items()]
    lines += ["", "| pipeline | tasks, or why it is not served |", "|---|---|"]
    lines += [f"| {name} | {_say(entry)} |" for name, entry in found.items()]
    return "\n".join(lines)


def written() -> str:
    """The generated part as the page has it."""
    return PAGE.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0].strip()


def _say(entry: Ability | str) -> str:
    if isinstance(entry, str):
        return f"no: {entry}"
    return f"no: {entry.reason}" if entry.reason else ", ".join(entry.tasks)


def _missing(kind: type) -> str:
    """diffusers puts a stand-in where a package is missing, which lists what it needs."""
    backends = getattr(kind, "_backends", None)
    return f"needs the packages {', '.join(backends)}" if backends else ""


def main() -> int:
    parser = Parser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the table into docs/adapter.md")
    parser.add_argument("--check", action="store_true", help="compare the table in docs/adapter.md with this one")
    args = parser.parse_args()
    found = census()
    if args.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{page(found)}\n\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    for name, count in totals(found).items():
        print(f"{count:5} {name}")
    return int(args.check and written() != page(found))


if __name__ == "__main__":
    sys.exit(main())
