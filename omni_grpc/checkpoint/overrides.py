"""Settings that a checkpoint brings beside the diffusers layout: the file `omni_grpc.json` in its folder.

{"defaults": {"width": 128, "steps": 20, "guidance": {"true_cfg_scale": 4.0}},
 "latent_rgb": {"factors": [[r, g, b], ...], "bias": [r, g, b]},
 "step_cache": {"mag_cache": {"ratios": [1.0, ...]}, "balanced": {"mag_cache": {"threshold": 0.1}}, ...}}

They take precedence over the spec of its family, which has the released model's values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.request import GuidanceNorm
from omni_grpc.types.spec import Checkpoint, LatentRgb, Preferences
from omni_grpc.types.step_cache import METHODS, CacheQuality

Check = Callable[[Any], bool]


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _scale(value: Any) -> bool:
    return _number(value) and 0 <= value <= 100


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _norm(value: Any) -> bool:
    return value in list(GuidanceNorm)


def _color(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(map(_number, value))


def _colors(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_color, value))


DEFAULTS: Mapping[str, Check] = {"width": _count, "height": _count, "steps": _count, "negative_prompt": _text}
GUIDANCE: Mapping[str, Check] = {
    "scale": _scale,
    "true_cfg_scale": _scale,
    "norm": _norm,
    "rescale": _share,
    "interval_start": _share,
    "interval_end": _share,
}
CACHES = (*METHODS, *(quality.lower() for quality in CacheQuality))
LATENT_RGB: Mapping[str, Check] = {"factors": _colors, "bias": _color}


def read(content: Mapping[str, Any], where: str) -> Preferences:
    """Raises CheckpointError for an unknown or invalid entry; `where` is the name of the file."""
    outer = _entries(content, where, "", {"defaults": _mapping, "latent_rgb": _mapping, "step_cache": _mapping})
    defaults = _entries(outer.get("defaults", {}), where, "defaults.", {**DEFAULTS, "guidance": _mapping})
    guidance = _entries(defaults.pop("guidance", {}), where, "defaults.guidance.", GUIDANCE)
    if "norm" in guidance:
        guidance["norm"] = GuidanceNorm(guidance["norm"])
    latent_rgb = None
    if "latent_rgb" in outer:
        rgb = _entries(outer["latent_rgb"], where, "latent_rgb.", LATENT_RGB)
        if "factors" not in rgb:
            raise CheckpointError(f"{where}: latent_rgb has no factors")
        factors = tuple((r, g, b) for r, g, b in rgb["factors"])
        latent_rgb = LatentRgb(factors=factors, bias=tuple(rgb.get("bias", (0.0, 0.0, 0.0))))
    cache = _entries(outer.get("step_cache", {}), where, "step_cache.", dict.fromkeys(CACHES, _mapping))
    return Preferences(defaults=defaults, guidance=guidance, latent_rgb=latent_rgb, step_cache=cache)


def check(checkpoint: Checkpoint, where: str) -> None:
    """Raises CheckpointError for a default size that the model would refuse from a request."""
    limits = checkpoint.limits
    for name in ("width", "height"):
        size = checkpoint.preferences.defaults.get(name)
        if size is not None and (size % limits.size_multiple or not limits.min_size <= size <= limits.max_size):
            raise CheckpointError(
                f"{where}: defaults.{name} is {size}, expected a multiple of {limits.size_multiple} from "
                f"{limits.min_size} to {limits.max_size}"
            )


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _entries(content: Mapping[str, Any], where: str, path: str, known: Mapping[str, Check]) -> dict[str, Any]:
    for name, value in content.items():
        if name not in known:
            raise CheckpointError(f"{where} has an unknown entry {path + name!r}; known entries: {', '.join(known)}")
        if not known[name](value):
            raise CheckpointError(f"{where}: {path}{name} has an invalid value: {value!r}")
    return dict(content)
