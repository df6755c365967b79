"""Profiler: the time that chosen methods of a model's components take, per request."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from omni_grpc.config import ProfilerConfig
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.plan import Decoded, DecodedPart, Prepared, Stepped
from omni_grpc.types.request import Request
from omni_grpc.worker.base import LoadedModel, Runner

logger = logging.getLogger(__name__)

DIFFUSE = "diffuse"
"""The target for the denoise steps of a request; it is not a method of a component."""
FORWARD = "forward"
"""The method name that stands for calling the component."""
TARGETS = ("vae.encode", "vae.decode", DIFFUSE, "text_encoder.forward", "tokenizer.forward")
"""The default targets, as far as the model has them."""

SETTING = "diffusion_pipeline_profiler_targets"


class Profiler:
    """Adds up the seconds of each target for each request in the worker. The context of a thread says for which
    requests it works; a runner with threads of its own passes the context on.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._spent: dict[str, dict[str, float]] = {}
        self._working: ContextVar[tuple[str, ...]] = ContextVar("working", default=())

    def now(self) -> float:
        """The current time in seconds, after the device has finished all work launched before."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic()

    @contextlib.contextmanager
    def work(self, *ids: str) -> Iterator[None]:
        """Measures calls inside the block for these requests; the time counts for each of them."""
        token = self._working.set(ids)
        try:
            yield
        finally:
            self._working.reset(token)

    def admit(self, request_id: str) -> None:
        with self._lock:
            self._spent[request_id] = {}

    def forget(self, ids: Sequence[str]) -> None:
        with self._lock:
            for request_id in ids:
                self._spent.pop(request_id, None)

    def add(self, ids: Sequence[str], target: str, seconds: float) -> None:
        """Adds to a request's seconds; ignored if it was dropped in the meantime."""
        with self._lock:
            for spent in [self._spent[request_id] for request_id in ids if request_id in self._spent]:
                spent[target] = spent.get(target, 0.0) + seconds

    def spent(self, request_id: str) -> dict[str, float]:
        """Seconds by target."""
        with self._lock:
            return dict(self._spent.get(request_id, {}))

    def time(self, part: Any, methods: Mapping[str, str]) -> None:
        """Measures methods of a component (method -> target) from now on.

        The component gets a class of its own, derived from what it was: `forward` is then the call with all hooks, and
        the libraries that put another `forward` into a module and take it out again (offload) do not undo it.
        """
        kind = type(part)
        names = {method: "__call__" if method == FORWARD else method for method in methods}
        timed = {names[method]: self._timed(getattr(kind, names[method]), methods[method]) for method in methods}
        part.__class__ = type(kind.__name__, (kind,), {"__module__": kind.__module__, **timed})

    def _timed(self, method: Callable[..., Any], target: str) -> Callable[..., Any]:
        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = self.now()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = self.now() - began
                self.add(self._working.get(), target, seconds)
                # one line for all of it, at the end of the request
                if target != DIFFUSE:
                    log(self._working.get(), target, seconds)

        return timed


class ProfiledRunner(Runner):
    """Wraps a runner, and adds the seconds of each target to the result of a request. `diffuse`: its steps are
    measured.
    """

    def __init__(self, runner: Runner, profiler: Profiler, *, diffuse: bool) -> None:
        self._runner = runner
        self._profiler = profiler
        self._diffuse = diffuse

    @classmethod
    def load(cls, setting: Any) -> LoadedModel:
        raise TypeError("a profiled runner is made of one that is loaded: profiled()")

    def prepare(self, request: Request) -> Prepared:
        self._profiler.admit(request.id)
        with self._profiler.work(request.id):
            return self._runner.prepare(request)

    def step(self, ids: Sequence[str]) -> Stepped:
        with self._profiler.work(*ids):
            if not self._diffuse:
                return self._runner.step(ids)
            began = self._profiler.now()
            stepped = self._runner.step(ids)
            self._profiler.add(ids, DIFFUSE, self._profiler.now() - began)
            return stepped

    def decode_part(self, request_id: str) -> DecodedPart:
        with self._profiler.work(request_id):
            return self._runner.decode_part(request_id)

    def decode(self, request_id: str) -> Decoded:
        with self._profiler.work(request_id):
            decoded = self._runner.decode(request_id)
        spent = self._profiler.spent(request_id)
        if DIFFUSE in spent:
            log((request_id,), DIFFUSE, spent[DIFFUSE])
        return dataclasses.replace(decoded, stage_durations=spent)

    def drop(self, ids: Sequence[str]) -> None:
        self._runner.drop(ids)
        self._profiler.forget(ids)


def profiled(loaded: LoadedModel, config: ProfilerConfig, device: torch.device) -> Runner:
    """The loaded runner with its targets measured. Raises ConfigError for one that the model does not have."""
    parts = loaded.components
    asked = config.diffusion_pipeline_profiler_targets
    unknown = [target for target in asked if not _has(parts, target)]
    if unknown:
        has = ", ".join([DIFFUSE, *_usual(parts)])
        message = f"--{SETTING.replace('_', '-')}: the model has no {', '.join(unknown)}; among what it has: {has}"
        raise ConfigError(message, reason="UNKNOWN_TARGET", violations=(Violation(SETTING, message),))
    targets = asked or tuple(target for target in TARGETS if _has(parts, target))
    profiler = Profiler(device)
    methods: dict[str, dict[str, str]] = {}
    for target in targets:
        if target != DIFFUSE:
            name, _, method = target.partition(".")
            methods.setdefault(name, {})[method] = target
    for name, of_part in methods.items():
        profiler.time(parts[name], of_part)
    if DIFFUSE in targets:
        for part, method in loaded.denoising:
            profiler.time(part, {method: DIFFUSE})
    logger.info("the pipeline profiler is on, and costs time; it measures %s", ", ".join(targets))
    return ProfiledRunner(loaded.runner, profiler, diffuse=DIFFUSE in targets and not loaded.denoising)


def log(ids: Sequence[str], target: str, seconds: float) -> None:
    logger.info("profiler: %s %s took %.3f ms", ",".join(ids) or "-", target, 1000 * seconds)


def _has(parts: Mapping[str, Any], target: str) -> bool:
    name, _, method = target.partition(".")
    if target == DIFFUSE or name not in parts:
        return target == DIFFUSE
    if method == FORWARD:
        return callable(parts[name])
    return not method.startswith("_") and callable(getattr(type(parts[name]), method, None))


def _usual(parts: Mapping[str, Any]) -> list[str]:
    """Likely targets of each component, for error messages."""
    found = []
    for name, part in parts.items():
        methods = ("encode", "decode", FORWARD) if isinstance(part, nn.Module) else (FORWARD,)
        found += [target for method in methods if _has(parts, target := f"{name}.{method}")]
    return found
