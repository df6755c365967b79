"""Writes docs/compat.md from tests/compat/status.toml.

    python tools/compat_page.py [--write]

Without --write the page goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tests.compat.table import STATUSES, Row, counts, table

ROOT = Path(__file__).resolve().parent.parent

TITLES: Mapping[str, str] = {
    "000": "its page on diffusers pipelines",
    "001": "its guide to adding a diffusion model",
    "002": "its page on advanced features",
    "003": "an earlier guide to adding a model",
    "004": "its guide to performance",
}
HEAD = """# Coming from vLLM-Omni

This page is for users of vLLM-Omni: it lists what the vLLM-Omni documents name, and our equivalent. The Python names
and short flags are in [compat-python](compat-python.md); the hooks of its model guide are side by side with ours in
[adding-a-model](adding-a-model.md#hooks-by-their-other-names).

`works` is tested by `tests/compat` (`make test TESTS=tests/compat`). `not yet` does not exist yet, or not under that
name; the last column says what exists. `refused` will not be supported, for the reason in the last column. A row
of a table of models or of pairs says `works` only if everything that is ticked in it does. What runs on several GPUs is
tested on several processes of a CPU ([parallel](parallel.md)).
"""


def page(rows: Sequence[Row]) -> str:
    """The whole page, as Markdown."""
    lines = [HEAD, "| document | title | " + " | ".join(STATUSES) + " |", "|---|---|" + "---|" * len(STATUSES)]
    for doc, numbers in counts(rows).items():
        lines.append(f"| {doc} | {TITLES[doc]} | " + " | ".join(str(number) for number in numbers.values()) + " |")
    kinds: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        kinds[row.kind].append(row)
    for kind, members in kinds.items():
        lines += ["", f"## {kind.capitalize()}", "", "| name | in | status | here |", "|---|---|---|---|"]
        lines += [
            f"| `{_cell(row.name)}` | {', '.join(row.docs)} | {row.status} | {_cell(_ours(row))} |" for row in members
        ]
    return "\n".join(lines) + "\n"


def _ours(row: Row) -> str:
    return f"because: {row.ours}" if row.status == "refused" else row.ours


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--write", action="store_true", help="write docs/compat.md")
    text = page(table())
    if parser.parse_args().write:
        (ROOT / "docs/compat.md").write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
