"""Random numbers that a call draws beside its generators: each comes from the seeds of the request all the same."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from omni_grpc.adapter.quirks import ONE_GENERATOR


class Randomness:
    """What a request with these `seeds`, one for each output, draws from where its pipeline passes no generator on.

    A pipeline has generators with the seeds themselves. Those for the steps of its scheduler are seeded with a hash of
    the seeds: the seeds themselves would repeat the noise that the call began with, and drawing from the pipeline's own
    generators would change the output of pipelines whose scheduler discards what it draws. `shared` is true once
    numbers were drawn that belong to no single output.
    """

    def __init__(self, seeds: Sequence[int]) -> None:
        self.shared = False
        self._seeds = [_derived(seed, "step") for seed in seeds]
        self._generators = [torch.Generator("cpu").manual_seed(seed) for seed in self._seeds]
        self._process = _derived(seeds[0], "process") if seeds else 0

    def step(self, scheduler: Any, step: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Takes a step of a scheduler; one that takes a generator and is given none gets those of the outputs."""
        given = inspect.signature(step).bind_partial(*args, **kwargs).arguments
        sample = given.get("sample")
        if not self._seeds or not isinstance(sample, torch.Tensor):
            return step(*args, **kwargs)
        fits = sample.ndim > 0 and sample.shape[0] == len(self._seeds)
        if getattr(scheduler, "noise_sampler_seed", 0) is None:
            # a Brownian tree for each output of the batch; without seeds it takes one of the process
            scheduler.noise_sampler_seed = self._seeds if fits else self._seeds[0]
            self.shared |= not fits
        if "generator" not in inspect.signature(step).parameters:
            return step(*args, **kwargs)
        several = fits and len(self._seeds) > 1 and type(scheduler).__name__ not in ONE_GENERATOR
        generator = given.get("generator")
        if isinstance(generator, torch.Generator) or (generator and several):
            return step(*args, **kwargs)
        if several or len(self._seeds) == 1:
            mine = self._generators if several else self._generators[0]
            return step(*args, **{**kwargs, "generator": mine})
        before = self._generators[0].get_state()
        result = step(*args, **{**kwargs, "generator": self._generators[0]})
        self.shared |= not torch.equal(before, self._generators[0].get_state())
        return result

    @contextlib.contextmanager
    def of_process(self) -> Iterator[None]:
        """Within this, the generators that the process has of torch, numpy and Python are seeded by the request; after
        it they are as before. Requests of a worker run one at a time.
        """
        if not self._seeds:
            yield
            return
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
        numpy_state, python_state = np.random.get_state(), random.getstate()
        with torch.random.fork_rng(list(devices)):
            torch.manual_seed(self._process)
            np.random.seed(self._process % 2**32)
            random.seed(self._process)
            began = _state(devices)
            try:
                yield
            finally:
                self.shared |= _state(devices) != began
                np.random.set_state(numpy_state)
                random.setstate(python_state)


def _derived(seed: int, purpose: str) -> int:
    digest = hashlib.sha256(f"{purpose} {seed}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _state(devices: Sequence[int]) -> tuple[Any, ...]:
    """Where the generators of the process stand."""
    cuda = tuple(torch.cuda.get_rng_state(device).numpy().tobytes() for device in devices)
    _, keys, place, *_ = np.random.get_state()
    return torch.get_rng_state().numpy().tobytes(), cuda, np.asarray(keys).tobytes(), place, random.getstate()
