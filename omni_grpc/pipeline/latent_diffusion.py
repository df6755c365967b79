"""LatentDiffusionPipeline: what model families have in common, from a request to its states and back to pixels."""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from omni_grpc.loading.loader import Loader
from omni_grpc.nn.linear import activate
from omni_grpc.nn.rows import Row, Rows
from omni_grpc.pipeline.base import Pipeline
from omni_grpc.pipeline.batch import LATENTS, single_row
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.schedule import Levels, Schedule, SchedulerClass, dynamic_shift
from omni_grpc.pipeline.state import COND, State, Tables, prompts
from omni_grpc.pipeline.tables import SharedTables
from omni_grpc.pipeline.text_encoders import PROMPT, PromptEmbeds
from omni_grpc.pipeline.vae import Vae
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Request

Constants = dict[str, tuple[str, Tensor]]
"""Tensors that no step changes: name -> (stream, [tokens of that stream, ...])."""


class LatentDiffusionPipeline(Pipeline):
    """Text encoder, denoiser over packed tokens, VAE: images and videos alike.

    A family gives its components to `__init__` by the names that diffusers has for them (`transformer`,
    `text_encoder`, `vae`), implements `condition`, and overrides what else differs.

    patch: latent pixels along the edge of a token. latents_dtype: of noise and latents; None: that of the weights.
    state_type: the class of its states. schedulers: scheduler classes of the family's own, by name.
    """

    transformer: Any
    text_encoder: Any
    vae: Vae
    patch: ClassVar[int] = 2
    latents_dtype: ClassVar[torch.dtype | None] = None
    state_type: ClassVar[type[State]] = State
    schedulers: ClassVar[Mapping[str, SchedulerClass]] = MappingProxyType({})

    def __init__(self, loader: Loader, **components: Any) -> None:
        super().__init__()
        self.checkpoint, self.spec, self.configs = loader.checkpoint, loader.checkpoint.spec, loader.checkpoint.configs
        self.device, self.dtype = loader.device, loader.dtype
        for name, component in components.items():
            setattr(self, name, component)
        self.shared_tables = SharedTables(self)

    # --- prepare ------------------------------------------------------------------------------------------------------

    def prepare(self, request: Request) -> list[State]:
        inputs = self.encode_inputs(request)
        states = [self.new_state(request, output, inputs) for output in range(len(request.seeds))]
        # what a feature changes of an encoder may depend on the request
        with single_row(states[0], COND, Row(((PROMPT, ((0, 1),)),))):
            embeds = self.encode_prompts(request, inputs)
        self.condition(states, embeds, inputs)
        dropped = {field: embeds[branch].dropped for field, (branch, _) in prompts(request).items()}
        for state in states:
            state.prompt_tokens = embeds[COND].tokens
            state.dropped_tokens = {field: count for field, count in dropped.items() if count}
        return states

    def encode_inputs(self, request: Request) -> Any:
        """Encodes the images and videos of a request, once for all its outputs; by default `preprocess` alone. The
        methods below get the result as `inputs`.
        """
        return self.preprocess(request)

    def preprocess(self, request: Request) -> Mapping[str, Any]:
        """The images and videos of a request as tensors in -1..1, by input: see ModelSpec.preprocess."""
        made: Mapping[str, Any] = self.spec.preprocess(request, self.configs)
        return made

    def encode_prompts(self, request: Request, inputs: Any) -> dict[str, PromptEmbeds]:
        """Branch -> its encoded prompt. `inputs` are for text encoders that also read the images."""
        return {branch: self.encode_prompt(prompt) for branch, prompt in prompts(request).values()}

    def encode_prompt(self, prompt: str) -> PromptEmbeds:
        embeds: PromptEmbeds = self.text_encoder(prompt)
        return embeds

    # --- states -------------------------------------------------------------------------------------------------------

    def new_state(self, request: Request, output: int, inputs: Any) -> State:
        """The state of one output before it is conditioned: its noise and its schedule.

        All noise comes from a generator on the CPU: a seed means the same noise on any device and in any batch.
        """
        seed = request.seeds[output]
        generator = torch.Generator().manual_seed(seed)
        grid = self.grid(request.width, request.height, request.num_frames)
        more = self.state_fields(request, grid, inputs, generator)
        return self.state_type(
            request=request,
            output=output,
            seed=seed,
            generator=generator,
            latents=self.noise(grid, generator),
            grid=grid,
            schedule=self.schedule(request, grid),
            guidance=request.guidance,
            **more,
        )

    def state_fields(self, request: Request, grid: Grid, inputs: Any, generator: torch.Generator) -> Mapping[str, Any]:
        """Further fields of `state_type`. What they draw from the generator is drawn before the noise."""
        return {}

    def grid(self, width: int, height: int, num_frames: int | None = None) -> Grid:
        """The tokens of an image or a video, given its size in pixels."""
        multiple = self.checkpoint.limits.size_multiple
        return Grid(height=height // multiple, width=width // multiple, patch=self.patch)

    def noise(self, grid: Grid, generator: torch.Generator) -> Tensor:
        """Noise as tokens [T, C], drawn in the shape and the dtype in which diffusers draws it."""
        dtype = self.latents_dtype or self.dtype
        drawn = torch.randn(grid.latents_shape(self.vae.channels), generator=generator, dtype=dtype)
        return grid.pack(drawn.to(self.device))

    def schedule(self, request: Request, grid: Grid) -> Schedule:
        """The scheduler of one output: the checkpoint's, or the one that the request names."""
        levels = self.levels(request, grid)
        config = self.configs["scheduler"]
        return Schedule(config, levels, device=self.device, name=request.scheduler, own=self.schedulers)

    def levels(self, request: Request, grid: Grid) -> Levels:
        """The noise levels: as most flow-matching models have them, evenly from 1, shifted by the number of tokens."""
        sigmas = np.linspace(1.0, 1 / request.steps, request.steps).tolist()
        return Levels(steps=request.steps, sigmas=sigmas, mu=dynamic_shift(self.configs["scheduler"], grid.tokens))

    # --- conditioning -------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def condition(self, states: Sequence[State], embeds: Mapping[str, PromptEmbeds], inputs: Any) -> None:
        """Completes the states of one request with what no step changes: `cond`, and `context` if there is any.

        embeds: branch -> encoded prompt.
        """

    def tables(
        self, state: State, row: Row, modulation: Callable[[Tensor], Mapping[str, Tensor]], *conditions: Hashable
    ) -> Tables:
        """The modulation tables of a state, [evaluations, levels, ...] by name. Level 0 of a row is at the timestep of
        the evaluation, other levels are at timestep 0.

        modulation: timesteps float32 [S] in the scheduler's units -> vectors [S, ...] by name. Its result is shared by
        all requests with the same timesteps and `conditions`: see SharedTables.
        """

        def compute() -> dict[str, Tensor]:
            t = torch.zeros(state.schedule.evaluations, row.levels)
            t[:, 0] = torch.tensor(state.schedule.timesteps)
            vectors = modulation(t.flatten().to(self.device))
            return {name: table.unflatten(0, t.shape) for name, table in vectors.items()}

        return self.shared_tables.get(state, compute, row.levels, *conditions)

    # --- steps and outputs --------------------------------------------------------------------------------------------

    def predict(self, batch: Rows) -> Tensor:
        with activate(batch):
            prediction: Tensor = self.transformer(batch[LATENTS].to(self.dtype), batch)
        return prediction

    @property
    def tile_area(self) -> int:
        return self.vae.tiling.area

    def in_tiles(self, tiled: bool) -> contextlib.AbstractContextManager[None]:
        return self.vae.in_tiles(tiled)

    def decode(self, state: State, latents: Tensor) -> list[Output]:
        """Latents [T, C] -> one Output: unpacked by the state's grid, decoded by the VAE and postprocessed."""
        frames = self.vae.decode(state.grid.unpack(latents))
        video = state.request.task.modality is Modality.VIDEO
        return [self.spec.postprocess(frames if video else frames[0])]
