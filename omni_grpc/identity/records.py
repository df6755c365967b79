"""The identity file: a YAML list of tokens, by their hashes, and of client certificates, by their names.

- name: render-farm
  subject: render-farm
  tenant: studio
  scopes: [generate, read]
  sha256: 0f3c...
  created: 2026-11-02T10:00:00Z
  expires: 2026-12-02T10:00:00Z
- name: gateway
  tenant: studio
  scopes: [generate, read]
  certificate: DNS:gateway.studio.example
"""

from __future__ import annotations

import dataclasses
import datetime
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.config.command_line import meant
from omni_grpc.identity.files import guarded_text
from omni_grpc.types.caller import Caller, Scope
from omni_grpc.types.errors import ConfigError, Violation

COMMON = ("name", "subject", "tenant", "scopes", "created", "expires")
KINDS = ("sha256", "certificate")
REQUIRED = ("name", "tenant", "scopes")
LONGEST_NAME = 256
"""Characters of a name, subject or tenant."""

_SHA256 = re.compile("[0-9a-f]{64}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One caller. `sha256` is that of a token, `certificate` a name as `certificates.names` gives it; one is None."""

    name: str
    subject: str
    tenant: str
    scopes: frozenset[Scope]
    sha256: str | None = dataclasses.field(default=None, repr=False)
    certificate: str | None = None
    created: datetime.datetime | None = None
    expires: datetime.datetime | None = None
    lines: range = range(0)
    """The lines of the file that it takes, from 0."""

    def caller(self, peer: str) -> Caller:
        return Caller(tenant=self.tenant, subject=self.subject, scopes=self.scopes, peer=peer)

    def expired(self, now: datetime.datetime) -> bool:
        return self.expires is not None and self.expires <= now


@dataclasses.dataclass(frozen=True, slots=True)
class Records:
    """All callers of a file, in its order."""

    all: tuple[Record, ...] = ()
    by_hash: Mapping[str, Record] = dataclasses.field(default_factory=dict, repr=False)
    by_certificate: Mapping[str, Record] = dataclasses.field(default_factory=dict)


def read_records(path: Path) -> Records:
    """Raises ConfigError, by line and field, and for a file that others may write."""
    return parse_records(read_text(path), path)


def read_text(path: Path) -> str:
    """The text of a file that nobody but its owner may write. Raises ConfigError."""
    risk = "may be written by others than its owner {mode}, who could give themselves a token"
    try:
        return guarded_text(path, forbidden=stat.S_IWGRP | stat.S_IWOTH, risk=risk, fix="go-w")
    except ValueError as error:
        raise _wrong(str(error)) from None
    except OSError as error:
        hint = "; `omni-grpc token new --file FILE` makes one" if isinstance(error, FileNotFoundError) else ""
        raise _wrong(f"--token-file {path}: {error.strerror}{hint}") from error


def parse_records(text: str, path: Path) -> Records:
    """Raises ConfigError, by line and field. `path` is for its messages."""
    try:
        root = yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line
        raise _wrong(f"{path}:{line + 1}: not valid YAML: {error.problem}") from None
    except (yaml.YAMLError, RecursionError):
        raise _wrong(f"{path}: not valid YAML") from None
    if root is None:
        # half of the editors empty a file before they write it
        raise _wrong(f"{path} has no records; write [] for a server that knows nobody")
    if not isinstance(root, yaml.SequenceNode):
        raise _at(path, root, "expected a list of records, each of them `- name: ...`")
    found: dict[str, Record] = {}
    by_hash: dict[str, Record] = {}
    by_certificate: dict[str, Record] = {}
    for node in root.value:
        record = _record(path, node)
        for known, key, what in (
            (found, record.name, "name"),
            (by_hash, record.sha256, "sha256"),
            (by_certificate, record.certificate, "certificate"),
        ):
            if key in known:
                raise _at(path, node, f"{what}: the same as that of {known[key].name!r} above it")
            if key is not None:
                known[key] = record
    return Records(tuple(found.values()), by_hash, by_certificate)


def _record(path: Path, node: yaml.Node) -> Record:
    if not isinstance(node, yaml.MappingNode):
        raise _at(path, node, "expected a record with name, tenant, scopes and sha256 or certificate")
    fields: dict[str, yaml.Node] = {}
    for key, value in node.value:
        name = _text(path, key, "a field's name")
        if name not in (*COMMON, *KINDS):
            raise _at(path, key, f"{name}: no such field{meant(name, (*COMMON, *KINDS), quoted=False)}")
        if name in fields:
            raise _at(path, key, f"{name}: given twice")
        fields[name] = value
    for name in REQUIRED:
        if name not in fields:
            raise _at(path, node, f"{name}: is required")
    given = [kind for kind in KINDS if kind in fields]
    if len(given) != 1:
        raise _at(path, node, "needs one of sha256 and certificate, and not both")
    values: dict[str, Any] = {"subject": fields["name"]} | fields
    return Record(
        name=_name(path, values["name"], "name"),
        subject=_name(path, values["subject"], "subject"),
        tenant=_name(path, values["tenant"], "tenant"),
        scopes=_scopes(path, values["scopes"]),
        sha256=_hash(path, fields.get("sha256")),
        certificate=None if "certificate" not in fields else _name(path, fields["certificate"], "certificate", 2048),
        created=_time(path, fields.get("created"), "created"),
        expires=_time(path, fields.get("expires"), "expires"),
        lines=range(node.start_mark.line, node.end_mark.line + (1 if node.flow_style else 0)),
    )


def _text(path: Path, node: yaml.Node, field: str) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise _at(path, node, f"{field}: expected text")
    return str(node.value)


def _name(path: Path, node: yaml.Node, field: str, longest: int = LONGEST_NAME) -> str:
    text = _text(path, node, field)
    if not is_name(text, longest):
        raise _at(path, node, f"{field}: expected 1 to {longest} printable characters")
    return text


def is_name(text: object, longest: int = LONGEST_NAME) -> bool:
    """Whether it may name a subject or a tenant: it goes into logs, so it is one printable line."""
    return isinstance(text, str) and 0 < len(text) <= longest and text.isprintable() and text.strip() == text


def _scopes(path: Path, node: yaml.Node) -> frozenset[Scope]:
    items: Sequence[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else [node]
    names = [_text(path, item, "scopes") for item in items]
    try:
        return scopes_of(",".join(names))
    except ValueError as error:
        raise _at(path, node, f"scopes: {error}") from None


def scopes_of(text: str) -> frozenset[Scope]:
    """Scopes that commas or spaces separate. Raises ValueError for one that there is not, and for none."""
    names = text.replace(",", " ").split()
    wrong = [name for name in names if name not in {*Scope}]
    if wrong or not names:
        raise ValueError(f"{wrong[0] if wrong else text!r} is not one of {', '.join(Scope)}")
    return frozenset(map(Scope, names))


def _hash(path: Path, node: yaml.Node | None) -> str | None:
    if node is None:
        return None
    text = _text(path, node, "sha256")
    if not _SHA256.fullmatch(text):
        # the value is not shown: whoever puts a token here by mistake would find it in the log
        raise _at(path, node, "sha256: expected the 64 lower-case hex digits of a SHA-256, and not the token itself")
    return text


def _time(path: Path, node: yaml.Node | None, field: str) -> datetime.datetime | None:
    if node is None:
        return None
    try:
        return time_of(_text(path, node, field))
    except ValueError:
        raise _at(path, node, f"{field}: expected a date or time such as 2026-12-31T12:00:00Z") from None


def time_of(text: str) -> datetime.datetime:
    """A date or time of ISO 8601, in UTC where it names no zone. Raises ValueError."""
    found = datetime.datetime.fromisoformat(text)
    return (found if found.tzinfo else found.replace(tzinfo=datetime.UTC)).astimezone(datetime.UTC)


def _at(path: Path, node: yaml.Node, rule: str) -> ConfigError:
    return _wrong(f"{path}:{node.start_mark.line + 1}: {rule}")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_TOKEN_FILE", violations=(Violation("token_file", message),))
