"""Writes what the container images install: every package that the server needs, and those that they need, each with
the version that this environment was tested with.

    python -m tools.image_requirements --write    writes deploy/requirements.txt
    python -m tools.image_requirements --check    exits with 1 if an image cannot be made of it: a package that
                                                  pyproject.toml asks for is missing in it, or has another version

torch is not in it: the images install it first, from an index of its builds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FILE = ROOT / "deploy" / "requirements.txt"
EXTRAS = ("web", "traces")
"""Of the server, in an image. The client has none of its own."""
OWN = {"omni-grpc", "omni-grpc-client"}
FIRST = {"torch"}
"""Installed before all others, from another index. `setuptools`, which torch brings along, is listed all the same."""
IMAGE = {"python_version": "3.12", "python_full_version": "3.12.0", "sys_platform": "linux", "platform_system": "Linux"}
"""What an image has, where a requirement asks."""
HEAD = (
    "# what the images install, see tools/image_requirements.py: generated with --write from an environment in which the",
    "# tests pass; torch comes from an index of its own, see the Dockerfile",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="write or check deploy/requirements.txt", allow_abbrev=False)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", action="store_true", help="write the file")
    action.add_argument("--check", action="store_true", help="compare the file with pyproject.toml")
    if parser.parse_args().write:
        FILE.write_text("\n".join((*HEAD, *lines())) + "\n", encoding="utf-8")
        return 0
    found = list(wrong(pinned(FILE.read_text(encoding="utf-8")), asked()))
    print(*found, sep="\n", end="\n" if found else "")
    return 1 if found else 0


def asked() -> Iterator[Requirement]:
    """What pyproject.toml asks for in an image, ours left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    build = project["build-system"]["requires"]
    for line in (*build, "ninja", *project["project"]["dependencies"], *(one for name in EXTRAS for one in extras[name])):
        requirement = Requirement(line)
        if canonicalize_name(requirement.name) not in OWN:
            yield requirement


def lines() -> list[str]:
    """Each package that is needed, with its version here."""
    found: dict[str, str] = {}
    waiting = list(asked())
    done: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if (name, frozenset(requirement.extras)) in done:
            continue
        done.add((name, frozenset(requirement.extras)))
        found[name] = importlib.metadata.version(name).partition("+")[0]
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if any(_applies(needed, extra) for extra in ("", *requirement.extras)):
                waiting.append(needed)
    return [f"{name}=={version}" for name, version in sorted(found.items()) if name not in FIRST]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({**IMAGE, "extra": extra})


def pinned(text: str) -> dict[str, str]:
    """Name -> version."""
    rows = (line.partition("==") for line in text.splitlines() if line and not line.startswith("#"))
    return {canonicalize_name(name): version for name, _, version in rows}


def wrong(pins: Mapping[str, str], requirements: Iterator[Requirement]) -> Iterator[str]:
    """A line for each requirement that the pins do not meet."""
    for requirement in requirements:
        name = canonicalize_name(requirement.name)
        if name in FIRST:
            continue
        if name not in pins:
            yield f"{FILE.name} lacks {requirement}; run python -m tools.image_requirements --write"
        elif not requirement.specifier.contains(pins[name], prereleases=True):
            yield f"{FILE.name} has {name} {pins[name]}, but pyproject.toml asks for {requirement}"


if __name__ == "__main__":
    sys.exit(main())
