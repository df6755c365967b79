"""Runs a pipeline: holds the states of its requests and turns model results into reports."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Sequence

import torch

from omni_grpc import shared
from omni_grpc.errors import Cancelled, InternalError
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.pipeline.base import Done, Pipeline
from omni_grpc.pipeline.batch import assemble, step
from omni_grpc.pipeline.state import State
from omni_grpc.plan import Broken, Decoded, Media, Progress, Stepped
from omni_grpc.request import Request
from omni_grpc.worker import media
from omni_grpc.worker.failure import failure

logger = logging.getLogger(__name__)


class Runner:
    """Each method belongs to one lane; `drop` may be called from any. A request's states are one per output."""

    def __init__(self, pipeline: Pipeline, device: torch.device, prefix: str) -> None:
        self._pipeline = pipeline
        self._prefix = prefix
        self._blocks = itertools.count()
        self._layouts = LayoutCache(device)
        self._lock = threading.Lock()
        self._states: dict[str, list[State]] = {}
        self._rows: Rows | None = None

    def drop(self, ids: Sequence[str]) -> None:
        """Forgets these requests. A lane that works on one of them holds its own reference until it is done."""
        with self._lock:
            for request_id in ids:
                self._states.pop(request_id, None)
            # the last batch holds the states of its rows
            self._rows = None

    @torch.inference_mode()
    def prepare(self, request: Request) -> tuple[int, tuple[tuple[str, int], ...]]:
        """Encodes the prompts and draws the noise. Returns the prompt's tokens and, per field, the tokens cut off."""
        states = self._pipeline.prepare(request)
        with self._lock:
            self._states[request.id] = states
        return states[0].prompt_tokens, tuple(states[0].dropped_tokens.items())

    @torch.inference_mode()
    def step(self, ids: Sequence[str]) -> Stepped:
        """One forward for all these requests. Requests that were dropped meanwhile are left out."""
        began = time.monotonic()
        with self._lock:
            requests = {request_id: self._states[request_id] for request_id in ids if request_id in self._states}
        try:
            before = {request_id: _position(states[0]) for request_id, states in requests.items()}
            done = self._step([state for states in requests.values() for state in states])
        except Exception as error:  # noqa: BLE001 - the forward is shared, so its failure is that of every request in it
            why = failure(error, f"stepping {', '.join(requests)}")
            self.drop(list(requests))
            broken = tuple(Broken(id=request_id, phase="step", failure=why) for request_id in requests)
            return Stepped(elapsed=time.monotonic() - began, broken=broken)
        progress = []
        for request_id, states in requests.items():
            timestep, sigma = before[request_id]
            progress.append(
                Progress(
                    id=request_id,
                    step=states[0].index,
                    total=states[0].schedule.steps,
                    sigma=sigma,
                    timestep=timestep,
                    rows=sum(len(state.cond) for state in states),
                    evals=len(states[0].cond),
                    finished=done.issuperset(states),
                )
            )
        return Stepped(elapsed=time.monotonic() - began, progress=tuple(progress))

    @torch.inference_mode()
    def decode(self, request_id: str) -> Decoded:
        """Turns latents into encoded images in shared memory. Non-finite latents are an error, never a black image."""
        began = time.monotonic()
        with self._lock:
            states = self._states.get(request_id)
        if states is None:
            raise Cancelled(f"request {request_id} was dropped before its decode")
        outputs = []
        for state in states:
            if not bool(torch.isfinite(state.latents).all()):
                raise InternalError(
                    f"the latents of output {state.output} are not finite after {state.index} steps",
                    reason="NON_FINITE_LATENTS",
                )
            for image in self._pipeline.decode(state):
                outputs.append(self._encode(state, image))
        return Decoded(
            id=request_id,
            elapsed=time.monotonic() - began,
            media=tuple(outputs),
            peak_memory_bytes=media.peak_memory_bytes(),
        )

    def _step(self, states: list[State]) -> set[State]:
        """Moves all states one step on, in one forward; returns those that are done."""
        if not states:
            self._rows = None
            return set()
        self._rows = assemble(states, self._layouts, self._rows)
        return {state for state, outcome in step(self._pipeline, self._rows) if isinstance(outcome, Done)}

    def _encode(self, state: State, image: media.Image) -> Media:
        data = media.encode(image, state.request.output_format)
        height, width, _ = image.shape
        return Media(
            index=state.output,
            data=shared.put(data, f"{self._prefix}{next(self._blocks)}"),
            mime_type=state.request.output_format.mime_type,
            width=width,
            height=height,
            seed=state.seed,
            sha256=hashlib.sha256(data).hexdigest(),
        )


def _position(state: State) -> tuple[float, float]:
    return state.schedule.timesteps[state.index], state.schedule.sigmas[state.index]
