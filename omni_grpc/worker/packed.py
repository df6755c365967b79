"""Runs a native pipeline: all requests that take a step share one forward over packed rows."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import itertools
import threading
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from omni_grpc import shared
from omni_grpc.errors import Cancelled, InternalError
from omni_grpc.load import Loading, LoadPhase
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.pipeline.base import Done, Outcome, Pipeline
from omni_grpc.pipeline.batch import advance, assemble, predict
from omni_grpc.pipeline.images import Image
from omni_grpc.pipeline.preview import latent_picture
from omni_grpc.pipeline.state import State
from omni_grpc.plan import Broken, Decoded, Media, Prepared, Progress, Stepped
from omni_grpc.request import ImageFormat, PreviewImage, Request
from omni_grpc.spec import LatentRgb
from omni_grpc.worker import media
from omni_grpc.worker.base import Loaded, Runner, Setting
from omni_grpc.worker.failure import failure
from omni_grpc.worker.warm_up import warm_up

Work = Mapping[str, list[State]]
"""The states of requests, by id: one for each output."""


@dataclasses.dataclass(slots=True)
class Moved:
    """What a step did to one request: where it started from, and what came of each of its outputs."""

    states: list[State]
    timestep: float
    sigma: float
    rows: int
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)


class PackedRunner(Runner):
    """Holds the states of its requests, one for each output."""

    def __init__(
        self, pipeline: Pipeline, device: torch.device, prefix: str, *, latent_rgb: LatentRgb | None = None
    ) -> None:
        self._pipeline = pipeline
        self._prefix = prefix
        self._latent_rgb = latent_rgb
        self._blocks = itertools.count()
        self._layouts = LayoutCache(device)
        self._lock = threading.Lock()
        self._states: dict[str, list[State]] = {}
        self._rows: Rows | None = None

    @classmethod
    def load(cls, setting: Setting) -> Loaded:
        checkpoint, device = setting.checkpoint, setting.device
        module, _, name = checkpoint.spec.pipeline.partition(":")
        pipeline: Pipeline = getattr(importlib.import_module(module), name).load(checkpoint, device, setting.dtype)
        setting.tell(Loading(phase=LoadPhase.WARMING_UP))
        return Loaded(
            runner=cls(pipeline, device, setting.prefix, latent_rgb=checkpoint.spec.latent_rgb),
            weight_bytes=sum(p.numel() * p.element_size() for p in pipeline.parameters()),
            cost=warm_up(pipeline, checkpoint, device, setting.config.worker.warm_up_seconds),
        )

    def drop(self, ids: Sequence[str]) -> None:
        """Forgets these requests. A lane that works on one of them holds its own reference until it is done."""
        with self._lock:
            for request_id in ids:
                self._states.pop(request_id, None)
            # the last batch holds the states of its rows
            self._rows = None

    @torch.inference_mode()
    def prepare(self, request: Request) -> Prepared:
        """Encodes the prompts and draws the noise."""
        began = time.monotonic()
        states = self._pipeline.prepare(request)
        with self._lock:
            self._states[request.id] = states
        return Prepared(
            id=request.id,
            elapsed=time.monotonic() - began,
            prompt_tokens=states[0].prompt_tokens,
            rows=tuple(sum(cond.row.lengths) for state in states for cond in state.cond.values()),
            dropped_tokens=tuple(states[0].dropped_tokens.items()),
        )

    @torch.inference_mode()
    def step(self, ids: Sequence[str]) -> Stepped:
        """One forward for all these requests. Requests that were dropped meanwhile are left out."""
        began = time.monotonic()
        with self._lock:
            work = {request_id: self._states[request_id] for request_id in ids if request_id in self._states}
        moved, broken = self._move(work)
        self._refuse_non_finite(moved, broken)
        progress = tuple(self._progress(request_id, it) for request_id, it in moved.items())
        if broken:
            self.drop([report.id for report in broken])
        self._let_go(work)
        return Stepped(elapsed=time.monotonic() - began, progress=progress, broken=tuple(broken))

    @torch.inference_mode()
    def decode(self, request_id: str) -> Decoded:
        """Turns latents into encoded images in shared memory. Non-finite pixels are an error, never a black image."""
        began = time.monotonic()
        with self._lock:
            states = self._states.get(request_id)
        if states is None:
            raise Cancelled(f"request {request_id} was dropped before its decode")
        # all are decoded before any is put in shared memory: a block belongs to a report
        images = [(state, image) for state in states for image in self._pipeline.decode(state)]
        files = [(state, image, media.encode(image, _format(state.request))) for state, image in images]
        return Decoded(
            id=request_id,
            media=tuple(self._share(state, image, data) for state, image, data in files),
            elapsed=time.monotonic() - began,
            peak_memory_bytes=media.peak_memory_bytes(),
        )

    def _move(self, work: Work) -> tuple[dict[str, Moved], list[Broken]]:
        """One step of every request. Where the shared forward fails, each takes its step alone: one that fails alone
        is at fault, and its neighbours go on.
        """
        if not work:
            return {}, []
        try:
            predictions = self._predict(work)
        except Exception as error:  # noqa: BLE001 - whatever a forward raises is a request's failure, not the worker's
            doing = f"stepping {', '.join(work)}"
            if len(work) == 1:
                return {}, [Broken(id=next(iter(work)), phase="step", failure=failure(error, doing))]
            torch.cuda.empty_cache()
            parts = [self._move({request_id: states}) for request_id, states in work.items()]
            return {k: v for moved, _ in parts for k, v in moved.items()}, [b for _, broken in parts for b in broken]
        moved, broken = {}, []
        for request_id, states in work.items():
            it = _before(states)
            try:
                it.outcomes = [advance(self._pipeline, state, predictions[state]) for state in states]
            except Exception as error:  # noqa: BLE001 - as above
                doing = f"advancing {request_id}"
                broken.append(Broken(id=request_id, phase="step", failure=failure(error, doing)))
            else:
                moved[request_id] = it
        return moved, broken

    def _let_go(self, work: Work) -> None:
        """Forgets the last batch where one of its requests was dropped during the step: the batch holds its states."""
        with self._lock:
            if not self._states.keys() >= work.keys():
                self._rows = None

    def _predict(self, work: Work) -> Mapping[State, Mapping[str, Tensor]]:
        self._rows = assemble([state for states in work.values() for state in states], self._layouts, self._rows)
        return predict(self._pipeline, self._rows)

    def _refuse_non_finite(self, moved: dict[str, Moved], broken: list[Broken]) -> None:
        """Takes requests out whose latents are not finite. It is the one read from the device in a step, which also
        makes the time of the step the time it took, not the time to launch it.
        """
        if not moved:
            return
        flags = torch.stack(
            [torch.stack([state.latents.isfinite().all() for state in it.states]).all() for it in moved.values()]
        )
        for request_id, finite in zip(list(moved), flags.tolist(), strict=True):
            if not finite:
                step = moved.pop(request_id).states[0].index
                error = InternalError(
                    f"the latents of {request_id} are not finite after step {step}", reason="NON_FINITE_LATENTS"
                )
                broken.append(Broken(id=request_id, phase="step", failure=error.failure))

    def _progress(self, request_id: str, it: Moved) -> Progress:
        state = it.states[0]
        return Progress(
            id=request_id,
            step=state.index,
            total=state.schedule.steps,
            sigma=it.sigma,
            timestep=it.timestep,
            rows=it.rows,
            finished=all(isinstance(outcome, Done) for outcome in it.outcomes),
            previews=self._previews(it.states),
        )

    def _previews(self, states: list[State]) -> tuple[PreviewImage, ...]:
        asked = states[0].request.preview
        if asked is None or states[0].index % asked.every_steps:
            return ()
        previews = []
        for state in states:
            picture = media.fit(latent_picture(state.grid.image(state.latents), self._latent_rgb), asked.max_edge)
            height, width, _ = picture.shape
            data = media.encode(picture, asked.format, preview=True)
            previews.append(PreviewImage(state.output, asked.format.mime_type, data, width, height))
        return tuple(previews)

    def _share(self, state: State, image: Image, data: bytes) -> Media:
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


def _format(request: Request) -> ImageFormat:
    # resolve_request gives every task a format of its modality, and native pipelines make images
    assert isinstance(request.output_format, ImageFormat)
    return request.output_format


def _before(states: list[State]) -> Moved:
    first = states[0]
    return Moved(
        states=states,
        timestep=first.schedule.timesteps[first.index],
        sigma=first.schedule.sigmas[first.index],
        rows=sum(len(state.branches) for state in states),
    )
