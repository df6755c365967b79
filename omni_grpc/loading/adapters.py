"""LoRA adapters (https://arxiv.org/abs/2106.09685) from safetensors files, in the layouts of PEFT and diffusers."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from omni_grpc.checkpoint.intact import fault
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.json_text import read_json
from omni_grpc.types.os_errors import plain

logger = logging.getLogger(__name__)

FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
"""What an adapter's file is called in a folder: by PEFT, by diffusers."""

CONFIG = "adapter_config.json"
METADATA = "lora_adapter_metadata"
"""Where diffusers keeps a config in the header of the file, as JSON."""

LAYOUTS: Mapping[str, tuple[str, str]] = {
    "peft": (r"\.lora_A(?:\.\w+)?\.weight$", r"\.lora_B(?:\.\w+)?\.weight$"),
    "diffusers": (r"[._]lora[._]down\.weight$", r"[._]lora[._]up\.weight$"),
}
"""How the two factors of a layer are named. The middle part of PEFT's names is the adapter's name."""

PREFIXES = ("base_model.model.", "diffusion_model.", "unet.")
"""Prefixes of a denoiser's module names that carry no meaning."""

UNSERVED = re.compile(r"lora_magnitude_vector|dora_scale|\.lora_B(\.\w+)?\.bias$|\.hada_|\.lokr_|\.diff(_b)?$")
"""Keys that would change the result and are not supported: DoRA, biases, LoHa and LoKr, full weight differences."""


@dataclasses.dataclass(frozen=True, slots=True)
class Factors:
    """The change of one layer: up [out, r] @ down [r, in], times `scale` (alpha / r). `keys` are those it came from."""

    down: Tensor
    up: Tensor
    scale: float
    keys: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFile:
    """An adapter as it is in its file: factors by the checkpoint's name of the module, and all keys there are."""

    path: Path
    sha256: str
    size_bytes: int
    format: str
    keys: tuple[str, ...]
    layers: Mapping[str, Factors]

    @property
    def rank(self) -> int:
        """The largest of its layers."""
        return max(factors.down.shape[0] for factors in self.layers.values())

    def of(self, component: str, components: frozenset[str]) -> dict[str, Factors]:
        """The layers that are meant for one component: names may begin with that of a component."""
        found = {}
        for name, factors in self.layers.items():
            first, _, rest = name.partition(".")
            if first not in components:
                found[name] = factors
            elif first == component:
                found[rest] = factors
        return found


def read_adapter(name: str, path: Path) -> AdapterFile:
    """Reads the file `path`, or the only one of its names in the folder `path`. Raises ConfigError for the setting
    `lora` where it is not there, is no safetensors file, has no pair of factors, or asks for more than LoRA.
    """
    file = _file(name, path)
    try:
        with safetensors.safe_open(file, framework="pt", device="cpu") as handle:
            metadata = handle.metadata() or {}
            tensors = {key: handle.get_tensor(key) for key in handle.keys()}  # noqa: SIM118 - the handle is no mapping
    except (OSError, safetensors.SafetensorError) as error:
        why = fault(file) or f"is no safetensors file: {plain(error)}"
        raise refused(name, f"{file} {why}") from error
    if unserved := sorted(key for key in tensors if UNSERVED.search(key)):
        raise refused(name, f"{file} has more than LoRA, which is not served yet: {', '.join(unserved[:4])}")
    config = _config(name, file, metadata)
    kinds = {kind for kind, (down, _) in LAYOUTS.items() if any(re.search(down, key) for key in tensors)}
    layers: dict[str, Factors] = {}
    for kind in kinds:
        layers |= _layers(name, tensors, LAYOUTS[kind], config)
    if not layers:
        raise refused(name, f"{file} has no LoRA layers; it begins with {', '.join(sorted(tensors)[:4])}")
    return AdapterFile(
        path=file,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        size_bytes=file.stat().st_size,
        format=" and ".join(sorted(kinds)),
        keys=tuple(tensors),
        layers=layers,
    )


def refused(name: str, why: str) -> ConfigError:
    """The error for one adapter of the setting `lora`."""
    message = f"--lora {name}: {why}"
    return ConfigError(message, reason="BAD_LORA", violations=(Violation("lora", message),))


def _file(name: str, path: Path) -> Path:
    if path.is_file():
        return path
    found = [path / file for file in FILES if (path / file).is_file()]
    if len(found) == 1:
        return found[0]
    raise refused(name, f"{path} is neither a file nor a folder with one of {', '.join(FILES)}")


def _config(name: str, file: Path, metadata: Mapping[str, str]) -> dict[str, Any]:
    """PEFT's config: that of the folder where it is this file's, else the one in the header. Keys may begin with the
    component they are for.
    """
    where, text = f"the header of {file}", metadata.get(METADATA, "{}")
    try:
        if (beside := file.parent / CONFIG).is_file():
            owner = _owner(file.parent)
            if owner == file.name:
                where, text = str(beside), beside.read_text(encoding="utf-8")
            else:
                logger.warning("adapter %s: %s is not of %s and is not used", name, beside, file.name)
        found = read_json(text)
    except (OSError, ValueError) as error:
        raise refused(name, f"its config is not JSON: {where}: {plain(error)}") from error
    if not isinstance(found, dict):
        raise refused(name, f"its config is not a JSON object: {where}")
    for key, value in found.items():
        leaf = key.rpartition(".")[2]
        if leaf in ("use_dora", "alpha_pattern", "lora_bias") and value:
            raise refused(name, "its config has use_dora, alpha_pattern or lora_bias, which are not served yet")
        if leaf == "lora_alpha" and not (type(value) in (int, float) and math.isfinite(value)):
            raise refused(name, f"{key} in {where} is {value!r}; it must be a finite number")
    return found


def _owner(folder: Path) -> str:
    """The file that the config of a folder is for: PEFT's own, or the only one there is; "" where it could be any."""
    if (folder / FILES[0]).is_file():
        return FILES[0]
    files = [path.name for path in folder.glob("*.safetensors")]
    return files[0] if len(files) == 1 else ""


def _for_module(name: str, config: Mapping[str, Any], module: str) -> dict[str, Any]:
    """What a config says of one module: keys without a component, and those of the component the module begins with. A
    module that names none takes those of the only component. Raises ConfigError where several differ.
    """
    parts: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        component, _, leaf = key.rpartition(".")
        parts.setdefault(component, {})[leaf] = value
    common = parts.pop("", {})
    first = _plain(module).partition(".")[0]
    if first in parts or not parts:
        return {**common, **parts.get(first, {})}
    for key in ("lora_alpha", "use_rslora"):
        if len({part.get(key) for part in parts.values()}) > 1:
            raise refused(name, f"{module} names no component, and {key} differs in the configs of {', '.join(parts)}")
    return {**common, **next(iter(parts.values()))}


def _layers(
    name: str, tensors: Mapping[str, Tensor], layout: tuple[str, str], config: Mapping[str, Any]
) -> dict[str, Factors]:
    downs, ups = (
        {re.sub(pattern, "", key): key for key in tensors if re.search(pattern, key)} for pattern in layout
    )  # fmt: skip
    if odd := sorted(downs.keys() ^ ups.keys()):
        raise refused(name, f"{odd[0]} has one factor of two")
    layers = {}
    for module, key in downs.items():
        keys = [key, ups[module], *([f"{module}.alpha"] if f"{module}.alpha" in tensors else ())]
        if wrong := next((one for one in keys if not tensors[one].float().isfinite().all()), None):
            raise refused(name, f"{wrong} has values that are not finite; the file is damaged, get or train it again")
        down, up = (tensors[one].float() for one in keys[:2])
        rank = down.shape[0] if down.dim() else 0
        if down.dim() > 2 or up.dim() > 2:
            # of a convolution, which is left out and told of like any key that fits nothing
            continue
        if down.dim() != 2 or up.dim() != 2 or rank == 0 or up.shape[1] != rank:
            raise refused(name, f"{module}: factors {tuple(up.shape)} and {tuple(down.shape)} have no product")
        own = _for_module(name, config, module)
        alpha = own.get("lora_alpha", rank)
        if len(keys) == 3:
            if (count := tensors[keys[2]].numel()) != 1:
                raise refused(name, f"{keys[2]} has {count} values; alpha is one number for a layer")
            alpha = tensors[keys[2]].item()
        scale = alpha / (math.sqrt(rank) if own.get("use_rslora") else rank)
        layers[_plain(module)] = Factors(down, up, scale, tuple(keys))
    return layers


def _plain(module: str) -> str:
    for prefix in PREFIXES:
        module = module.removeprefix(prefix)
    return module
