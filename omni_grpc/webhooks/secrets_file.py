"""The file of secrets that webhooks are signed with.

- name: studio
  tenants: [studio]
  secret: whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD
- name: shop
  secret:
    - whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw
    - the secret that is on its way out, some 24 characters or more

No message shows what the file has in the place of a secret, or where one may have been put by mistake.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.identity.files import guarded_text
from omni_grpc.identity.records import is_name
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.os_errors import plain

PREFIX = "whsec_"
"""Before base64, as Standard Webhooks has it; a secret without it is the text itself."""
FIELDS = ("name", "secret", "tenants")
LEAST, MOST = 24, 64
"""Bytes of a secret, as Standard Webhooks has it."""
MOST_KEYS = 4
"""Secrets of one name: the new one, and those that are on their way out."""
FORM = f"{PREFIX} and the base64 of {LEAST} to {MOST} bytes, or {LEAST} to {MOST} characters"
MAKE = f'make one with: echo "{PREFIX}$(openssl rand -base64 32)"'


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """The keys that sign under one name, and the tenants that may name it; None: every one may."""

    name: str
    tenants: frozenset[str] | None = None
    keys: tuple[bytes, ...] = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Secrets:
    """The secrets of a file, by name."""

    by_name: Mapping[str, Secret] = dataclasses.field(default_factory=dict)

    def find(self, name: str, tenant: str) -> Secret | None:
        """The secret of this name, where it is one for this tenant."""
        found = self.by_name.get(name)
        return found if found is not None and (found.tenants is None or tenant in found.tenants) else None

    def names(self, tenant: str) -> list[str]:
        """The names that a tenant may use."""
        return sorted(name for name in self.by_name if self.find(name, tenant))


def read_secrets(path: Path) -> Secrets:
    """Raises ConfigError by record and field, and for a file that strangers may read or that others may write."""
    try:
        content = yaml.load(_text(path), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except yaml.MarkedYAMLError as error:
        line = 0 if error.problem_mark is None else error.problem_mark.line
        # what is wrong is not told: it may quote a secret
        raise _wrong(f"{path}:{line + 1}: not valid YAML") from None
    except (yaml.YAMLError, RecursionError):
        raise _wrong(f"{path}: not valid YAML") from None
    if not isinstance(content, list):
        raise _wrong(f"{path}: expected a list of secrets, each of them `- name: ...`; [] for none")
    found: dict[str, Secret] = {}
    for index, record in enumerate(content):
        secret = _secret(f"{path}: [{index}]", record)
        if secret.name in found:
            raise _wrong(f"{path}: [{index}].name: the same as that of one above it; list two secrets under one name")
        found[secret.name] = secret
    return Secrets(found)


def _text(path: Path) -> str:
    risk = "may be read by everybody or written by others than its owner {mode}"
    try:
        return guarded_text(path, forbidden=stat.S_IWGRP | stat.S_IRWXO, risk=risk, fix="600")
    except ValueError as error:
        raise _wrong(str(error)) from None
    except OSError as error:
        raise _wrong(f"--webhook-secrets {plain(error)}") from error


def _secret(where: str, record: Any) -> Secret:
    if not isinstance(record, dict):
        raise _wrong(f"{where}: expected name, secret and, unless it is for every tenant, tenants")
    if not set(record) <= set(FIELDS):
        raise _wrong(f"{where}: has a field that there is not; there are {', '.join(FIELDS)}")
    name = record.get("name")
    if not is_name(name):
        raise _wrong(f"{where}.name: expected 1 to 256 printable characters")
    return Secret(name=str(name), tenants=_tenants(where, record), keys=_keys(where, record.get("secret")))


def _tenants(where: str, record: Mapping[str, Any]) -> frozenset[str] | None:
    if "tenants" not in record:
        return None
    names = record["tenants"]
    if not isinstance(names, list) or not names or not all(map(is_name, names)):
        raise _wrong(f"{where}.tenants: expected a list of tenants; leave it out for every tenant")
    return frozenset(names)


def _keys(where: str, given: Any) -> tuple[bytes, ...]:
    texts = given if isinstance(given, list) else [given]
    if not 1 <= len(texts) <= MOST_KEYS:
        raise _wrong(f"{where}.secret: expected one secret, or a list of up to {MOST_KEYS}")
    return tuple(_key(f"{where}.secret" + (f"[{n}]" if len(texts) > 1 else ""), text) for n, text in enumerate(texts))


def _key(where: str, text: Any) -> bytes:
    if not isinstance(text, str):
        raise _wrong(f"{where}: expected text, {FORM}; {MAKE}")
    try:
        prefixed = text.startswith(PREFIX)
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True) if prefixed else text.encode("utf-8")
    except (binascii.Error, ValueError):
        raise _wrong(f"{where}: {PREFIX} is not followed by base64; {MAKE}") from None
    if not LEAST <= len(key) <= MOST:
        raise _wrong(f"{where}: has {len(key)} bytes; expected {FORM}; {MAKE}")
    return key


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_WEBHOOK_SECRETS", violations=(Violation("webhook_secrets", message),))
