"""FLUX.1, text to image: what happens before, around and after the denoiser."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.models.flux import PATCH
from omni_grpc.models.flux.flux_transformer import FluxTransformer
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import JOINT, Row, Rows
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import alone
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, dynamic_shift
from omni_grpc.pipeline.state import Conditioning, State, Tables, prompts
from omni_grpc.types.request import Request
from omni_grpc.types.spec import Checkpoint


class Reference(NamedTuple):
    """A picture to go by, as tokens [T', C] that lie on a grid."""

    tokens: Tensor
    grid: Grid


class FluxPipeline(Pipeline):
    """A prompt is read twice: T5 makes the text tokens, CLIP one vector that modulates the blocks."""

    def __init__(self, checkpoint: Checkpoint, *, transformer: FluxTransformer, clip: Any, t5: Any, vae: Any) -> None:
        """clip, t5: each a tokenizer and its text encoder."""
        super().__init__()
        self.checkpoint = checkpoint
        self.transformer = transformer
        self.tokenizer, self.text_encoder = clip
        self.tokenizer_2, self.text_encoder_2 = t5
        self.vae = vae
        self.dtype = transformer.proj_out.weight.dtype
        self.device = transformer.proj_out.weight.device
        self.size_multiple = checkpoint.limits.size_multiple

    @classmethod
    def load(cls, loader: Loader) -> Self:
        return cls(
            loader.checkpoint,
            transformer=loader.denoiser("transformer", FluxTransformer.from_config),
            clip=(loader.tokenizer("tokenizer"), loader.module("text_encoder")),
            t5=(loader.tokenizer("tokenizer_2"), loader.module("text_encoder_2")),
            vae=loader.module("vae"),
        )

    def prepare(self, request: Request) -> list[State]:
        reference = self.reference(request)
        states = [self._state(request, output, seed) for output, seed in enumerate(request.seeds)]
        texts = prompts(request)
        conds = {branch: self._condition(states[0], branch, text, reference) for branch, text in texts.values()}
        counts = {field: len(self.tokenizer_2(text, verbose=False).input_ids) for field, (_, text) in texts.items()}
        most = self.checkpoint.limits.max_prompt_tokens
        for state in states:
            state.cond = dict(conds)
            state.context = None if reference is None else reference.tokens
            state.prompt_tokens = min(counts["prompt"], most)
            state.dropped_tokens = {field: count - most for field, count in counts.items() if count > most}
        return states

    def reference(self, request: Request) -> Reference | None:
        """The picture to go by, where there is one."""
        return None

    def _state(self, request: Request, output: int, seed: int) -> State:
        """Noise comes from a generator on the CPU: a seed means the same noise on any device and in any batch."""
        grid = self.grid(request.width, request.height)
        generator = torch.Generator().manual_seed(seed)
        shape = (self.vae.config.latent_channels, 1, PATCH * grid.height, PATCH * grid.width)
        noise = torch.randn(shape, generator=generator, dtype=self.dtype).to(self.device)
        config = self.checkpoint.configs["scheduler"]
        sigmas = np.linspace(1.0, 1 / request.steps, request.steps).tolist()
        levels = Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(config, grid.tokens))
        return State(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=grid.pack(noise),
            grid=grid,
            schedule=Schedule(config, levels, device=self.device, name=request.scheduler),
            guidance=request.guidance,
        )

    def grid(self, width: int, height: int) -> Grid:
        """The tokens of a picture of that size in pixels."""
        return Grid(height=height // self.size_multiple, width=width // self.size_multiple, patch=PATCH)

    def _condition(self, state: State, branch: str, text: str, reference: Reference | None) -> Conditioning:
        embeds, pooled = self._encode(text)
        grids = [state.grid] if reference is None else [state.grid, reference.grid]
        row = Row.of(txt=len(embeds), img=sum(grid.tokens for grid in grids))
        with alone(state, branch, row):
            txt = self.transformer.text(embeds)
            t = torch.tensor(state.schedule.timesteps, device=self.device).to(self.dtype) / 1000
            modulation = self.transformer.modulation(t, pooled, state.guidance.scale)
        rope = self.transformer.rope(len(embeds), *((grid.height, grid.width) for grid in grids))
        tables = Tables({name: table[:, None] for name, table in modulation.items()})
        return Conditioning(row=row, constants={"txt": ("txt", txt), "rope": (JOINT, rope)}, tables=tables)

    def _encode(self, text: str) -> tuple[Tensor, Tensor]:
        """T5's hidden states [T_txt, C] and CLIP's pooled vector [1, C].

        Every prompt is as long as can be: the models were trained with the padding of T5 in view, and see it.
        """
        hidden = self.text_encoder_2(self._ids(self.tokenizer_2, text, self.checkpoint.limits.max_prompt_tokens))
        pooled = self.text_encoder(self._ids(self.tokenizer, text, self.tokenizer.model_max_length))
        return hidden.last_hidden_state[0], pooled.pooler_output

    def _ids(self, tokenizer: Any, text: str, length: int) -> Tensor:
        ids: Tensor = tokenizer(
            text, padding="max_length", max_length=length, truncation=True, return_tensors="pt"
        ).input_ids
        return ids.to(self.device)

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            velocity: Tensor = self.transformer(batch["latents"], batch)
        return velocity

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        config = self.vae.config
        unscaled = state.grid.unpack(latents)[:, 0] / config.scaling_factor + config.shift_factor
        pixels = self.vae.decode(unscaled[None], return_dict=False)[0]
        return [self.checkpoint.spec.postprocess(pixels[0])]
