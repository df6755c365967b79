"""Which layer of a text encoder a file means. Tools agree on the names that transformers has for the layers, and differ
in what they put before them: the tool's name of the encoder, and modules around the layers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from omni_grpc.loading.adapters.names import TEXT_ENCODER, Named, is_of_an_encoder, plain
from omni_grpc.types.spec import RowSlice

DENOISER = "denoiser"
"""Stands for the component of layers of any denoiser."""

_COMPONENT = re.compile(r"(text_encoder(?:_\d+)?)[._]")
_MARK = re.compile(r"lora_te\d?_|te\d?[._]|text_encoders\.\w+\.|clip_[lg][._]|t5xxl[._]")
"""What tools call an encoder. Their numbers do not count the encoders of a model: of FLUX.1, T5 is 2 to some and 3 to
others.
"""

_AROUND = re.compile(r"(?:transformer_|base_model_|text_model_|language_model_|model_)+")
"""Modules around the layers, which versions of the libraries have or have not."""

_OLD: Mapping[str, str] = {"_to_q": "_q_proj", "_to_k": "_k_proj", "_to_v": "_v_proj", "_to_out": "_out_proj"}
"""How diffusers called layers of CLIP before it used PEFT."""


def is_encoder(component: str) -> bool:
    """Whether a component is a text encoder, by the name that diffusers gives it."""
    return re.fullmatch(r"text_encoder(?:_\d+)?", component) is not None


def named_encoder(layer: str) -> str:
    """The text encoder that a layer's name in a file begins with, by its component; "" where it says none."""
    match = _COMPONENT.match(plain(layer))
    return match[1] if match else ""


class EncoderNames:
    """The names of the layers of one text encoder. `modules`: those of transformers, which may be a part of the model
    that the checkpoint has. A name that says no more than that it is of some text encoder is of each that has the
    layer.
    """

    def __init__(self, component: str, modules: Collection[str]) -> None:
        self._component = component
        self._table = {_bare(module): (RowSlice(module),) for module in modules}

    def find(self, layer: str) -> Named:
        """What `layer`, a name in a file, means."""
        layer = plain(layer)
        if not is_of_an_encoder(layer):
            return Named(DENOISER, None)
        if component := named_encoder(layer):
            own = component == self._component
            return Named(component, self.modules(layer[len(component) + 1 :]) if own else None)
        found = self.modules(_MARK.sub("", layer, count=1) if _MARK.match(layer) else layer)
        return Named(TEXT_ENCODER if found is None else self._component, found)

    def modules(self, name: str) -> tuple[RowSlice, ...] | None:
        """The module of a name that says nothing of the encoder; None where there is no such."""
        bare = _bare(name)
        for old, new in _OLD.items():
            if bare not in self._table and bare.endswith(old):
                bare = bare.removesuffix(old) + new
        return self._table.get(bare)


def _bare(name: str) -> str:
    flat = name.replace(".", "_")
    return _AROUND.sub("", flat, count=1) if _AROUND.match(flat) else flat
