"""Files of adapters of kinds that make a new weight of a layer's, or change what is no matrix; and the weights that a
checkpoint has once they are merged into it. Written from the formulas, as matrices, without the code under test.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tests.features.adapter_files import Layer, Source, Tensors

Formula = Callable[[Tensor, float], Tensor]
"""(weight [out, in] of the layer as the file has it, scale of the request) -> the merged weight."""


@dataclasses.dataclass(slots=True)
class Kind:
    """A file: its tensors and header, what it makes of layers, and what it adds to others at scale 1, or puts in
    their place.
    """

    tensors: Tensors = dataclasses.field(default_factory=dict)
    layers: list[tuple[Layer, Formula]] = dataclasses.field(default_factory=list)
    added: Tensors = dataclasses.field(default_factory=dict)
    replaced: Tensors = dataclasses.field(default_factory=dict)
    header: dict[str, str] | None = None

    def merge(self, weights: Mapping[str, Tensor], scale: float) -> Tensors:
        """A checkpoint's weights with the file merged into them."""
        made = dict(weights)
        for layer, formula in self.layers:
            whole = torch.cat([made[f"{module}.weight"].flatten(1) for module in layer.modules])
            if layer.swapped:
                whole = whole.roll(layer.out // 2, 0)
            for name, part in layer.merged(formula(whole, scale)).items():
                made[name] = part.reshape(weights[name].shape)
        for name, added in self.added.items():
            made[name] = made[name] + scale * added.view_as(made[name])
        for name, other in self.replaced.items():
            made[name] = blend(made[name], other, scale)
        return made


def few(layers: list[Layer], which: int = 0) -> list[Layer]:
    """Every second layer, so that some stay as they are."""
    return layers[which::2]


def blend(weight: Tensor, other: Tensor, scale: float) -> Tensor:
    return weight + scale * (other - weight)


def _norms(weight: Tensor, axis: int) -> Tensor:
    return weight.pow(2).sum(axis, keepdim=True).sqrt()


def _dora_formula(change: Tensor, magnitude: Tensor, axis: int) -> Formula:
    def formula(weight: Tensor, scale: float) -> Tensor:
        whole = weight + scale * change
        return magnitude * whole / _norms(whole, axis)

    return formula


def dora_peft(source: Source) -> Kind:
    """Magnitudes [out], alpha from the config, names of the checkpoint."""
    made = Kind(header={"lora_adapter_metadata": json.dumps({"lora_alpha": 6, "r": 4, "use_dora": True})})
    for layer in few(source.own):
        down, up = source.pair(layer, 4)
        magnitude = torch.rand(layer.out, generator=source.generator) + 0.5
        name = f"base_model.model.{layer.name}"
        made.tensors |= {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
        made.tensors[f"{name}.lora_magnitude_vector"] = magnitude
        made.layers.append((layer, _dora_formula(6 / 4 * up @ down, magnitude[:, None], 1)))
    return made


def dora_kohya(source: Source) -> Kind:
    """dora_scale [out, 1], also of fused layers, with differences of biases beside."""
    made = Kind()
    for layer in few(source.original):
        down, up = source.pair(layer, 2)
        magnitude = torch.rand(layer.out, 1, generator=source.generator) + 0.5
        name = f"lora_unet_{layer.flat}"
        made.tensors |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up}
        made.tensors |= {f"{name}.dora_scale": magnitude, f"{name}.alpha": torch.tensor(3.0)}
        made.layers.append((layer, _dora_formula(3 / 2 * up @ down, magnitude, 1)))
        if all(f"{module}.bias" in source.weights for module in layer.modules):
            made.tensors[f"{name}.diff_b"] = bias = source.random(layer.out)
            made.added |= layer.merged(bias, "bias")
    return made


def dora_by_input(source: Source) -> Kind:
    """dora_scale [1, in]: a column of a fused layer goes through all of its parts."""
    made = Kind()
    for layer in few(source.original, 1):
        if layer.modules[0].startswith("patch_embedding"):
            continue
        down, up = source.pair(layer, 4)
        magnitude = torch.rand(1, layer.inside, generator=source.generator) + 0.5
        name = f"lycoris_{layer.flat}"
        made.tensors |= {
            f"{name}.lora_down.weight": down,
            f"{name}.lora_up.weight": up,
            f"{name}.dora_scale": magnitude,
        }
        made.layers.append((layer, _dora_formula(up @ down, magnitude, 0)))
    return made


def dora_lokr(source: Source) -> Kind:
    """Magnitudes of a change that is a Kronecker product."""
    made = Kind()
    for layer in few(source.own):
        first = source.random(2, 2, scale=0.3)
        second = source.random(layer.out // 2, layer.inside // 2, scale=0.1)
        magnitude = torch.rand(layer.out, 1, generator=source.generator) + 0.5
        name = f"lycoris_{layer.flat}"
        made.tensors |= {f"{name}.lokr_w1": first, f"{name}.lokr_w2": second, f"{name}.dora_scale": magnitude}
        made.layers.append((layer, _dora_formula(torch.kron(first, second), magnitude, 1)))
    return made


def _cayley(skew: Tensor) -> Tensor:
    one = torch.eye(len(skew))
    return (one + skew) @ torch.linalg.inv(one - skew)


def _block(size: int, *choices: int) -> int:
    return next(choice for choice in choices if size % choice == 0)


def oft_lycoris(source: Source) -> Kind:
    """Blocks of outputs; a bound of the angles for some layers, factors of the outputs for others."""
    made = Kind()
    for number, layer in enumerate(few(source.original)):
        size = _block(layer.out, 8, 4, 3, 2, 1)
        count = layer.out // size
        blocks = source.random(count, size, size)
        name = f"lycoris_{layer.flat}"
        made.tensors[f"{name}.oft_blocks"] = blocks
        skew = blocks - blocks.mT
        if number % 2:
            made.tensors[f"{name}.alpha"] = torch.tensor(0.01)
            skew = skew * min(1.0, 0.01 * layer.out / float(skew.pow(2).sum().sqrt() + 1e-8))
        turned = torch.block_diag(*(_cayley(one).T for one in skew))
        factors = torch.ones(layer.out, 1)
        if number % 3 == 0:
            made.tensors[f"{name}.rescale"] = factors = torch.rand(layer.out, 1, generator=source.generator) + 0.5
        made.layers.append((layer, _turned(turned, factors)))
    return made


def _turned(turned: Tensor, factors: Tensor) -> Formula:
    return lambda weight, scale: blend(weight, factors * (turned @ weight), scale)


def boft_lycoris(source: Source) -> Kind:
    """Two stages of blocks of four outputs: those of the second are of channels four apart, two by two."""
    made = Kind()
    for layer in few(source.original, 1):
        if layer.out % 8:
            continue
        blocks = source.random(2, layer.out // 4, 4, 4)
        whole = torch.eye(layer.out)
        for stage in range(2):
            reach = 2**stage * 2
            # channel c of a group of 2 * reach goes beside the one that is `reach` after it
            order = [
                group + offset + side * reach
                for group in range(0, layer.out, 2 * reach)
                for offset in range(reach)
                for side in range(2)
            ]
            permuted = torch.eye(layer.out)[order]
            turned = torch.block_diag(*(_cayley(one - one.T) for one in blocks[stage]))
            whole = permuted.T @ turned @ permuted @ whole
        made.tensors[f"lycoris_{layer.flat}.oft_blocks"] = blocks
        made.layers.append((layer, _turned(whole, torch.ones(layer.out, 1))))
    return made


def oft_peft(source: Source) -> Kind:
    """Blocks of inputs, as PEFT keeps what is above their diagonals; exact inverses."""
    made = Kind(header={"lora_adapter_metadata": json.dumps({"peft_type": "OFT", "use_cayley_neumann": False})})
    for layer in few(source.own):
        size = _block(layer.inside, 8, 4, 3, 2)
        count = layer.inside // size
        above = source.random(count, size * (size - 1) // 2)
        rotations = []
        for vector in above:
            upper = torch.zeros(size, size)
            upper[torch.ones(size, size).triu(1).bool()] = vector
            rotations.append(_cayley(-(upper - upper.T)))
        made.tensors[f"base_model.model.{layer.name}.oft_R.weight"] = above
        made.layers.append((layer, _inputs_turned(torch.block_diag(*rotations), torch.ones(layer.out, 1))))
    return made


def _inputs_turned(turned: Tensor, factors: Tensor) -> Formula:
    """PEFT computes W (x R), so W' = W R^T for rows x."""
    return lambda weight, scale: blend(weight, factors * (weight @ turned.T), scale)


def boft_peft(source: Source) -> Kind:
    """Two stages with PEFT's permutation between them, and factors of the outputs."""
    made = Kind()
    for layer in few(source.own, 1):
        if layer.inside % 8:
            continue
        blocks = source.random(2, layer.inside // 4, 4, 4)
        factors = torch.rand(layer.out, 1, generator=source.generator) + 0.5
        whole = torch.eye(layer.inside)
        for stage in range(2):
            skew = (blocks[stage] - blocks[stage].mT) / 2
            turned = torch.block_diag(*(_cayley(-one) for one in skew))
            wide = 4 * 2**stage
            order = []
            for group in range(0, layer.inside, wide):
                runs = [list(range(start, start + 2)) for start in range(group, group + wide, 2)]
                order += [channel for run in runs[0::2] + runs[1::2] for channel in run]
            permuted = torch.eye(layer.inside)[order]
            whole = permuted @ turned @ permuted.T @ whole
        made.tensors[f"base_model.model.{layer.name}.boft_R"] = blocks
        made.tensors[f"base_model.model.{layer.name}.boft_s"] = factors
        made.layers.append((layer, _inputs_turned(whole, factors)))
    return made


def glora(source: Source) -> Kind:
    """Every second layer in the order of older files."""
    made = Kind()
    for number, layer in enumerate(few(source.original)):
        rank = 3
        a1, a2 = source.random(layer.inside, rank, scale=0.2), source.random(rank, layer.inside, scale=0.2)
        b1, b2 = source.random(layer.out, rank, scale=0.2), source.random(rank, layer.inside, scale=0.2)
        name = f"lycoris_{layer.flat}"
        pairs = (a2, a1, b2, b1) if number % 2 else (a1, a2, b1, b2)
        made.tensors |= {f"{name}.{part}.weight": x for part, x in zip(("a1", "a2", "b1", "b2"), pairs, strict=True)}
        made.tensors[f"{name}.alpha"] = torch.tensor(2.0)
        made.layers.append((layer, _glora_formula(a1 @ a2, b1 @ b2, 2 / rank)))
    return made


def _glora_formula(right: Tensor, added: Tensor, alpha: float) -> Formula:
    return lambda weight, scale: weight + scale * alpha * (weight @ right + added)


def loha_wide(source: Source) -> Kind:
    """Of rank 20, which as a LoRA would be of rank 400."""
    made = Kind()
    for layer in few(source.original):
        (b1, a1), (b2, a2) = ((source.random(20, layer.inside), source.random(layer.out, 20)) for _ in range(2))
        name = f"lycoris_{layer.flat}"
        made.tensors |= {f"{name}.hada_w1_a": a1, f"{name}.hada_w1_b": b1, f"{name}.hada_w2_a": a2}
        made.tensors |= {f"{name}.hada_w2_b": b2, f"{name}.alpha": torch.tensor(10.0)}
        made.added |= layer.merged(0.5 * (a1 @ b1) * (a2 @ b2))
    return made


def replaced(source: Source) -> Kind:
    """set_weight of linear layers and of a norm."""
    made = Kind()
    for layer in source.own[::3]:
        weight = source.weights[f"{layer.modules[0]}.weight"]
        other = weight + source.random(*weight.shape, scale=0.05)
        made.tensors[f"diffusion_model.{layer.name}.set_weight"] = other
        made.layers.append((layer, _blended(other.flatten(1))))
    for name in _norm_names(source)[:2]:
        made.tensors[f"diffusion_model.{name}.set_weight"] = other = torch.rand_like(source.weights[f"{name}.weight"])
        made.replaced[f"{name}.weight"] = other
    return made


def _blended(other: Tensor) -> Formula:
    return lambda weight, scale: blend(weight, other, scale)


def _norm_names(source: Source) -> list[str]:
    """Norms of blocks; those outside of them, of captions, are refused by some families."""
    return [
        name.removesuffix(".weight")
        for name, weight in sorted(source.weights.items())
        if weight.dim() == 1
        and name.endswith(".weight")
        and "norm" in name
        and any(part.isdigit() for part in name.split("."))
    ]


def norms(source: Source) -> Kind:
    """Differences of all norms of blocks, as LightX2V and as LyCORIS write them, and of their biases."""
    made = Kind()
    for number, name in enumerate(_norm_names(source)):
        weight, bias = ("diff", "diff_b") if number % 2 else ("w_norm", "b_norm")
        made.tensors[f"{name}.{weight}"] = values = source.random(*source.weights[f"{name}.weight"].shape, scale=0.3)
        made.added[f"{name}.weight"] = values
        if f"{name}.bias" in source.weights:
            made.tensors[f"{name}.{bias}"] = values = source.random(*source.weights[f"{name}.bias"].shape)
            made.added[f"{name}.bias"] = values
    return made


def tables(source: Source) -> Kind:
    """Differences of the modulation of blocks and of the head."""
    made = Kind()
    for name in sorted(source.weights):
        if name.endswith("scale_shift_table"):
            block = name.removesuffix("scale_shift_table").removesuffix(".") or "head"
            made.tensors[f"diffusion_model.{block}.diff_m"] = values = source.random(*source.weights[name].shape)
            made.added[name] = values
    return made


def tucker(source: Source) -> Kind:
    """The patch embedding in the three factors of LyCORIS: LoHa."""
    made, (layer,) = Kind(), [layer for layer in source.own if layer.name == "patch_embedding"]
    kernel = source.weights["patch_embedding.weight"].shape
    made.added["patch_embedding.weight"] = total = torch.ones(kernel)
    for number in (1, 2):
        core = source.random(3, 3, *kernel[2:], scale=0.5)
        left, right = source.random(3, kernel[0], scale=0.5), source.random(3, kernel[1], scale=0.5)
        total *= sum(
            (left[i][:, None] * right[j][None])[(...,) + (None,) * len(kernel[2:])] * core[i, j]
            for i in range(3)
            for j in range(3)
        )
        made.tensors |= {
            f"lycoris_{layer.flat}.hada_t{number}": core,
            f"lycoris_{layer.flat}.hada_w{number}_a": left,
            f"lycoris_{layer.flat}.hada_w{number}_b": right,
        }
    return made


KINDS: Mapping[str, Callable[[Source], Kind]] = {
    writer.__name__: writer
    for writer in (
        dora_peft, dora_kohya, dora_by_input, dora_lokr, oft_lycoris, boft_lycoris, oft_peft, boft_peft, glora,
        loha_wide, replaced, norms, tables, tucker,
    )
}  # fmt: skip

ONLY: Mapping[str, tuple[str, ...]] = {
    "tables": ("WanPipeline", "HeliosPipeline"),
    "tucker": ("WanPipeline",),
}
"""Kinds that only some entries have a place for."""
