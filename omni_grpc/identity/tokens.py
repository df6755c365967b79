"""Static tokens: 256 random bits each, of which a server keeps the hash alone.

The hash is a plain SHA-256. Salt and slow hashes protect secrets that people choose, against lists of likely ones.
Nobody can go through 2^256 tokens, and a slow hash would be paid at every call. The format is checked first, so that no
secret of another kind is let in by its hash. The time that a lookup takes depends on the hash alone, from which nothing
follows about the token.
"""

from __future__ import annotations

import datetime
import fcntl
import hashlib
import os
import re
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

import yaml

from omni_grpc.identity.records import Record, Records, parse_records, read_text
from omni_grpc.types.caller import Scope
from omni_grpc.types.errors import ConfigError, NotFound, Unauthenticated

PREFIX = "omni_"
"""Marks a token of ours, for those that look for secrets in files and logs too."""
_FORMAT = re.compile(PREFIX + r"[A-Za-z0-9_-]{43}")
_EMPTY = re.compile(r"^\[\][ \t]*\n", re.MULTILINE)


def new_token() -> str:
    """A token of 256 random bits, 48 characters."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode("ascii")).hexdigest()


def find(records: Records, token: str, now: datetime.datetime) -> Record:
    """Who has this token. Raises Unauthenticated (TOKEN_INVALID, TOKEN_EXPIRED)."""
    record = records.by_hash.get(hash_of(token)) if _FORMAT.fullmatch(token) else None
    if record is None:
        raise Unauthenticated(
            "this server has no such token; it may have been revoked: ask for a new one", reason="TOKEN_INVALID"
        )
    if record.expired(now):
        raise Unauthenticated(
            f"the token {record.name!r} expired at {record.expires:%Y-%m-%dT%H:%M:%SZ}: ask for a new one",
            reason="TOKEN_EXPIRED",
        )
    return record


# --- the file ---------------------------------------------------------------------------------------------------------


def add(
    path: Path,
    *,
    tenant: str,
    subject: str,
    scopes: frozenset[Scope],
    expires: datetime.datetime | None,
    now: datetime.datetime,
    name: str | None = None,
) -> tuple[str, Record]:
    """Makes a token and appends its record, and the file where there is none. The token is kept nowhere.

    `name` is the subject's by default, with a number where it is taken. Raises ConfigError for a given name that is
    taken, and for a file that cannot be read.
    """
    token = new_token()

    def edit(text: str, records: Records) -> str:
        nonlocal name
        taken = {record.name for record in records.all}
        if name is None:
            numbered = (f"{subject}-{number}" for number in range(2, len(taken) + 3))
            name = next(free for free in (subject, *numbered) if free not in taken)
        fields: dict[str, object] = {"name": name, "subject": subject, "tenant": tenant, "scopes": sorted(scopes)}
        fields |= {"sha256": hash_of(token), "created": _written(now)}
        if expires is not None:
            fields["expires"] = _written(expires)
        kept = text if records.all else _EMPTY.sub("", text)
        return kept + yaml.safe_dump([_plain(fields)], sort_keys=False, default_flow_style=None, width=1000)

    after = _change(path, edit)
    return token, next(record for record in after.all if record.name == name)


def remove(path: Path, name: str) -> Record:
    """Takes the record of a token or a certificate out of the file. Raises NotFound."""
    removed: Record | None = None

    def edit(text: str, records: Records) -> str:
        nonlocal removed
        removed = next((record for record in records.all if record.name == name), None)
        if removed is None:
            known = ", ".join(record.name for record in records.all) or "none"
            raise NotFound(f"{path} has no record {name!r}; it has {known}", reason="TOKEN_NOT_FOUND")
        lines = text.splitlines(keepends=True)
        first, end = removed.lines.start, removed.lines.stop
        # what follows up to the next record, comments and empty lines, is not this one's
        while end > first + 1 and not lines[end - 1].partition("#")[0].strip():
            end -= 1
        left = "".join([*lines[:first], *lines[end:]])
        if len(records.all) == 1:
            left += "[]\n"
        if _names_in(left, path) != [record.name for record in records.all if record is not removed]:
            raise ConfigError(f"{path} is not written one record below the other: remove lines {first + 1} to {end}")
        return left

    _change(path, edit)
    assert removed is not None
    return removed


def _change(path: Path, edit: Callable[[str, Records], str]) -> Records:
    """Replaces a file by what `edit` makes of it, at once and one writer at a time. Raises ConfigError where the
    result would be no valid file.
    """
    path = Path(os.path.realpath(path))
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        text = read_text(path) if path.exists() else "[]\n"
        text = text if text.endswith("\n") else text + "\n"
        changed = edit(text, parse_records(text, path))
        records = parse_records(changed, path)
        _replace(path, changed)
        os.fsync(folder)
    finally:
        os.close(folder)
    return records


def _replace(path: Path, text: str) -> None:
    """Writes a file beside it, and renames that: a reader sees the old one or the new one. Mode and owner stay."""
    number, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(number, "w", encoding="utf-8") as file:
            if path.exists():
                before = path.stat()
                os.fchmod(number, before.st_mode & 0o7777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(number, before.st_uid, before.st_gid)
            file.write(text)
            file.flush()
            os.fsync(number)
        os.replace(beside, path)
    except BaseException:
        os.unlink(beside)
        raise


def _names_in(text: str, path: Path) -> list[str] | None:
    """The names of its records, None for a text that is no valid file."""
    try:
        return [record.name for record in parse_records(text, path).all]
    except ConfigError:
        return None


def _written(moment: datetime.datetime) -> str:
    return moment.astimezone(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _plain(fields: dict[str, object]) -> dict[str, object]:
    """YAML writes members of a StrEnum as objects of Python."""
    return {key: [str(item) for item in value] if isinstance(value, list) else value for key, value in fields.items()}
