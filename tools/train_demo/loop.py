"""Trains the transformer and the text encoder together, from where the last run ended."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tools.train_demo.denoiser import TextEncoder, Transformer, rope
from tools.train_demo.pool import TEXT, Pool
from tools.train_demo.ranks import Flat, agreed

PEAK_RATE, WARM_UP, LAST_RATE = 1.2e-3, 500, 0.02
DROPOUT = 0.1
"""Share of captions that are replaced by the empty one, so that guidance has its second prediction."""
SHIFT = 1.65
"""Of the noise levels that are trained: what the scheduler's dynamic shift is for 256 tokens, exp(0.5)."""
EMA = 0.999
TOKENS = 320 * (64 + TEXT)
"""Of one step on one GPU, text included, whatever the size of its pictures."""
CLOCK = 25
"""Steps between two looks at the clock."""


class Model(nn.Module):
    """What is trained: velocity of noised latents, given token ids."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.text_encoder = TextEncoder(vocabulary)
        self.transformer = Transformer()

    def forward(self, latents: Tensor, t: Tensor, ids: Tensor, lengths: Tensor, rope: Tensor) -> Tensor:
        text = self.text_encoder(ids)
        places = torch.arange(text.shape[1] + latents.shape[1], device=ids.device)
        mask = (places < lengths[:, None]) | (places >= text.shape[1])
        out: Tensor = self.transformer(latents, t, text, rope, mask[:, None, None])
        return out


@contextlib.contextmanager
def compiled_layers(model: Model, backend: str | Callable[..., Any] = "inductor") -> Iterator[None]:
    """Layers run compiled inside, each kind for the shapes it meets: elementwise passes bound so small a model."""
    layers = [*model.text_encoder.layers, *model.transformer.transformer_blocks]
    for layer in layers:
        layer.forward = torch.compile(layer.forward, dynamic=False, backend=backend)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


@dataclasses.dataclass(slots=True)
class Data:
    """The scenes of one size on the GPU: latents [n, N, 64], ids [n, P + TEXT], lengths [n], rotary tables."""

    size: tuple[int, int]
    latents: Tensor
    ids: Tensor
    lengths: Tensor
    rope: Tensor

    @classmethod
    def of(cls, pool: Pool, latents: Tensor, mean: Tensor, std: Tensor) -> Data:
        normed = (latents - mean.view(1, -1, 1, 1)) / std.view(1, -1, 1, 1)
        height, width = latents.shape[2] // 2, latents.shape[3] // 2
        tokens = (
            normed.unflatten(2, (height, 2)).unflatten(4, (width, 2)).permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
        )
        ids, lengths = (torch.from_numpy(array.astype(np.int64)).cuda() for array in (pool.tokens, pool.lengths))
        return cls(pool.size, tokens.contiguous(), ids, lengths, rope(TEXT, height, width).cuda())


class Step:
    """Forward and backward of one size as a CUDA graph: so small a model is otherwise bound by launches."""

    def __init__(self, model: Model, data: Data, empty: tuple[Tensor, int], *, compiled: bool = False) -> None:
        count = TOKENS // (data.latents.shape[1] + TEXT)
        self.data, self.count = data, count
        self.latents = torch.zeros_like(data.latents[:count])
        self.ids, self.lengths = torch.zeros_like(data.ids[:count]), torch.ones_like(data.lengths[:count])
        with compiled_layers(model) if compiled else contextlib.nullcontext():
            self._record(model, empty)

    def _record(self, model: Model, empty: tuple[Tensor, int]) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._run(model, empty)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # other threads, such as NCCL's watchdog, may ask for events meanwhile
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.loss = self._run(model, empty)

    def _run(self, model: Model, empty: tuple[Tensor, int]) -> Tensor:
        clean = self.latents.float()
        uniform = torch.rand(self.count, device="cuda")
        t = SHIFT * uniform / (1 + (SHIFT - 1) * uniform)
        noise = torch.randn_like(clean)
        noised = torch.lerp(clean, noise, t.view(-1, 1, 1))
        dropped = torch.rand(self.count, device="cuda") < DROPOUT
        ids = torch.where(dropped[:, None], empty[0], self.ids)
        lengths = torch.where(dropped, empty[1], self.lengths)
        with torch.autocast("cuda", torch.bfloat16):
            velocity = model(noised, t, ids, lengths, self.data.rope)
        loss = (velocity.float() - (noise - clean)).pow(2).mean()
        loss.backward()
        return loss.detach()

    def __call__(self, generator: torch.Generator) -> Tensor:
        chosen = torch.randint(len(self.data.lengths), (self.count,), device="cuda", generator=generator)
        self.latents.copy_(self.data.latents[chosen])
        self.ids.copy_(self.data.ids[chosen])
        self.lengths.copy_(self.data.lengths[chosen])
        self.graph.replay()
        return self.loss


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long this run trains, and which part of the whole training it is: seconds before it and in all. `keep` gets
    the state every `every` seconds. No size is compiled that comes after `compile` seconds.
    """

    seconds: float
    before: float
    total: float
    seed: int
    keep: Callable[[dict[str, Any]], None]
    every: float = 120.0
    compile: float = 0.0


def _step(model: Model, data: Data, empty: tuple[Tensor, int], until: float) -> Step:
    compiled = time.monotonic() < until
    step = Step(model, data, empty, compiled=compiled)
    torch.cuda.synchronize()
    began = time.monotonic()
    for _ in range(20):
        step.graph.replay()
    torch.cuda.synchronize()
    print(f"{data.size}: {50 * (time.monotonic() - began):.1f} ms{', compiled' if compiled else ''}", flush=True)
    return step


def rate(share: float, step: int) -> float:
    """Warm up, hold, and from the middle on fall to the end along a cosine."""
    fall = 0.5 * (1 + np.cos(np.pi * min(1.0, max(0.0, share - 0.4) / 0.6)))
    return PEAK_RATE * min(1.0, (step + 1) / WARM_UP) * float(LAST_RATE + (1 - LAST_RATE) * fall)


def train(
    model: Model,
    state: Mapping[str, Any] | None,
    data: Sequence[Data],
    weights: Sequence[float],
    empty: tuple[Tensor, int],
    plan: Plan,
) -> dict[str, Any]:
    """Trains and returns the state to go on from: averages, optimiser, step, and a record of losses."""
    began, kept, losses = time.monotonic(), 0.0, []
    flat = Flat(model.cuda().train().parameters())
    optimizer = torch.optim.AdamW([flat.value], PEAK_RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    average = flat.value.detach().clone()
    step, records = 0, []
    if state is not None:
        step, records = state["step"], list(state["records"])
        average.copy_(flat.join(state["average"]))
        if "m" in state:
            optimizer.state[flat.value] = {
                "step": torch.tensor(float(step), device="cuda"),
                "exp_avg": flat.join(state["m"]),
                "exp_avg_sq": flat.join(state["v"]).square(),
            }

    def current() -> dict[str, Any]:
        moments = optimizer.state[flat.value]
        tensors = {
            "average": average,
            "parameters": flat.value.detach(),
            "m": moments["exp_avg"],
            "v": moments["exp_avg_sq"].sqrt(),
        }
        return {"step": step, "records": records} | {name: flat.split(x.cpu()) for name, x in tensors.items()}

    steps = [_step(model, part, empty, began + plan.compile) for part in data]
    generator = torch.Generator("cuda").manual_seed(plan.seed)
    chooser = np.random.default_rng(plan.seed)
    share_of = np.array(weights) / sum(weights)
    while True:
        if step % CLOCK == 0 or not losses:
            elapsed = agreed(time.monotonic() - began)
            if elapsed >= plan.seconds:
                return current()
            if elapsed - kept >= plan.every:
                kept = elapsed
                plan.keep(current())
        flat.value.grad.zero_()  # type: ignore[union-attr]
        losses.append(steps[chooser.choice(len(steps), p=share_of)](generator).clone())
        flat.average_grad(1.0)
        optimizer.param_groups[0]["lr"] = rate((plan.before + elapsed) / plan.total, step)
        optimizer.step()
        average.lerp_(flat.value.detach(), 1 - min(EMA, (1 + step) / (10 + step)))
        step += 1
        if step % 1000 == 0:
            records.append({"step": step, "loss": float(torch.stack(losses).mean())})
            losses.clear()
            print(f"denoiser {step}: loss {records[-1]['loss']:.4f}, {elapsed:.0f} s", flush=True)
