"""Generates the synchronous Python client from the asyncio one, or with --check says which files are stale.

    python tools/gen_sync_client.py            write the synchronous files
    python tools/gen_sync_client.py --check    exit 1 and name the files that differ

The asyncio client is written by hand. `await` and `async` are removed, the names below are replaced, and ruff sorts the
imports and formats the result. Parentheses stay, so write `reply = await call()` and `reply.job`, not
`(await call()).job`. What replacements cannot express is in `_async.py` and `_sync.py`, both written by hand.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "omni_grpc" / "client"
SOURCES: Mapping[str, str] = {
    "async_admin.py": "admin.py",
    "async_client.py": "client.py",
    "async_connection.py": "connection.py",
    "async_stream.py": "stream.py",
}
"""The file that is written by hand -> the file that is generated from it."""

REPLACEMENTS: Mapping[str, str] = {
    # the language
    r"\b(async|await) ": "",
    r"\b__a(enter|exit|next)__\b": r"__\1__",
    r"\banext\b": "next",
    r"\baclose\b": "close",
    r"\bAsyncGenerator\[(\w+), None\]": r"Generator[\1, None, None]",
    r"\bAsync(Generator|Iterator)\b": r"\1",
    r"for (\w+) in ([\w.]+):\n +yield \1\n": r"yield from \2\n",
    # this package
    r"\bAsync(Admin|Client|Connection|JobStream)\b": r"\1",
    r"\basync_(admin|client|connection|stream)\b": r"\1",
    r"\b_async\b": "_sync",
    # docstrings
    r"\basyncio client\b": "synchronous client",
    r"Create it inside the event loop that uses it\.": "Threads may share it.",
    r"\bCancelling the task\b": "Ctrl-C",
}
"""Regular expression -> what replaces it, applied in this order."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Generates the synchronous client from the asyncio one.", allow_abbrev=False
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed files instead of writing them")
    check = parser.parse_args().check
    stale = {name: text for name, text in generate(FOLDER).items() if current(FOLDER / name) != text}
    for name, text in stale.items():
        if not check:
            (FOLDER / name).write_text(text, encoding="utf-8")
        print(f"{(FOLDER / name).relative_to(ROOT)}: {'stale' if check else 'written'}")
    if check and stale:
        print("The synchronous client is not up to date. Run: python tools/gen_sync_client.py", file=sys.stderr)
        return 1
    return 0


def generate(folder: Path) -> dict[str, str]:
    """File name -> text, for every generated file. Raises ValueError for a replacement that nothing needs."""
    sources = {name: (folder / name).read_text(encoding="utf-8") for name in SOURCES}
    if unused := unused_replacements(sources.values()):
        raise ValueError(f"no asyncio file contains what these replace, so remove them: {', '.join(unused)}")
    return {SOURCES[name]: synchronous(name, text) for name, text in sources.items()}


def unused_replacements(sources: Iterable[str]) -> list[str]:
    text = "\n".join(sources)
    return [pattern for pattern in REPLACEMENTS if not re.search(pattern, text)]


def synchronous(name: str, text: str) -> str:
    """The synchronous counterpart of `text`, which is that of the asyncio file `name`."""
    for pattern, replacement in REPLACEMENTS.items():
        text = re.sub(pattern, replacement, text)
    text = f"# generated from {name} by tools/gen_sync_client.py; do not edit\n{text}"
    # the order of the imports follows their new names, and `async with` above `with` has become two `with` in a row
    for command in (["check", "--fix-only", "--quiet", "--select", "I,SIM117"], ["format", "--quiet"]):
        path = str(FOLDER / SOURCES[name])
        ruff = [sys.executable, "-m", "ruff", *command, "--no-cache", "--stdin-filename", path, "-"]
        text = subprocess.run(ruff, input=text, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    return text


def current(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.exists() else None


if __name__ == "__main__":
    sys.exit(main())
