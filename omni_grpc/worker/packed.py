"""Runs a native pipeline: all requests that take a step share one forward over packed rows."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import pkgutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from omni_grpc.features import Effects
from omni_grpc.loading.components import configure_vae
from omni_grpc.loading.loader import Loader
from omni_grpc.nn.attention import described, in_use
from omni_grpc.nn.mesh import Mesh
from omni_grpc.nn.rows import LayoutCache, Rows
from omni_grpc.ops.readback import read_back
from omni_grpc.pipeline.base import AnotherPrediction, Finished, NextStep, Outcome, Pipeline, SegmentFinished
from omni_grpc.pipeline.batch import advance, assemble, predict
from omni_grpc.pipeline.outputs import Output
from omni_grpc.pipeline.preview import latent_preview, predict_x0
from omni_grpc.pipeline.state import State
from omni_grpc.types.errors import InternalError, OperationCancelled
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.memory_model import MemoryModel
from omni_grpc.types.plan import Broken, Decoded, DecodedPart, Prepared, RequestStep, Stepped, VisitedLevels
from omni_grpc.types.request import Request
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import LatentRgb
from omni_grpc.types.step_cache import StepReports, tally
from omni_grpc.worker import delivery, media
from omni_grpc.worker.base import LoadedModel, Runner, RunnerContext
from omni_grpc.worker.edits import loader, surround
from omni_grpc.worker.failure import failure
from omni_grpc.worker.lanes import Lanes
from omni_grpc.worker.measure import measured, with_capacity
from omni_grpc.worker.phases import Staging
from omni_grpc.worker.warm_up import warm_up


@dataclasses.dataclass(slots=True, eq=False)
class RunningRequest:
    """A request in the worker.

    states: one per output. finished: for each output, the latents of its segments that wait to be decoded. parts: for
    each output, its decoded segments. evals, seconds, reports: what the current step has taken so far, and what
    features have reported of it, by (output, feature, branch); all_evals: those of the steps before as well. origins:
    for each output, the latents at the start of the current step, where previews are asked for.
    """

    states: list[State]
    finished: list[list[Tensor]]
    parts: list[list[list[Output]]]
    evals: int = 0
    all_evals: int = 0
    seconds: float = 0.0
    reports: dict[tuple[int, str, str], Any] = dataclasses.field(default_factory=dict)
    origins: list[Tensor] = dataclasses.field(default_factory=list)

    def predicted(self) -> None:
        """Counts another evaluation of the current step, and adds what features reported of it."""
        self.evals += 1
        self.all_evals += 1
        for state in self.states:
            for (feature, branch), report in state.reports.items():
                tally(self.reports, (state.output, feature, branch), report)

    def stepped(self) -> None:
        """The current step is reported, and the next one begins."""
        self.evals, self.seconds = 0, 0.0
        self.reports.clear()

    @classmethod
    def of(cls, states: list[State]) -> RunningRequest:
        return cls(states, [[] for _ in states], [[] for _ in states])


RunningRequests = Mapping[str, RunningRequest]
"""Requests by id."""


@dataclasses.dataclass(slots=True)
class StepOutcome:
    """What an evaluation did to one request: where it started from, and the outcome for each of its outputs."""

    held: RunningRequest
    timestep: float
    sigma: float
    segment: int
    rows: int
    outcomes: list[Outcome] = dataclasses.field(default_factory=list)


class PackedRunner(Runner):
    """Runs a native pipeline. It holds the states of its requests, one per output."""

    def __init__(
        self,
        pipeline: Pipeline,
        device: torch.device,
        prefix: str,
        *,
        latent_rgb: LatentRgb | None = None,
        lanes: Lanes | None = None,
        warnings: Sequence[RequestWarning] = (),
        scheduler: str = "",
        found: Callable[[], WorkerFindings] = WorkerFindings,
        staging: Staging | None = None,
        memory: MemoryModel | None = None,
        ranks: Mesh | None = None,
    ) -> None:
        """`warnings` belong to every reply. Those given here are reported with the load; features may add more.
        `scheduler` and `found` are for the parameters in files, see `Delivery`. `memory` says what is decoded in tiles.
        Of `ranks`, the first one alone makes files and previews.
        """
        self._pipeline = pipeline
        self._delivery = delivery.Delivery(prefix, scheduler=scheduler, found=found)
        self._latent_rgb = latent_rgb
        self._layouts = LayoutCache(device)
        self._lanes, self._staging = lanes or Lanes(), staging
        self._warnings, self._told = warnings, len(warnings)
        self._memory = memory or MemoryModel()
        self._is_group = ranks is not None
        self._delivers = ranks is None or ranks.rank == 0
        self._lock = threading.Lock()
        self._held: dict[str, RunningRequest] = {}
        self._rows: Rows | None = None

    @classmethod
    def load(cls, setting: RunnerContext) -> LoadedModel:
        checkpoint, device = setting.checkpoint, setting.device
        effects, lanes = Effects(), Lanes()
        parts = loader(setting, effects, lanes)
        pipeline = load_pipeline(parts, effects, setting, lanes)
        configure_vae(parts.loaded.get("vae"), setting.config.adapter)
        setting.tell(Loading(phase=LoadPhase.WARMING_UP))
        memory, left = measured(pipeline, checkpoint, device, setting.config, ranks=setting.ranks)
        coming = 0 if effects.adapters is None else effects.adapters.room
        memory = with_capacity(memory, device, setting.config, coming=coming)
        cost = warm_up(pipeline, checkpoint, device, left, setting.ranks, memory.fits)
        # of what is measured with the cost, some stays
        memory = with_capacity(memory, device, setting.config, coming=coming)
        if setting.ranks is not None:
            # it decides what is decoded in tiles, which all ranks have to do alike
            memory = setting.ranks.first_gives(memory)
        effects.report(
            attention_backend=described(in_use(pipeline, device, setting.dtype)), residency=setting.residency
        )
        rgb, warnings = checkpoint.latent_rgb, effects.warnings
        return LoadedModel(
            runner=cls(
                pipeline,
                device,
                setting.prefix,
                latent_rgb=rgb,
                lanes=lanes,
                warnings=warnings,
                scheduler=checkpoint.scheduler,
                found=lambda: effects.found,
                staging=setting.staging,
                memory=memory,
                ranks=setting.ranks,
            ),
            weight_bytes=sum(p.numel() * p.element_size() for p in pipeline.parameters()),
            cost=cost,
            memory=memory,
            found=effects.found,
            warnings=tuple(warnings),
            components=parts.loaded,
            counts=effects.counts,
            adapters=effects.adapters,
            on_sleep=(*effects.on_sleep, *(() if setting.staging is None else (setting.staging.clear,))),
        )

    def drop(self, ids: Sequence[str]) -> None:
        """Drops these requests. A lane that works on one of them holds its own reference until it is done."""
        with self._lock:
            for request_id in ids:
                self._held.pop(request_id, None)
            # the last batch holds the states of its rows
            self._rows = None

    @torch.inference_mode()
    def prepare(self, request: Request) -> Prepared:
        """Encodes the prompts and draws the noise."""
        began = time.monotonic()
        with self._lanes.work(), self._phase():
            states = self._pipeline.prepare(request)
        with self._lock:
            self._held[request.id] = RunningRequest.of(states)
        return Prepared(
            id=request.id,
            elapsed=time.monotonic() - began,
            prompt_tokens=states[0].prompt_tokens,
            rows=tuple(sum(cond.row.lengths) for state in states for cond in state.cond.values()),
            dropped_tokens=tuple(states[0].dropped_tokens.items()),
            levels=_levels(states[0]),
        )

    @torch.inference_mode()
    def step(self, ids: Sequence[str]) -> Stepped:
        """One forward for all these requests. Requests that were dropped in the meantime are skipped."""
        began = time.monotonic()
        with self._lock:
            work = {request_id: self._held[request_id] for request_id in ids if request_id in self._held}
        moved, broken = self._evaluate(work)
        self._refuse_nonfinite(moved, broken)
        progress = []
        for request_id, it in moved.items():
            if any(isinstance(outcome, AnotherPrediction) for outcome in it.outcomes):
                it.held.seconds += time.monotonic() - began
            else:
                progress.append(self._progress(request_id, it))
        if broken:
            self.drop([report.id for report in broken])
        self._release_batch(work)
        return Stepped(elapsed=time.monotonic() - began, progress=tuple(progress), broken=tuple(broken))

    @torch.inference_mode()
    def decode_part(self, request_id: str) -> DecodedPart:
        """Decodes the segments that are finished; the others are still being denoised."""
        began = time.monotonic()
        held = self._get(request_id)
        with self._lanes.work(), self._phase(), self._tiling(held):
            self._decode_finished(held)
        return DecodedPart(
            id=request_id,
            elapsed=time.monotonic() - began,
            done=len(held.parts[0]),
            total=held.states[0].segments,
        )

    @torch.inference_mode()
    def decode(self, request_id: str) -> Decoded:
        """Turns latents into files in shared memory. Non-finite pixels are an error, never a black image."""
        began = time.monotonic()
        held = self._get(request_id)
        # all are decoded and encoded before any is put in shared memory: a block belongs to a report
        with self._lanes.work(), self._phase(), self._tiling(held):
            self._decode_finished(held)
            outputs = [
                self._pipeline.join(parts)
                for state, decoded in zip(held.states, held.parts, strict=True)
                for parts in zip(*decoded, self._pipeline.decode(state, state.latents), strict=True)
            ]
        if not self._delivers:
            return Decoded(id=request_id, media=(), elapsed=time.monotonic() - began)
        request = held.states[0].request
        made = time.monotonic()
        files = [delivery.encode(output, request) for output in outputs]
        delivered = self._delivery.put(request, files, _course(held))
        ended = time.monotonic()
        warnings = (
            *delivery.rounded(outputs[0], request),
            *delivery.tiled(request, self._memory),
            *delivered.warnings,
            *self._warnings[self._told :],
        )
        return Decoded(
            id=request_id,
            media=delivered.media,
            warnings=warnings,
            elapsed=ended - began,
            encoding=ended - made,
            peak_memory_bytes=media.peak_memory_bytes(),
        )

    def _phase(self) -> AbstractContextManager[None]:
        """What a lane calls inside stays on the device until the end of the block."""
        return contextlib.nullcontext() if self._staging is None else self._staging.phase()

    def _get(self, request_id: str) -> RunningRequest:
        with self._lock:
            held = self._held.get(request_id)
        if held is None:
            raise OperationCancelled(f"request {request_id} was dropped before its decode")
        return held

    def _tiling(self, held: RunningRequest) -> contextlib.AbstractContextManager[None]:
        return self._pipeline.in_tiles(self._memory.in_tiles(held.states[0].request))

    def _decode_finished(self, held: RunningRequest) -> None:
        for state, finished, parts in zip(held.states, held.finished, held.parts, strict=True):
            while finished:
                parts.append(self._pipeline.decode(state, finished.pop(0)))

    def _evaluate(self, work: RunningRequests) -> tuple[dict[str, StepOutcome], list[Broken]]:
        """One evaluation of every request. If the shared forward fails, each request is evaluated separately: the one
        that fails then is at fault, and the others go on. Of several ranks, one cannot do that by itself: it raises.
        """
        if not work:
            return {}, []
        try:
            predictions = self._predict(work)
        except Exception as error:
            if self._is_group:
                raise
            # whatever a forward raises is a request's failure, not the worker's
            doing = f"stepping {', '.join(work)}"
            if len(work) == 1:
                return {}, [Broken(id=next(iter(work)), phase="step", failure=failure(error, doing))]
            torch.cuda.empty_cache()
            parts = [self._evaluate({request_id: held}) for request_id, held in work.items()]
            return {k: v for moved, _ in parts for k, v in moved.items()}, [b for _, broken in parts for b in broken]
        moved, broken = {}, []
        for request_id, held in work.items():
            it = _start_of(held)
            try:
                it.outcomes = [advance(self._pipeline, state, predictions[state]) for state in held.states]
            except Exception as error:  # noqa: BLE001 - as above
                doing = f"advancing {request_id}"
                broken.append(Broken(id=request_id, phase="step", failure=failure(error, doing)))
            else:
                for finished, outcome in zip(held.finished, it.outcomes, strict=True):
                    if isinstance(outcome, SegmentFinished):
                        finished.append(outcome.latents)
                moved[request_id] = it
                held.predicted()
        return moved, broken

    def _release_batch(self, work: RunningRequests) -> None:
        """Drops the last batch if one of its requests was dropped during the step: the batch holds its states."""
        with self._lock:
            if not self._held.keys() >= work.keys():
                self._rows = None

    def _predict(self, work: RunningRequests) -> Mapping[State, Mapping[str, Tensor]]:
        states = [state for held in work.values() for state in held.states]
        for state in states:
            state.reports.clear()
        # `drop` may forget the last batch meanwhile
        rows = self._rows = assemble(states, self._layouts, self._rows)
        return predict(self._pipeline, rows)

    def _refuse_nonfinite(self, moved: dict[str, StepOutcome], broken: list[Broken]) -> None:
        """Removes requests whose latents are not finite. This is the only read from the device in a step, and it also
        makes the measured time of a step the time it took, not the time to launch it.
        """
        if not moved:
            return
        nonfinite = read_back(torch.stack([nonfinite for it in moved.values() for nonfinite in _nonfinite(it)]))
        flags = iter(nonfinite)
        for request_id, it in list(moved.items()):
            if any(list(itertools.islice(flags, len(it.outcomes)))):
                step = moved.pop(request_id).held.states[0].steps_done
                error = InternalError(
                    f"the latents of {request_id} are not finite after step {step}", reason="NON_FINITE_LATENTS"
                )
                broken.append(Broken(id=request_id, phase="step", failure=error.failure))

    def _progress(self, request_id: str, it: StepOutcome) -> RequestStep:
        held, state = it.held, it.held.states[0]
        progress = RequestStep(
            id=request_id,
            step=state.steps_done,
            total=state.steps,
            sigma=it.sigma,
            timestep=it.timestep,
            rows=it.rows,
            reports=StepReports.of(held.reports),
            evals=held.evals,
            earlier=held.seconds,
            segment=it.segment,
            segments=state.segments,
            part_ready=any(isinstance(outcome, SegmentFinished) for outcome in it.outcomes),
            finished=all(isinstance(outcome, Finished) for outcome in it.outcomes),
            previews=self._previews(it),
        )
        held.stepped()
        return progress

    def _previews(self, it: StepOutcome) -> tuple[PreviewImage, ...]:
        first = it.held.states[0]
        asked = first.request.preview
        if asked is None or first.steps_done % asked.every_steps or not self._delivers:
            return ()
        # of one that the step has ended, nothing is left to foresee
        going_on = all(isinstance(outcome, NextStep) for outcome in it.outcomes)
        following = first.schedule.sigmas[first.index] if going_on else 0.0
        previews = []
        for state, origin, tokens in zip(it.held.states, it.held.origins, _latents(it), strict=True):
            latents = state.grid.unpack(predict_x0(tokens, origin, it.sigma, following))
            picture = media.fit(latent_preview(latents[:, latents.shape[1] // 2], self._latent_rgb), asked.max_edge_px)
            height, width, _ = picture.shape
            data = media.encode(picture, asked.format, preview=True)
            previews.append(PreviewImage(state.output, asked.format.mime_type, data, width, height))
        return tuple(previews)


def load_pipeline(parts: Loader, effects: Effects, setting: RunnerContext, lanes: Lanes | None = None) -> Pipeline:
    """The pipeline of a checkpoint, with every feature that the loader applies and that reports to `effects`, and those
    of whole pipelines. Raises ConfigError for a feature without any effect.
    """
    kind: type[Pipeline] = pkgutil.resolve_name(parts.checkpoint.spec.pipeline)
    pipeline = kind.load(parts)
    surround(pipeline, setting, effects, lanes or Lanes())
    effects.check()
    return pipeline


def _course(held: RunningRequest) -> delivery.Course:
    first = held.states[0]
    return delivery.Course(
        steps=first.steps_done // first.segments,
        evals=held.all_evals,
        dropped_tokens=first.dropped_tokens,
        levels=_levels(first),
    )


def _levels(state: State) -> VisitedLevels:
    return VisitedLevels(sigmas=state.schedule.sigmas, shift=state.schedule.shift)


def _latents(it: StepOutcome) -> list[Tensor]:
    """The latents of each output after the evaluation: those of the finished segment where it ended one."""
    return [
        outcome.latents if isinstance(outcome, SegmentFinished) else state.latents
        for state, outcome in zip(it.held.states, it.outcomes, strict=True)
    ]


def _nonfinite(it: StepOutcome) -> list[Tensor]:
    """For each output, int32 []: 0 where its latents are finite."""
    return [
        state.ahead.nonfinite
        if state.ahead is not None and state.ahead.latents is latents
        else (~latents.isfinite().all()).int()
        for state, latents in zip(it.held.states, _latents(it), strict=True)
    ]


def _start_of(held: RunningRequest) -> StepOutcome:
    first = held.states[0]
    if not held.evals and first.request.preview is not None:
        held.origins = [state.latents for state in held.states]
    return StepOutcome(
        held=held,
        timestep=first.schedule.timesteps[first.evaluation],
        sigma=first.schedule.sigmas[first.index],
        segment=first.segment,
        rows=sum(len(state.branches) for state in held.states),
    )
