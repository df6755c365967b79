"""Which names a blob may have."""

from __future__ import annotations

import re

LONGEST = 200
"""Most characters of a name, so that with its slashes written as three characters it is still a file name."""
_NAME = re.compile(r"[A-Za-z0-9._-]+(?:/[A-Za-z0-9._-]+)*")


def valid(name: str) -> bool:
    """Whether it is letters, digits, `._-` and `/` between them, and no part of it leads out of a folder."""
    return (
        len(name) + 2 * name.count("/") <= LONGEST
        and _NAME.fullmatch(name) is not None
        and not {".", ".."} & set(name.split("/"))
    )


def checked(name: str) -> str:
    """The name. Raises ValueError where it may not be one."""
    if not valid(name):
        raise ValueError(f"{name[:LONGEST]!r} may not be the name of a blob")
    return name
