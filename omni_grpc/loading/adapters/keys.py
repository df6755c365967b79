"""The keys of an adapter's file: which layer each names, which part of its change it is, and who wrote the file.

Layouts: PEFT (https://github.com/huggingface/peft), diffusers, kohya (https://github.com/kohya-ss/sd-scripts), LyCORIS
(https://github.com/KohakuBlueleaf/LyCORIS) and the tools that write as these do.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping

from torch import Tensor

_NAME = r"(?:\.(?!weight$|bias$)[\w-]+)?"
"""The name that PEFT gives an adapter, between the name of a factor and what is kept of it."""

_LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b", "hada_t1", "hada_t2")
_BOFT, _OFT = ("boft_R", "boft_s"), ("oft_blocks", "oft_diag", "oft_R", "oft_r", "oft_s", "rescale")
_LOKR = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2")

_SUFFIXES: tuple[tuple[str, str], ...] = (
    ("down", rf"\.lora_A{_NAME}(?:\.weight)?"),
    ("up", rf"\.lora_B{_NAME}(?:\.weight)?"),
    ("up_bias", rf"\.lora_B{_NAME}\.bias"),
    # of xlabs: the number says which stream
    ("down", r"(?<=_lora[12])\.down\.weight"),
    ("up", r"(?<=_lora[12])\.up\.weight"),
    ("down", r"[._]lora(?:_linear_layer)?[._]down(?:\.weight)?"),
    ("up", r"[._]lora(?:_linear_layer)?[._]up(?:\.weight)?"),
    ("mid", r"\.lora_mid\.weight"),
    ("alpha", r"\.alpha"),
    ("scalar", r"\.scalar"),
    ("magnitude", rf"\.dora_scale|\.lora_magnitude_vector{_NAME}(?:\.weight)?"),
    *((part, rf"\.{part}") for part in ("diff", "diff_b", "diff_m", "set_weight", "reshape_weight")),
    *((part, rf"\.{part}") for part in ("w_norm", "b_norm")),
    *((part, rf"\.{part}{_NAME}") for part in _LOHA),
    *((part, rf"\.{part}{_NAME}") for part in _LOKR),
    *((part, rf"\.{part}{_NAME}(?:\.weight)?") for part in (*_BOFT, *_OFT)),
    *((f"glora_{part}", rf"\.{part}\.weight") for part in ("a1", "a2", "b1", "b2")),
)  # fmt: skip
_PATTERNS = tuple((part, re.compile(f"(?:{pattern})$")) for part, pattern in _SUFFIXES)

KINDS: Mapping[str, str] = {
    "magnitude": "DoRA",
    **dict.fromkeys(_LOHA, "LoHa"),
    **dict.fromkeys(_LOKR, "LoKr"),
    **dict.fromkeys(_BOFT, "BOFT"),
    **dict.fromkeys(_OFT, "OFT"),
    **dict.fromkeys(("glora_a1", "glora_a2", "glora_b1", "glora_b2"), "GLoRA"),
    "diff": "diff",
    "diff_m": "diff_m",
    **dict.fromkeys(("w_norm", "b_norm"), "norm diff"),
    "set_weight": "set_weight",
    "reshape_weight": "widening",
    "down": "LoRA",
    "up": "LoRA",
    **dict.fromkeys(("diff_b", "up_bias"), "bias"),
}
"""What a layer's change is called, by the first of these parts that it has."""

_WRITERS: tuple[tuple[str, str], ...] = (
    (r"^lora_transformer_", "onetrainer"),
    (r"^lycoris_", "lycoris"),
    (r"^lora_(unet|te\d?)_", "kohya"),
    (r"\.processor\.\w+_lora", "xlabs"),
    (r"\.diff(_b|_m)?$", "lightx2v"),
    (r"^(model\.)?diffusion_model\.", "comfyui"),
    (r"\.lora_[AB]\b", "peft"),
    (r"[._]lora[._](down|up)|lora_linear_layer", "diffusers"),
)
"""The name of a layout by a key of it. The first one that finds a key of the file is the file's, so that what a tool
adds to another's layout names that tool.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """What a file has for one layer: `layer` as the file calls it, tensors and keys by the part that they are."""

    layer: str
    tensors: Mapping[str, Tensor]
    keys: Mapping[str, str]

    @property
    def kind(self) -> str:
        """Of the change, in a word."""
        if "oft_blocks" in self.tensors and self.tensors["oft_blocks"].dim() == 4:
            # LyCORIS calls the blocks of all stages as those of the one of OFT
            return "BOFT"
        return next((kind for part, kind in KINDS.items() if part in self.tensors), "none")

    @property
    def rank(self) -> int:
        """Of the factors; 0 where the change is not made of any."""
        sizes = {"down": 0, "hada_w1_b": 0, "lokr_w2_b": 0, "lokr_w1_b": 0}
        found = (self.tensors[part] for part in sizes if part in self.tensors)
        return next((tensor.shape[0] for tensor in found if tensor.dim()), 0)


def sorted_entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Entry], list[str], list[tuple[str, str]]]:
    """The tensors of a file by layer; the keys that are no part of an adapter; and pairs of keys that say the same of
    one layer.
    """
    parts: dict[str, dict[str, str]] = {}
    others, twice = [], []
    for key in tensors:
        found = next(((part, match) for part, pattern in _PATTERNS if (match := pattern.search(key))), None)
        if found is None:
            others.append(key)
            continue
        part, match = found
        mine = parts.setdefault(key[: match.start()], {})
        if part in mine:
            twice.append((mine[part], key))
        mine[part] = key
    entries = {
        layer: Entry(layer, {part: tensors[key] for part, key in keys.items()}, keys) for layer, keys in parts.items()
    }
    return entries, others, twice


def layout(keys: Iterable[str], metadata: Mapping[str, str]) -> str:
    """The name of a file's layout, by its keys and its header; "" for a file that has none that is known."""
    keys = list(keys)
    names = (name for pattern, name in _WRITERS if any(re.search(pattern, key) for key in keys))
    name = next(names, "")
    # musubi-tuner writes kohya's layout, and which model it trained
    return "musubi" if name == "kohya" and _MUSUBI.search(metadata.get("ss_network_module", "")) else name


_MUSUBI = re.compile(r"networks\.lora_\w+")
