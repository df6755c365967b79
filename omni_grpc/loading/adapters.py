"""LoRA adapters (https://arxiv.org/abs/2106.09685) from safetensors files, in the layouts of PEFT and diffusers."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
from torch import Tensor

from omni_grpc.types.errors import ConfigError, Violation

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
"""What may stand before the names of a denoiser's modules and says nothing."""

UNSERVED = re.compile(r"lora_magnitude_vector|dora_scale|\.lora_B(\.\w+)?\.bias$|\.hada_|\.lokr_|\.diff(_b)?$")
"""Keys that would change the result and are not served: DoRA, biases, LoHa and LoKr, whole differences."""


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
        raise refused(name, f"{file} is no safetensors file: {error}") from error
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
    """PEFT's config, beside the file or in its header; of a header with one config for each component, the only one."""
    beside = file.parent / CONFIG
    try:
        text = beside.read_text(encoding="utf-8") if beside.is_file() else metadata.get(METADATA, "{}")
        found: dict[str, Any] = json.loads(text)
    except (OSError, json.JSONDecodeError) as error:
        raise refused(name, f"its config is not JSON: {error}") from error
    config = {key.rpartition(".")[2]: value for key, value in found.items()}
    if config.get("use_dora") or config.get("alpha_pattern") or config.get("lora_bias"):
        raise refused(name, "its config has use_dora, alpha_pattern or lora_bias, which are not served yet")
    return config


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
        down, up = (tensors[k].float() for k in (key, ups[module]))
        rank = down.shape[0]
        if down.dim() != 2 or up.dim() != 2:
            # of a convolution, which is left out and told of like any key that fits nothing
            continue
        if up.shape[1] != rank:
            raise refused(name, f"{module}: factors {tuple(up.shape)} and {tuple(down.shape)} have no product")
        keys, alpha = [key, ups[module]], config.get("lora_alpha", rank)
        if f"{module}.alpha" in tensors:
            keys.append(f"{module}.alpha")
            alpha = tensors[keys[-1]].item()
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        layers[_plain(module)] = Factors(down, up, scale, tuple(keys))
    return layers


def _plain(module: str) -> str:
    for prefix in PREFIXES:
        module = module.removeprefix(prefix)
    return module
