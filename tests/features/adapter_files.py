"""Files of adapters as the tools of many layouts write them, and what merging each adds to the checkpoint's weights.

Written from the formulas and the names of the layouts, without the code under test.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

Tensors = dict[str, Tensor]

FLUX: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("double_blocks.{}.img_attn.qkv", tuple(f"transformer_blocks.{{}}.attn.to_{part}" for part in "qkv")),
    ("double_blocks.{}.txt_attn.qkv", tuple(f"transformer_blocks.{{}}.attn.add_{part}_proj" for part in "qkv")),
    ("double_blocks.{}.img_attn.proj", ("transformer_blocks.{}.attn.to_out.0",)),
    ("double_blocks.{}.txt_attn.proj", ("transformer_blocks.{}.attn.to_add_out",)),
    ("double_blocks.{}.img_mlp.0", ("transformer_blocks.{}.ff.net.0.proj",)),
    ("double_blocks.{}.img_mlp.2", ("transformer_blocks.{}.ff.net.2",)),
    ("double_blocks.{}.txt_mlp.0", ("transformer_blocks.{}.ff_context.net.0.proj",)),
    ("double_blocks.{}.txt_mlp.2", ("transformer_blocks.{}.ff_context.net.2",)),
    ("double_blocks.{}.img_mod.lin", ("transformer_blocks.{}.norm1.linear",)),
    ("double_blocks.{}.txt_mod.lin", ("transformer_blocks.{}.norm1_context.linear",)),
    (
        "single_blocks.{}.linear1",
        (
            *(f"single_transformer_blocks.{{}}.attn.to_{part}" for part in "qkv"),
            "single_transformer_blocks.{}.proj_mlp",
        ),
    ),
    ("single_blocks.{}.linear2", ("single_transformer_blocks.{}.proj_out",)),
    ("single_blocks.{}.modulation.lin", ("single_transformer_blocks.{}.norm.linear",)),
    ("img_in", ("x_embedder",)),
    ("txt_in", ("context_embedder",)),
    ("time_in.in_layer", ("time_text_embed.timestep_embedder.linear_1",)),
    ("time_in.out_layer", ("time_text_embed.timestep_embedder.linear_2",)),
    ("vector_in.in_layer", ("time_text_embed.text_embedder.linear_1",)),
    ("vector_in.out_layer", ("time_text_embed.text_embedder.linear_2",)),
    ("final_layer.linear", ("proj_out",)),
    ("final_layer.adaLN_modulation.1", ("norm_out.linear",)),
)
WAN = (
    *(
        (f"blocks.{{}}.{theirs}.{letter}", (f"blocks.{{}}.{ours}.{name}",))
        for theirs, ours in (("self_attn", "attn1"), ("cross_attn", "attn2"))
        for letter, name in (("q", "to_q"), ("k", "to_k"), ("v", "to_v"), ("o", "to_out.0"))
    ),
    ("blocks.{}.ffn.0", ("blocks.{}.ffn.net.0.proj",)),
    ("blocks.{}.ffn.2", ("blocks.{}.ffn.net.2",)),
    ("time_embedding.0", ("condition_embedder.time_embedder.linear_1",)),
    ("time_embedding.2", ("condition_embedder.time_embedder.linear_2",)),
    ("text_embedding.0", ("condition_embedder.text_embedder.linear_1",)),
    ("text_embedding.2", ("condition_embedder.text_embedder.linear_2",)),
    ("time_projection.1", ("condition_embedder.time_proj",)),
    ("head.head", ("proj_out",)),
    ("patch_embedding", ("patch_embedding",)),
)
_Z_BLOCKS = ("layers", "noise_refiner", "context_refiner")
Z_IMAGE = (
    *(
        (f"{name}.{{}}.attention.qkv", tuple(f"{name}.{{}}.attention.to_{part}" for part in "qkv"))
        for name in _Z_BLOCKS
    ),
    *((f"{name}.{{}}.attention.out", (f"{name}.{{}}.attention.to_out.0",)) for name in _Z_BLOCKS),
    *(
        (f"{name}.{{}}.feed_forward.{part}", (f"{name}.{{}}.feed_forward.{part}",))
        for name in _Z_BLOCKS
        for part in ("w1", "w2", "w3")
    ),
    *((f"{name}.{{}}.adaLN_modulation.0", (f"{name}.{{}}.adaLN_modulation.0",)) for name in _Z_BLOCKS[:2]),
    ("x_embedder", ("all_x_embedder.2-1",)),
    ("final_layer.linear", ("all_final_layer.2-1.linear",)),
    ("cap_embedder.1", ("cap_embedder.1",)),
    ("t_embedder.mlp.0", ("t_embedder.mlp.0",)),
)
ORIGINAL: Mapping[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "FluxPipeline-schnell": FLUX,
    "WanPipeline": WAN,
    "ZImagePipeline": Z_IMAGE,
}
"""For the entries whose models were published with names of their own: those names, with what diffusers makes of
each. A family without has those of the checkpoint.
"""

SWAPPED = "final_layer.adaLN_modulation.1"
"""Of the original FLUX.1: (shift, scale), where the checkpoint has (scale, shift)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer under the name of a layout: the checkpoint's modules that are its rows, [out, in] of each."""

    name: str
    modules: tuple[str, ...]
    shapes: tuple[tuple[int, int], ...]
    swapped: bool = False

    @property
    def out(self) -> int:
        return sum(rows for rows, _ in self.shapes)

    @property
    def inside(self) -> int:
        return self.shapes[0][1]

    @property
    def flat(self) -> str:
        return self.name.replace(".", "_")

    def merged(self, change: Tensor, leaf: str = "weight") -> Tensors:
        """What a change of all rows, [out, in] or [out], adds to the checkpoint's tensors."""
        if self.swapped:
            change = change.roll(self.out // 2, 0)
        parts = change.split([rows for rows, _ in self.shapes])
        return {f"{module}.{leaf}": part for module, part in zip(self.modules, parts, strict=True)}


@dataclasses.dataclass(slots=True)
class Written:
    """A file: its tensors and header, what it adds to the checkpoint at scale 1, and the components it is for."""

    tensors: Tensors
    added: Tensors
    header: dict[str, str] | None = None
    components: tuple[str, ...] = ()


class Source:
    """What files are made of for one model: its layers, under both names, and numbers."""

    def __init__(self, entry: str, weights: Mapping[str, Tensor]) -> None:
        self.weights, self.entry = weights, entry
        self.generator = torch.Generator().manual_seed(11)
        shapes = {
            name.removesuffix(".weight"): (weight.shape[0], weight[0].numel())
            for name, weight in sorted(weights.items())
            if name.endswith(".weight") and weight.dim() > 1
        }
        self.own = [Layer(name, (name,), (shape,)) for name, shape in shapes.items()]
        self.original = list(self._original(shapes)) or self.own

    def _original(self, shapes: Mapping[str, tuple[int, int]]) -> Iterator[Layer]:
        for name, modules in ORIGINAL.get(self.entry, ()):
            for number in range(9) if "{}" in name else (0,):
                found = tuple(module.format(number) for module in modules)
                if found[0] in shapes:
                    of = tuple(shapes[module] for module in found)
                    swapped = self.entry.startswith("Flux") and name == SWAPPED
                    yield Layer(name.format(number), found, of, swapped)

    def random(self, *shape: int, scale: float = 0.1) -> Tensor:
        return torch.randn(shape, generator=self.generator) * scale

    def pair(self, layer: Layer, rank: int) -> tuple[Tensor, Tensor]:
        return self.random(rank, layer.inside), self.random(layer.out, rank)


def _low_rank(source: Source, layers: list[Layer], down: str, up: str, alpha: str = "") -> Written:
    """Ranks that differ, each with its own alpha if the layout has one."""
    made = Written({}, {})
    for number, layer in enumerate(layers):
        rank = (4, 2, 8)[number % 3]
        first, second = source.pair(layer, rank)
        names = {"name": layer.name, "flat": layer.flat}
        made.tensors |= {down.format(**names): first, up.format(**names): second}
        scale = 1.0
        if alpha:
            made.tensors[alpha.format(**names)] = torch.tensor(3.0)
            scale = 3.0 / rank
        made.added |= layer.merged(scale * second @ first)
    return made


def peft(source: Source) -> Written:
    """Mixed ranks, alphas by pattern, and names of the checkpoint."""
    made = Written({}, {})
    config = {"r": 4, "lora_alpha": 3, "rank_pattern": {}, "alpha_pattern": {}}
    for number, layer in enumerate(source.own):
        rank, alpha = (4, 2)[number % 2], (3, 5)[number % 2]
        first, second = source.pair(layer, rank)
        made.tensors[f"base_model.model.{layer.name}.lora_A.weight"] = first
        made.tensors[f"base_model.model.{layer.name}.lora_B.weight"] = second
        if number % 2:
            config["rank_pattern"][layer.name] = rank
            config["alpha_pattern"][layer.name.replace(".", r"\.")] = alpha
        made.added |= layer.merged(alpha / rank * second @ first)
    made.header = {"lora_adapter_metadata": json.dumps(config)}
    return made


def diffusers(source: Source) -> Written:
    """One alpha in the header, by component, and rsLoRA."""
    made = _low_rank(source, source.own, "transformer.{name}.lora_A.weight", "transformer.{name}.lora_B.weight")
    made.header = {"lora_adapter_metadata": '{"transformer.lora_alpha": 2, "transformer.use_rslora": true}'}
    for layer in source.own:
        rank = made.tensors[f"transformer.{layer.name}.lora_A.weight"].shape[0]
        for name in layer.merged(torch.zeros(layer.out, layer.inside)):
            made.added[name] = made.added[name] * 2 / rank**0.5
    made.components = ("transformer",)
    return made


def kohya(source: Source) -> Written:
    made = _low_rank(
        source, source.original, "lora_unet_{flat}.lora_down.weight", "lora_unet_{flat}.lora_up.weight",
        "lora_unet_{flat}.alpha",
    )  # fmt: skip
    made.tensors["lora_te1_text_model_encoder_layers_90_mlp_fc1.lora_down.weight"] = torch.ones(4, 8)
    made.tensors["lora_te1_text_model_encoder_layers_90_mlp_fc1.lora_up.weight"] = torch.ones(8, 4)
    return made


def block_diagonal(source: Source) -> Written:
    """As kohya's trainer writes fused layers whose parts it trained one by one."""
    made = Written({}, {})
    for layer in (layer for layer in source.original if len(layer.modules) > 1):
        downs = [source.random(4, layer.inside) for _ in layer.modules]
        ups = [source.random(rows, 4) for rows, _ in layer.shapes]
        made.tensors |= {
            f"lora_unet_{layer.flat}.lora_down.weight": torch.cat(downs),
            f"lora_unet_{layer.flat}.lora_up.weight": torch.block_diag(*ups),
            f"lora_unet_{layer.flat}.alpha": torch.tensor(6.0),
        }
        for module, up, down in zip(layer.modules, ups, downs, strict=True):
            made.added[f"{module}.weight"] = 6 / (4 * len(ups)) * up @ down
    return made


def onetrainer(source: Source) -> Written:
    return _low_rank(
        source, source.own, "lora_transformer_{flat}.lora_down.weight", "lora_transformer_{flat}.lora_up.weight",
        "lora_transformer_{flat}.alpha",
    )  # fmt: skip


def musubi(source: Source) -> Written:
    made = kohya(source)
    made.tensors = {key: tensor for key, tensor in made.tensors.items() if "_te1_" not in key}
    return dataclasses.replace(made, header={"ss_network_module": "networks.lora_any"})


def comfyui(source: Source) -> Written:
    """As ai-toolkit writes as well: original names, an alpha for some."""
    return _low_rank(
        source, source.original, "diffusion_model.{name}.lora_A.weight", "diffusion_model.{name}.lora_B.weight"
    )


def unprefixed(source: Source) -> Written:
    return _low_rank(source, source.original, "{name}.lora_down.weight", "{name}.lora_up.weight", "{name}.alpha")


def lightx2v(source: Source) -> Written:
    """Low rank, differences of biases, and whole differences of some layers; those of norms are zero."""
    made = _low_rank(
        source, source.original, "diffusion_model.{name}.lora_down.weight", "diffusion_model.{name}.lora_up.weight"
    )
    for number, layer in enumerate(source.original):
        if all(f"{module}.bias" in source.weights for module in layer.modules):
            bias = source.random(layer.out)
            made.tensors[f"diffusion_model.{layer.name}.diff_b"] = bias
            made.added |= layer.merged(bias, "bias")
        if number % 3 == 0:
            for side in ("down", "up"):
                del made.tensors[f"diffusion_model.{layer.name}.lora_{side}.weight"]
            whole = source.random(layer.out, layer.inside, scale=0.02)
            shape = (layer.out, *source.weights[f"{layer.modules[0]}.weight"].shape[1:])
            made.tensors[f"diffusion_model.{layer.name}.diff"] = whole.view(shape)
            made.added |= layer.merged(whole)
    norm = next(name for name, weight in sorted(source.weights.items()) if weight.dim() == 1 and "norm_q.w" in name)
    made.tensors[f"diffusion_model.{norm.removesuffix('.weight')}.diff"] = torch.zeros_like(source.weights[norm])
    return made


def biased(source: Source) -> Written:
    """PEFT's lora_bias: the second factor has a bias, which is scaled as the factor is."""
    made = Written({}, {}, {"lora_adapter_metadata": '{"lora_alpha": 2, "r": 4, "lora_bias": true}'})
    for layer in source.own:
        if f"{layer.name}.bias" in source.weights:
            first, second = source.pair(layer, 4)
            bias = source.random(layer.out)
            made.tensors |= {
                f"{layer.name}.lora_A.weight": first,
                f"{layer.name}.lora_B.weight": second,
                f"{layer.name}.lora_B.bias": bias,
            }
            made.added |= layer.merged(0.5 * second @ first) | layer.merged(0.5 * bias, "bias")
    return made


def loha(source: Source) -> Written:
    made = Written({}, {})
    for layer in source.original:
        (b1, a1), (b2, a2) = (
            (source.random(3, layer.inside, scale=0.3), source.random(layer.out, 3, scale=0.3)) for _ in range(2)
        )
        name = f"lycoris_{layer.flat}"
        made.tensors |= {
            f"{name}.hada_w1_a": a1, f"{name}.hada_w1_b": b1, f"{name}.hada_w2_a": a2, f"{name}.hada_w2_b": b2,
            f"{name}.alpha": torch.tensor(2.0),
        }  # fmt: skip
        made.added |= layer.merged(2 / 3 * (a1 @ b1) * (a2 @ b2))
    return made


def lokr(source: Source) -> Written:
    """Whole and decomposed factors, also of layers that are several of the checkpoint: their rows are no multiples of
    the blocks of the product.
    """
    made = Written({}, {})
    for number, layer in enumerate(source.original):
        name, (rows, columns) = f"lora_unet_{layer.flat}", (4, 2)
        first = source.random(rows, columns, scale=0.3)
        if number % 2:
            second = source.random(layer.out // rows, layer.inside // columns, scale=0.3)
            # a huge alpha, which does not count where nothing is decomposed
            made.tensors |= {f"{name}.lokr_w2": second, f"{name}.alpha": torch.tensor(1e9)}
            scale = 1.0
        else:
            up, down = source.random(layer.out // rows, 3, scale=0.3), source.random(3, layer.inside // columns)
            made.tensors |= {f"{name}.lokr_w2_a": up, f"{name}.lokr_w2_b": down, f"{name}.alpha": torch.tensor(2.0)}
            second, scale = up @ down, 2 / 3
        made.tensors[f"{name}.lokr_w1"] = first
        made.added |= layer.merged(scale * torch.kron(first, second))
    return made


def xlabs(source: Source) -> Written:
    """No alpha; attention alone."""
    names = {
        "double_blocks.{}.img_attn.qkv": "double_blocks.{}.processor.qkv_lora1",
        "double_blocks.{}.txt_attn.qkv": "double_blocks.{}.processor.qkv_lora2",
        "double_blocks.{}.img_attn.proj": "double_blocks.{}.processor.proj_lora1",
        "double_blocks.{}.txt_attn.proj": "double_blocks.{}.processor.proj_lora2",
        "single_blocks.{}.linear1": "single_blocks.{}.processor.qkv_lora",
        "single_blocks.{}.linear2": "single_blocks.{}.processor.proj_lora",
    }
    theirs = {old.format(n): new.format(n) for n in range(9) for old, new in names.items()}
    layers = []
    for layer in source.original:
        if layer.name in theirs:
            layers.append(
                dataclasses.replace(layer, name=theirs[layer.name], modules=layer.modules[:3], shapes=layer.shapes[:3])
            )
    return _low_rank(source, layers, "{name}.down.weight", "{name}.up.weight")


def with_copies(source: Source) -> Written:
    """What is fused is there once more, part by part: it counts once."""
    made = Written({}, {})
    for layer in (layer for layer in source.original if len(layer.modules) > 1):
        down, up = source.pair(layer, 4)
        made.tensors[f"diffusion_model.{layer.name}.lora_A.weight"] = down
        made.tensors[f"diffusion_model.{layer.name}.lora_B.weight"] = up
        made.added |= layer.merged(up @ down)
        for module, part in zip(layer.modules, up.split([rows for rows, _ in layer.shapes]), strict=True):
            made.tensors[f"diffusion_model.{module}.lora_A.weight"] = down.clone()
            made.tensors[f"diffusion_model.{module}.lora_B.weight"] = part.clone()
    return made


def second_expert(source: Source) -> Written:
    made = _low_rank(source, source.original, "low_noise.{name}.lora_A.weight", "low_noise.{name}.lora_B.weight")
    return dataclasses.replace(made, components=("transformer_2",))


WRITERS: Mapping[str, Callable[[Source], Written]] = {
    writer.__name__: writer
    for writer in (
        peft, diffusers, kohya, block_diagonal, onetrainer, musubi, comfyui, unprefixed, lightx2v, biased, loha, lokr,
        xlabs, with_copies, second_expert,
    )
}  # fmt: skip

ONLY: Mapping[str, tuple[str, ...]] = {
    "xlabs": ("FluxPipeline-schnell",),
    "block_diagonal": ("FluxPipeline-schnell", "ZImagePipeline"),
    "with_copies": ("FluxPipeline-schnell", "ZImagePipeline"),
    "second_expert": ("WanPipeline",),
}
"""Layouts that only some entries have."""
