"""ImagePipeline: text to image, with or without reference pictures, by one transformer."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc.nn.rows import Row, Rows
from omni_grpc.pipeline.batch import single_row
from omni_grpc.pipeline.latent_diffusion import Constants, LatentDiffusionPipeline
from omni_grpc.pipeline.patches import Grid
from omni_grpc.pipeline.state import Conditioning, State, prompts
from omni_grpc.pipeline.text_encoders import PromptEmbeds
from omni_grpc.types.request import Guidance, Request


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Reference:
    """A reference picture as tokens [T, C] on a grid of its own. They follow the latents in their stream."""

    tokens: Tensor
    grid: Grid


class ImagePipeline(LatentDiffusionPipeline):
    """A family implements `constants` and `modulation`. Where sequences are laid out otherwise than text, latents,
    references, it overrides `row` and `context`.
    """

    @abc.abstractmethod
    def constants(self, prompt: PromptEmbeds, grids: Sequence[Grid], rows: Rows) -> Constants:
        """What the transformer reads in every step: text tokens, rotary tables. `grids`: of the latents, then of the
        references. `rows`: a batch of this row alone; it is active.
        """

    @abc.abstractmethod
    def modulation(self, t: Tensor, prompt: PromptEmbeds, guidance: Guidance) -> Mapping[str, Tensor]:
        """Timesteps float32 [S] in the scheduler's units -> modulation vectors by name, [S, ...] each.

        Requests with the same timesteps share them, unless they differ in the embedded guidance scale or, where the
        model has a pooled vector, in the prompt. They must depend on nothing else.
        """

    def encode_inputs(self, request: Request) -> Sequence[Reference]:
        """The pictures of a request, through the VAE."""
        pictures = self.preprocess(request).get("images", ())
        return [self.reference(picture) for picture in pictures]

    def reference(self, picture: Tensor) -> Reference:
        """A picture [3, height, width] in -1..1 as tokens."""
        grid = self.grid(picture.shape[-1], picture.shape[-2])
        tokens = grid.pack(self.vae.encode(picture[:, None])).to(self.latents_dtype or self.dtype)
        return Reference(tokens=tokens, grid=grid)

    def row(self, prompt: PromptEmbeds, grids: Sequence[Grid]) -> Row:
        """The lengths of one sequence: the prompt, then the latents and the references."""
        return Row.of(txt=len(prompt.hidden), img=sum(grid.tokens for grid in grids))

    def context(self, grid: Grid, references: Sequence[Reference]) -> Tensor | None:
        """What follows the latents in their stream, [T, C]. `grid`: of the latents."""
        return torch.cat([reference.tokens for reference in references]) if references else None

    def condition(
        self, states: Sequence[State], embeds: Mapping[str, PromptEmbeds], inputs: Sequence[Reference]
    ) -> None:
        grid = states[0].grid
        grids = [grid, *(reference.grid for reference in inputs)]
        conds = {branch: self._cond(states[0], branch, prompt, grids) for branch, prompt in embeds.items()}
        for state in states:
            state.cond = dict(conds)
            state.context = self.context(grid, inputs)

    def _cond(self, state: State, branch: str, prompt: PromptEmbeds, grids: Sequence[Grid]) -> Conditioning:
        row, guidance = self.row(prompt, grids), state.guidance
        pooled = None if prompt.pooled is None else dict(prompts(state.request).values())[branch]
        with single_row(state, branch, row) as rows:
            constants = self.constants(prompt, grids, rows)
            tables = self.tables(state, row, lambda t: self.modulation(t, prompt, guidance), guidance.scale, pooled)
        return Conditioning(row=row, constants=constants, tables=tables)
