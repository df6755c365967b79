"""One model under test with any features turned on, and the figures of what it did."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from omni_grpc.loading.checkpoint import WEIGHT_FILE, load_weights
from omni_grpc.nn.stack import Stack, main_stack
from omni_grpc.types.lora import Lora
from omni_grpc.types.request import Request
from omni_grpc.types.step_cache import CacheDraft
from tests.models.model import Entry, Model
from tests.ops.attention_cases import ON_CPU

IDENTITY = (1.0, 0.0)
"""The polynomial that leaves a change as it is."""

FAMILIES = {
    "dual": "QwenImagePipeline",
    "dual and parallel single": "FluxPipeline-schnell",
    "cross": "WanPipeline",
    "single": "ZImagePipeline",
}
"""Family of blocks -> the entry that stands for it where features are tried two by two."""

FIRST, SECOND = "first", "second"
"""Adapters: one in PEFT's layout, of rank 2 with alpha 3; one in diffusers', with an alpha for each layer, whose layers
take turns: LoRA of rank 4, LoKr, a whole difference, and LoRA with a difference of the bias.
"""

CACHE = {"cache_backend": "tea_cache", "cache_config": {"rel_l1_thresh": 0.0, "coefficients": list(IDENTITY)}}


def tea(threshold: float) -> CacheDraft:
    """TeaCache with a threshold."""
    return CacheDraft(method="tea_cache", given={"rel_l1_thresh": threshold})


NEVER = tea(0.0)
FP8, INT8 = {"quantization": "fp8"}, {"quantization": "int8"}
ATTENTION = {"diffusion_attention_backend": ON_CPU, "diffusion_attention_config": {"default": {"precision": "fp32"}}}
INNER_STEPS_BF16, INNER_STEPS_FP8 = (
    {"diffusion_attention_config": {"schedule": [{"steps": [0.2, 0.8], "layers": [0, 1], "precision": precision}]}}
    for precision in ("bf16", "fp8")
)
OFFLOAD = {"enable_layerwise_offload": True}


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What became of one request: latents [outputs, T, C]; step by step, its forwards, rows that a cache answered in
    some of them, and row evaluations that it answered and had computed; and the sum of the changes that it measured,
    with their number.
    """

    latents: Tensor
    evals: tuple[int, ...]
    reused: tuple[int, ...]
    answered: tuple[int, ...]
    computed: tuple[int, ...]
    change: float
    measured: int


class Suite:
    """A model's tiny checkpoint, adapters for it, and models that are loaded once for each set of settings."""

    def __init__(self, entry: Entry, folder: Path) -> None:
        self.entry = entry
        self.folder = entry.build(folder / "checkpoint")
        self.adapters = {name: folder / f"{name}.safetensors" for name in (FIRST, SECOND)}
        self.lora = {"lora": {name: str(path) for name, path in self.adapters.items()}}
        self._models: dict[str, Model] = {}
        self.components = tuple(name for name in self.load().spec.weights if (self.folder / name).is_dir())
        self.write_adapters()

    def load(self, *features: Mapping[str, Any], **settings: Any) -> Model:
        for feature in features:
            settings |= feature
        key = repr(sorted(settings.items()))
        if key not in self._models:
            self._models[key] = Model(self.entry, self.folder, **settings)
        return self._models[key]

    @functools.cached_property
    def without(self) -> dict[str, Run]:
        """What becomes of the company without any feature."""
        return run(self.load(), *company(self.load()))

    def weights(self, component: str) -> dict[str, Tensor]:
        return safetensors.torch.load_file(self.folder / component / WEIGHT_FILE)

    def load_weights(self, model: Model, component: str, weights: Mapping[str, Tensor]) -> nn.Module:
        """A copy of a model's denoiser with these weights, by the checkpoint's names."""
        module = copy.deepcopy(denoisers(model)[component])
        with tempfile.TemporaryDirectory() as folder:
            save(weights, Path(folder) / WEIGHT_FILE)
            load_weights(module, Path(folder), model.spec.weights[component], device="cpu", dtype=model.dtype)
        return module

    def changes(self, component: str) -> dict[str, dict[str, Tensor]]:
        """For each adapter, what it adds to tensors of the checkpoint at scale 1."""
        first = {name: 3 / 2 * up[:, :2] @ down[:2] for name, (down, up) in self._factors(component).items()}
        second = {key: change for _, changes in self._mixed(component).values() for key, change in changes.items()}
        return {FIRST: first, SECOND: second}

    def keys(self, component: str) -> dict[str, int]:
        """For each adapter, how many keys it has for a component."""
        second = sum(len(tensors) for tensors, _ in self._mixed(component).values())
        return {FIRST: 2 * len(self._factors(component)), SECOND: second}

    def write_adapters(self) -> None:
        first: dict[str, Tensor] = {}
        second: dict[str, Tensor] = {"text_encoder.layer.lora_A.weight": torch.zeros(2, 2)}
        for component in self.components:
            for name, (down, up) in self._factors(component).items():
                layer = f"{component}.{name.removesuffix('.weight')}"
                first[f"base_model.model.{layer}.lora_A.default.weight"] = down[:2]
                first[f"base_model.model.{layer}.lora_B.default.weight"] = up[:, :2]
            for layer, (tensors, _) in self._mixed(component).items():
                second |= {f"{component}.{layer}.{part}": tensor for part, tensor in tensors.items()}
        config = '{"lora_alpha": 3, "r": 2}'
        save(first, self.adapters[FIRST], {"lora_adapter_metadata": config})
        save(second | {"text_encoder.layer.lora_B.weight": torch.zeros(2, 2)}, self.adapters[SECOND])

    def _mixed(self, component: str) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
        """By layer, the tensors of SECOND, by the end of their keys, and what they add to tensors of the checkpoint."""
        generator, weights = torch.Generator().manual_seed(6), self.weights(component)
        made = {}
        for number, (name, (down, up)) in enumerate(self._factors(component).items()):
            weight, layer = weights[name], name.removesuffix(".weight")
            whole = torch.randn(weight.shape, generator=generator) * weight.std() / 4
            if number % 4 == 1:
                small, large = torch.randn(2, 2, generator=generator), whole[::2, ::2].contiguous()
                tensors, added = {"lokr_w1": small, "lokr_w2": large}, {name: torch.kron(small, large)}
            elif number % 4 == 2:
                tensors, added = {"diff": whole}, {name: whole}
            else:
                tensors = {"lora.down.weight": down, "lora.up.weight": up, "alpha": torch.tensor(8.0)}
                added = {name: 8 / 4 * up @ down}
            if number % 4 == 3 and f"{layer}.bias" in weights:
                bias = torch.randn(len(weight), generator=generator) / 10
                tensors, added = tensors | {"diff_b": bias}, added | {f"{layer}.bias": bias}
            made[layer] = tensors, added
        return made

    def _factors(self, component: str) -> dict[str, tuple[Tensor, Tensor]]:
        """down [4, in] and up [out, 4] for each matrix of the checkpoint: small beside the weight."""
        generator = torch.Generator().manual_seed(5)
        return {
            name: (
                torch.randn(4, weight.shape[1], generator=generator) * weight.std() / 4,
                torch.randn(weight.shape[0], 4, generator=generator) / 4,
            )
            for name, weight in sorted(self.weights(component).items())
            if weight.dim() == 2 and name.endswith(".weight")
        }


def save(tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None) -> None:
    safetensors.torch.save_file({key: x.contiguous() for key, x in tensors.items()}, path, metadata)


def company(model: Model, cache: CacheDraft | None = None) -> list[tuple[int, Request]]:
    """Unlike sizes, numbers of steps, guidance and adapters, each with the tick at which it joins."""
    loras = [
        (),
        (Lora(lora_id=FIRST, scale=0.7),),
        (Lora(lora_id=SECOND),),
        (Lora(lora_id=FIRST), Lora(lora_id=SECOND, scale=-0.5)),
    ]
    if not model.facts.found.loras:
        loras = [()] * 4
    drafts = {
        "plain": (0, model.draft(steps=5, seeds=(1,), loras=loras[0], cache=cache)),
        "pair": (0, model.guided(wider=1, longer=1, steps=3, seeds=(2, 3), loras=loras[1], cache=cache)),
        "late": (1, model.draft(higher=1, steps=4, seeds=(4,), loras=loras[2], cache=cache)),
        "weak": (2, model.guided(steps=4, seeds=(5,), scale=2.0, loras=loras[3], cache=cache)),
    }
    return [(tick, model.request(draft, name)) for name, (tick, draft) in drafts.items()]


def run(model: Model, *joins: tuple[int, Request]) -> dict[str, Run]:
    """Runs requests that join at their ticks, to the end of each."""
    runner, adapters = model.runner(), model.residency.adapters
    running: list[str] = []
    steps: dict[str, list[Any]] = {request.id: [] for _, request in joins}
    for tick in itertools.count():
        for request in [request for at, request in joins if at == tick]:
            # as the worker does: adapters may have left the device meanwhile
            if adapters is not None:
                adapters.admit(request)
            runner.prepare(request)
            running.append(request.id)
        report = runner.step(tuple(running))
        assert report.broken == ()
        for progress in report.progress:
            steps[progress.id].append(progress)
            if progress.finished:
                running.remove(progress.id)
                if adapters is not None:
                    adapters.release(progress.id)
        if not running and tick >= max(at for at, _ in joins):
            break
    return {request.id: _figures(model.result(runner, request).latents, steps[request.id]) for _, request in joins}


def alone(model: Model, request: Request) -> Run:
    return run(model, (0, request))[request.id]


def _figures(latents: Tensor, steps: list[Any]) -> Run:
    counts = [count for progress in steps for count in progress.reports.cache]
    return Run(
        latents=latents,
        evals=tuple(progress.evals for progress in steps),
        reused=tuple(progress.reports.rows_reused for progress in steps),
        answered=tuple(sum(count.hits for count in progress.reports.cache) for progress in steps),
        computed=tuple(sum(count.misses for count in progress.reports.cache) for progress in steps),
        change=sum(count.change for count in counts),
        measured=sum(count.measured for count in counts),
    )


def halfway(model: Model) -> float:
    """A threshold that the accumulated change of a request reaches about every second time."""
    measured = alone(model, model.request(model.draft(steps=6, seeds=(1,), cache=NEVER)))
    return 1.5 * measured.change / measured.measured


def denoisers(model: Model) -> dict[str, nn.Module]:
    """The denoisers of a pipeline by the names of their components, wherever it keeps them."""
    named = {path.rpartition(".")[2]: module for path, module in model.pipeline.named_modules()}
    return {component: named[component] for component in model.spec.weights if component in named}


def stacks(model: Model) -> list[Stack]:
    """The main stack of every denoiser."""
    return [main_stack(denoiser)[1] for denoiser in denoisers(model).values()]


def far(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max())


def cosine(mine: Tensor, theirs: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0))
