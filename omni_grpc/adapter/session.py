"""One call of a pipeline in a thread of its own, which waits at every step of its scheduler until told to go on."""

from __future__ import annotations

import contextvars
import copy
import dataclasses
import functools
import inspect
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from omni_grpc.adapter.randomness import Randomness
from omni_grpc.types.errors import OperationCancelled

STOPPED = "the request was dropped"


class _Stop(BaseException):
    """Raised inside the call to end it. Not an Exception, so that no pipeline catches it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CallProgress:
    """Where a call is after a step. `sigma` is 0 for schedulers that have none; `latents` are None before the first."""

    step: int
    total: int
    timestep: float
    sigma: float
    finished: bool
    latents: torch.Tensor | None


class _Gate:
    """Replaces a scheduler's `step`, with its signature: pipelines inspect it for what they may pass."""

    def __init__(self, scheduler: Any, step: Any, enter: Callable[..., Any], enter_copy: Callable[..., Any]) -> None:
        self._scheduler = scheduler
        self._step = step
        self._enter = enter
        self._enter_copy = enter_copy
        functools.update_wrapper(self, self._step)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._enter(self._scheduler, self._step, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # a pipeline that copies its scheduler steps the copy, not the original and not the loop of this session
        twin = memo[id(self._scheduler)]
        return _Gate(twin, types.MethodType(type(twin).step, twin), self._enter_copy, self._enter_copy)


class Session:
    """Runs `call` while the steps of its loops wait for `advance`.

    `loops` are the schedulers that a loop of the call steps, each with the number of steps that is planned for it;
    `total` tells the true one once the loop has begun. All `schedulers` work on a copy of their state and have their
    own back at the end, so nothing a request did to one reaches the next. `clean_up` is called in the thread at the
    end, with whether the call failed; `begin` before the call, and may change schedulers. What is drawn without a
    generator comes from `randomness`.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        schedulers: Sequence[Any],
        *,
        loops: Sequence[tuple[Any, int]],
        total: Callable[[Any], int],
        clean_up: Callable[[bool], None],
        randomness: Randomness | None = None,
        begin: Callable[[], None] = lambda: None,
    ) -> None:
        self._call = call
        self._begin = begin
        self._schedulers = schedulers
        self._gated = [scheduler for scheduler, _ in loops]
        self._ahead = {id(scheduler): steps for scheduler, steps in loops}
        self._total_of = total
        self._clean_up = clean_up
        self._randomness = Randomness(()) if randomness is None else randomness
        self._changed = threading.Condition()
        self._granted = 0
        self._arrived = 0
        self._done = 0
        self._total = 0
        self._current: Any = None
        self._begun_at = self._length = 0
        self._free = False
        self._stopped = False
        self._ended = False
        self._at = (0.0, 0.0)
        self._latents: torch.Tensor | None = None
        self._output: Any = None
        self._error: BaseException | None = None
        # the call is part of what its caller is at
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="omni_grpc-session", daemon=True)

    @property
    def steps(self) -> int:
        """Steps taken so far."""
        return self._done

    @property
    def began(self) -> bool:
        """Whether the call has come to its first step."""
        return self._arrived > 0

    @property
    def shared_randomness(self) -> bool:
        """Whether the call drew numbers that belong to no single output; known once it has ended."""
        return self._randomness.shared

    def start(self) -> None:
        """Returns when the call stands before its first step, or has ended without one. Raises what it raised."""
        self._thread.start()
        self._wait(lambda: self._arrived > 0)
        self._raise()

    def advance(self) -> CallProgress:
        """Lets the call take one step. Returns when it stands before the next one, or has taken its last.

        Raises what the call raised, Cancelled where it was stopped.
        """
        with self._changed:
            self._granted += 1
            self._changed.notify_all()
        self._wait(lambda: self._arrived > self._granted or self._left_its_loop())
        self._raise()
        finished = self._ended or self._left_its_loop()
        timestep, sigma = self._at
        # a call that ends early has taken all the steps that it takes
        total = self._done if finished else max(self._total, self._done + 1)
        return CallProgress(
            step=self._done, total=total, timestep=timestep, sigma=sigma, finished=finished, latents=self._latents
        )

    def output(self) -> Any:
        """Waits for the call to return and gives what it returned. Raises what it raised, and Cancelled as soon as it
        is stopped, however long the call still takes to end.
        """
        with self._changed:
            self._free = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._stopped)
            if self._stopped and not self._ended:
                raise OperationCancelled(STOPPED)
        self._thread.join()
        self._raise()
        return self._output

    def stop(self) -> None:
        """Ends the call at its next step or its next `check`. Does not wait for it."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def check(self) -> None:
        """To be called between pieces of work: ends the call there if it was stopped. No effect in other threads."""
        if self._stopped and threading.current_thread() is self._thread:
            raise _Stop

    def join(self) -> None:
        """Waits until the call has ended and the state of the schedulers is restored."""
        if self._thread.ident is not None:
            self._thread.join()

    # --- the other side: in the thread --------------------------------------------------------------------------------

    def _run(self) -> None:
        kept = [dict(vars(scheduler)) for scheduler in self._schedulers]
        try:
            for scheduler, state in zip(self._schedulers, kept, strict=True):
                _become(scheduler, copy.deepcopy(state))
            draw = self._randomness.step
            for scheduler in self._schedulers:
                gated = any(scheduler is one for one in self._gated)
                scheduler.step = _Gate(scheduler, scheduler.step, self._enter if gated else draw, draw)
            self._begin()
            with self._randomness.of_process():
                output, error = self._call(), None
        except BaseException as raised:  # noqa: BLE001 - it is raised again, in the thread that waits for it
            output, error = None, raised
        for scheduler, state in zip(self._schedulers, kept, strict=True):
            _become(scheduler, state)
        try:
            self._clean_up(error is not None)
        except Exception as raised:  # noqa: BLE001 - as above
            error = error or raised
        with self._changed:
            self._output, self._error, self._ended = output, error, True
            self._changed.notify_all()

    def _enter(self, scheduler: Any, step: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self._changed:
            self._arrived += 1
            if scheduler is not self._current or self._done - self._begun_at >= self._length:
                self._begin_loop(scheduler)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._stopped or self._free or self._granted >= self._arrived)
            if self._stopped:
                raise _Stop
        result = self._randomness.step(scheduler, step, args, kwargs)
        timestep = inspect.signature(step).bind_partial(*args, **kwargs).arguments.get("timestep")
        with self._changed:
            self._done += 1
            self._at = (float(timestep) if timestep is not None else 0.0, _sigma(scheduler, timestep))
            self._latents = _latents(result)
            self._changed.notify_all()
        return result

    def _begin_loop(self, scheduler: Any) -> None:
        self._ahead.pop(id(scheduler), None)
        self._current, self._begun_at, self._length = scheduler, self._done, self._total_of(scheduler)
        self._total = self._done + self._length + sum(self._ahead.values())

    def _left_its_loop(self) -> bool:
        """Whether the last step of the last loop is taken: what follows is the decode."""
        return not self._ahead and self._done == self._granted and self._done >= self._total > 0

    def _wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._ended or reached())

    def _raise(self) -> None:
        if self._error is None:
            return
        if isinstance(self._error, _Stop):
            raise OperationCancelled(STOPPED) from None
        raise self._error


def _become(scheduler: Any, state: Mapping[str, Any]) -> None:
    vars(scheduler).clear()
    vars(scheduler).update(state)


def _latents(result: Any) -> torch.Tensor | None:
    found = result[0] if isinstance(result, tuple) else getattr(result, "prev_sample", None)
    return found if isinstance(found, torch.Tensor) else None


def _sigma(scheduler: Any, timestep: Any) -> float:
    """The noise level that a step started from, after it was taken."""
    sigmas, index = getattr(scheduler, "sigmas", None), getattr(scheduler, "step_index", None)
    if sigmas is not None and index is not None and 1 <= index <= len(sigmas):
        return float(sigmas[index - 1])
    alphas = getattr(scheduler, "alphas_cumprod", None)
    if alphas is None or timestep is None:
        return 0.0
    alpha = float(alphas[min(max(int(timestep), 0), len(alphas) - 1)])
    return float(((1 - alpha) / alpha) ** 0.5) if alpha > 0 else 0.0
