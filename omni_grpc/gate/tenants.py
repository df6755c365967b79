"""The file of limits: what each tenant may have of this server.

default:
  max_queued: 20
tenants:
  studio:
    weight: 3
    max_queued: 200
    pixel_steps_per_minute: 2.0e+9
    models: [qwen-image]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from omni_grpc.config.command_line import meant
from omni_grpc.engine.fairness import Share
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.os_errors import plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TenantLimits:
    """What one tenant may have; None: no limit of its own.

    Of all its jobs: `weight` and `max_running` (see Share), `max_queued` jobs that wait, `jobs_per_minute`,
    `pixel_steps_per_minute` (see `resolve.work`), bytes of decoded inputs that wait and of outputs and uploads that are
    kept. Of one request: pixels of an output, steps, frames, priority, and which models and LoRA adapters.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_queued: int | None = None
    jobs_per_minute: float | None = None
    pixel_steps_per_minute: float | None = None
    input_bytes: int | None = None
    stored_bytes: int | None = None
    max_pixels: int | None = None
    max_steps: int | None = None
    max_frames: int | None = None
    max_priority: int | None = None
    models: tuple[str, ...] | None = None
    loras: tuple[str, ...] | None = None

    @property
    def share(self) -> Share:
        return Share(weight=self.weight, max_running=self.max_running)


@dataclasses.dataclass(frozen=True, slots=True)
class Tenants:
    """The limits of a file: by tenant, and those of all others."""

    by_name: Mapping[str, TenantLimits] = dataclasses.field(default_factory=dict)
    default: TenantLimits = dataclasses.field(default_factory=TenantLimits)

    def of(self, tenant: str) -> TenantLimits:
        return self.by_name.get(tenant, self.default)


_FRACTIONS = ("weight", "jobs_per_minute", "pixel_steps_per_minute")
_NAMES = ("models", "loras")
_SIGNED = ("max_priority",)
FIELDS = tuple(field.name for field in dataclasses.fields(TenantLimits))


def read_tenants(path: Path) -> Tenants:
    """Raises ConfigError by tenant and field. What a tenant does not say is as `default` says it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _wrong(f"--tenant-limits {plain(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise _wrong(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict) or not content:
        raise _wrong(f"{path}: expected `default:` and `tenants:`, each with limits")
    _check_names(path, "", content, ("default", "tenants"))
    default = _limits(path, "default", content.get("default") or {}, TenantLimits())
    tenants = content.get("tenants") or {}
    if not isinstance(tenants, dict):
        raise _wrong(f"{path}: tenants: expected a mapping from a tenant's name to its limits")
    by_name = {str(name): _limits(path, f"tenants.{name}", one or {}, default) for name, one in tenants.items()}
    return Tenants(by_name, default)


def _limits(path: Path, where: str, found: Any, base: TenantLimits) -> TenantLimits:
    if not isinstance(found, dict):
        raise _wrong(f"{path}: {where}: expected limits, such as `max_queued: 20`")
    _check_names(path, where, found, FIELDS)
    values = {name: _value(path, f"{where}.{name}", name, value) for name, value in found.items()}
    return dataclasses.replace(base, **values)


def _check_names(path: Path, where: str, found: Mapping[Any, Any], known: tuple[str, ...]) -> None:
    for name in found:
        if name not in known:
            hint = meant(str(name), known, quoted=False) or f"; known are {', '.join(known)}"
            raise _wrong(f"{path}: {where + '.' if where else ''}{name}: no such limit{hint}")


def _value(path: Path, where: str, name: str, value: Any) -> Any:
    """A limit of its type; null takes one of `default` away."""
    if value is None and name != "weight":
        return None
    if name in _NAMES:
        if isinstance(value, list) and all(isinstance(entry, str) and entry for entry in value):
            return tuple(value)
        raise _wrong(f"{path}: {where}: expected a list of names, [] for none")
    number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if name in _FRACTIONS:
        if number and value > 0:
            return float(value)
        raise _wrong(f"{path}: {where}: {value!r} is not a number above 0 (write 2.0e+9 with its point and sign)")
    low = -math.inf if name in _SIGNED else 1 if name == "max_running" else 0
    if number and isinstance(value, int) and value >= low:
        return value
    raise _wrong(f"{path}: {where}: {value!r} is not a whole number{'' if name in _SIGNED else f' from {low}'}")


def _wrong(message: str) -> ConfigError:
    return ConfigError(message, reason="BAD_TENANT_LIMITS", violations=(Violation("tenant_limits", message),))
