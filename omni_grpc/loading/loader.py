"""Loader: gives a pipeline its parts, with all features applied."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from omni_grpc.loading.checkpoint import WeightTargets, load_weights, places
from omni_grpc.loading.components import Take, load_module, load_tokenizer
from omni_grpc.loading.gguf import GgufFile
from omni_grpc.loading.sources import check_scheme
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

M = TypeVar("M", bound=nn.Module)

Edit = Callable[[nn.Module, str, WeightTargets], None]
"""Changes a denoiser in place, given the name of its component and where the checkpoint's weights go."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loader:
    """A checkpoint and how it is loaded. `before` edits a denoiser that has modules but no weights yet, `after` one
    that has its weights; both in order. `files`: weights of components in place of the checkpoint's. `loaded`: the
    components given out so far. `threads` read a denoiser's weights. `begin` is called with each component whose
    weights are about to be loaded.
    """

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    before: Sequence[Edit] = ()
    after: Sequence[Edit] = ()
    threads: int = 1
    files: Mapping[str, GgufFile] = dataclasses.field(default_factory=dict)
    loaded: dict[str, Any] = dataclasses.field(default_factory=dict)
    take: Take | None = None
    begin: Callable[[str], None] = lambda component: None

    def denoiser(self, component: str, build: Callable[[Mapping[str, Any]], M]) -> M:
        """Our own module of a component: `build` makes it from the component's config. Raises CheckpointError, see
        load_weights and GgufFile.
        """
        self.begin(component)
        module = self._built(component, build)
        folder, weights = self.checkpoint.path / component, self.checkpoint.spec.weights[component]
        file = self.files.get(component)
        where: WeightTargets = {}
        if file is None:
            check_scheme(self.checkpoint.configs[component], folder)
        if self.before or self.after:
            # reads the headers of all files once more, which nobody needs who edits nothing
            where = places(module, folder, weights) if file is None else file.places(module, weights)
        for edit in self.before:
            edit(module, component, where)
        if file is None:
            load_weights(module, folder, weights, device=self.device, dtype=self.dtype, threads=self.threads)
        else:
            file.load(module, weights, device=self.device, dtype=self.dtype, threads=self.threads)
        for edit in self.after:
            edit(module, component, where)
        self.loaded[component] = module
        return module

    def _built(self, component: str, build: Callable[[Mapping[str, Any]], M]) -> M:
        """Without weights. Raises CheckpointError for a config that is not that of the module."""
        config = self.checkpoint.configs.get(component)
        if config is None:
            raise CheckpointError(
                f"{self.checkpoint.path} has no component {component!r}; its model_index.json names none"
            )
        try:
            with torch.device("meta"):
                return build(config).eval()
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError) as error:
            raise CheckpointError(
                f"the config of component {component!r} of {self.checkpoint.path} does not describe one: "
                f"{type(error).__name__}: {plain(error)}; copy or download it again"
            ) from error

    def module(self, component: str, *, part: str = "") -> Any:
        """A component that transformers or diffusers bring; `part` keeps only the submodule of that name."""
        self.begin(component)
        module = load_module(
            self.checkpoint, component, part=part, device=self.device, dtype=self.dtype, take=self.take
        )
        self.loaded[component] = module
        return module

    def tokenizer(self, component: str) -> Any:
        tokenizer = self.loaded[component] = load_tokenizer(self.checkpoint, component)
        return tokenizer
