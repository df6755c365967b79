"""Runs any diffusers pipeline: one session at a time, a step of its scheduler for each step of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from omni_grpc.adapter import backends, caches, loading, results
from omni_grpc.adapter.describe import fps, sample_rate
from omni_grpc.adapter.guiders import guided
from omni_grpc.adapter.lora import Adapters
from omni_grpc.adapter.member import Member, members
from omni_grpc.adapter.outputs import unpack
from omni_grpc.adapter.parameters import arguments
from omni_grpc.adapter.prompts import count_tokens
from omni_grpc.adapter.randomness import Randomness
from omni_grpc.adapter.session import CallProgress, Session
from omni_grpc.config.backends import AUTO
from omni_grpc.types.errors import InternalError, InvalidArgument, OperationCancelled
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.media import PreviewImage
from omni_grpc.types.plan import Broken, Decoded, DecodedPart, Prepared, RequestStep, Stepped, VisitedLevels
from omni_grpc.types.request import Request
from omni_grpc.types.step_cache import FixedCache
from omni_grpc.worker import delivery, media
from omni_grpc.worker.base import LoadedModel, Runner, RunnerContext
from omni_grpc.worker.failure import failure


@dataclasses.dataclass(slots=True)
class _Held:
    """A request that is in the worker: how many steps were reported, by field of the prompt the tokens that did not
    fit, how many of its previews were due and could be made, and the noise levels of the call.
    """

    session: Session
    request: Request
    member: Member
    dropped: Mapping[str, int]
    steps: int = 0
    due: int = 0
    made: int = 0
    levels: VisitedLevels = dataclasses.field(default_factory=VisitedLevels)


class SessionRunner(Runner):
    """Holds the pipeline with its siblings, and the session that runs one of them."""

    def __init__(
        self,
        members: Sequence[Member],
        setting: RunnerContext,
        cache: caches.Cache | None = None,
        adapters: Adapters | None = None,
        *,
        scheduler: str = "",
        found: WorkerFindings | None = None,
    ) -> None:
        """`scheduler` and `found` are for the parameters in files, see `Delivery`."""
        self._members = members
        self._found = found or WorkerFindings()
        self._delivery = delivery.Delivery(setting.prefix, scheduler=scheduler, found=self._findings)
        self._cache = cache
        self._adapters = adapters
        # components are shared
        self._pipeline = members[0].pipeline
        self._denoisers = loading.denoisers(self._pipeline)
        self._schedulers = loading.schedulers(self._pipeline)
        self._dtypes = loading.vae_dtypes(self._pipeline)
        self._lock = threading.Lock()
        self._sessions: dict[str, _Held] = {}
        self._last: Session | None = None
        # a group of blocks that is offloaded must not be left half way
        offload = setting.config.offload
        if offload is None or not offload.enable_layerwise_offload:
            for block in loading.blocks(self._pipeline):
                block.register_forward_pre_hook(self._check)

    @classmethod
    def load(cls, setting: RunnerContext) -> LoadedModel:
        adapter = setting.config.adapter
        pipeline, adapters = loading.load(setting)
        denoisers = loading.denoisers(pipeline)
        cache, asked = None, setting.config.cache
        if asked is not None and asked.cache_backend is not None:
            cache = caches.Cache(pipeline, denoisers, asked.cache_backend, asked.cache_config or {})
        siblings, checkpoint = members(pipeline, setting.checkpoint, adapter.diffusers_call_kwargs or {}, cache)
        roles = setting.config.model.attention
        named = AUTO if roles is None else roles.default.backend
        attention = backends.choose(
            denoisers,
            None if named == AUTO else named,
            fallback=adapter.allow_attention_fallback,
            device=setting.device,
            dtype=setting.dtype,
        )
        found = WorkerFindings(
            attention_backend=attention.name,
            fixed_cache=None if cache is None else FixedCache(cache.name),
            residency=setting.residency,
            loras=adapters.found,
        )
        return LoadedModel(
            runner=cls(siblings, setting, cache, adapters, scheduler=checkpoint.scheduler, found=found),
            weight_bytes=loading.weight_bytes(list(pipeline.components.values())),
            found=found,
            warnings=attention.warnings,
            adapters=adapters,
            checkpoint=checkpoint,
            components={name: part for name, part in pipeline.components.items() if part is not None},
            # a step ends with the prediction of the next one, and the call runs on after the last
            denoising=[
                *((denoiser, "forward") for denoiser in denoisers),
                *((scheduler, "step") for scheduler in loading.schedulers(pipeline)),
            ],
        )

    def drop(self, ids: Sequence[str]) -> None:
        """Stops these sessions at their next step, or at the next block of their encode or decode. What they changed is
        undone before the next one begins.
        """
        with self._lock:
            for request_id in ids:
                if (held := self._sessions.pop(request_id, None)) is not None:
                    held.session.stop()

    def prepare(self, request: Request) -> Prepared:
        """Begins the call and waits until it stands before its first step, with the first prediction made."""
        began = time.monotonic()
        if self._last is not None:
            self._last.join()
        member = next(one for one in self._members if request.task in one.able.tasks)
        pipeline = member.pipeline
        tokens, dropped = count_tokens(pipeline, request, member.call_kwargs)
        values = arguments(request, member.signature, member.call_kwargs, sample_rate=sample_rate(pipeline))
        if self._cache is not None:
            self._cache.begin(pipeline, values)
        loops = loading.loops(pipeline, member.signature, values)
        session = self._last = Session(
            lambda: self._call(member, request, values),
            self._schedulers,
            loops=loops,
            total=lambda scheduler: loading.planned_steps(pipeline, scheduler, alone=len(loops) == 1),
            clean_up=lambda failed: self._clean_up(member, failed),
            randomness=Randomness(request.seeds),
            begin=lambda: loading.reconfigure(pipeline, request),
        )
        with self._lock:
            held = self._sessions[request.id] = _Held(session, request, member, dict(dropped))
        try:
            session.start()
        except (ValueError, TypeError) as error:
            if not session.began and _refused(pipeline, error):
                raise InvalidArgument(f"{member.name}: {error}", reason="REFUSED_BY_PIPELINE") from error
            raise
        if session.began:
            held.levels = loading.visited_levels(pipeline, request)
        return Prepared(
            id=request.id,
            elapsed=time.monotonic() - began,
            prompt_tokens=tokens,
            dropped_tokens=dropped,
            levels=held.levels,
        )

    def step(self, ids: Sequence[str]) -> Stepped:
        """One step of the session. Requests that were dropped in the meantime are skipped."""
        began = time.monotonic()
        progress, broken = [], []
        for request_id in ids:
            with self._lock:
                held = self._sessions.get(request_id)
            if held is None:
                continue
            try:
                progress.append(_progress(held, held.session.advance()))
            except Exception as error:  # noqa: BLE001 - whatever a pipeline raises is the request's failure
                self.drop((request_id,))
                broken.append(Broken(id=request_id, phase="step", failure=failure(error, f"stepping {request_id}")))
        return Stepped(elapsed=time.monotonic() - began, progress=tuple(progress), broken=tuple(broken))

    def decode_part(self, request_id: str) -> DecodedPart:
        raise InternalError(f"request {request_id} is a call of a pipeline, whose outputs come all at its end")

    def decode(self, request_id: str) -> Decoded:
        """Waits for the call to return, and puts its outputs as files into shared memory. A request that is dropped
        meanwhile makes no more of them.
        """
        began = time.monotonic()
        with self._lock:
            held = self._sessions.get(request_id)
        if held is None:
            raise OperationCancelled(f"request {request_id} was dropped before its decode")
        request, member = held.request, held.member
        session = held.session
        result = session.output()
        outputs = unpack(result, member.able.modality)
        rate, rate_hz = fps(member.pipeline, member.signature), sample_rate(member.pipeline)
        made = time.monotonic()
        # all are encoded before any is put in shared memory: a block belongs to a report
        files = []
        for output in outputs:
            self._check_wanted(request_id)
            files.append(delivery.encode(output, request, fps=rate, sample_rate=rate_hz))
        self._check_wanted(request_id)
        course = delivery.Course(steps=session.steps, evals=held.steps, dropped_tokens=held.dropped, levels=held.levels)
        delivered = self._delivery.put(request, files, course)
        ended = time.monotonic()
        return Decoded(
            id=request_id,
            media=delivered.media,
            elapsed=ended - began,
            encoding=ended - made,
            peak_memory_bytes=media.peak_memory_bytes(),
            warnings=(
                *results.warnings(member, request, outputs, result, previews=held.made > 0 or not held.due),
                *results.of_randomness(member, request, shared=session.shared_randomness),
                *delivered.warnings,
            ),
            steps=session.steps,
        )

    def _findings(self) -> WorkerFindings:
        """With the adapters that there are now."""
        adapters = self._adapters
        return self._found if adapters is None else dataclasses.replace(self._found, loras=adapters.found)

    def _call(self, member: Member, request: Request, values: Mapping[str, Any]) -> Any:
        scale = request.guidance.scale if member.signature.guided else None
        with contextlib.ExitStack() as stack:
            stack.enter_context(guided(member.pipeline, scale))
            if self._adapters is not None:
                stack.enter_context(self._adapters.applied(request.loras))
            return member.pipeline(**values)

    def _check(self, *_: Any) -> None:
        if self._last is not None:
            self._last.check()

    def _check_wanted(self, request_id: str) -> None:
        with self._lock:
            if request_id not in self._sessions:
                raise OperationCancelled(f"request {request_id} was dropped in its decode")

    def _clean_up(self, member: Member, failed: bool) -> None:
        if failed:
            # some cast it for the length of a decode
            for name, dtype in self._dtypes.items():
                if (part := self._pipeline.components[name]).dtype != dtype:
                    part.to(dtype=dtype)
        if failed or member.pipeline is not self._pipeline:
            # a call that returns does this itself, but only the loaded pipeline knows of its offload
            self._pipeline.maybe_free_model_hooks()
        caches.reset(self._denoisers)


def _refused(pipeline: Any, error: BaseException) -> bool:
    """Whether the pipeline's own code raised the error, that is, its checks of the arguments."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename == inspect.getfile(type(pipeline))


def _progress(held: _Held, moved: CallProgress) -> RequestStep:
    request = held.request
    held.steps += 1
    previews: tuple[PreviewImage, ...] = ()
    if request.preview is not None and moved.step % request.preview.every_steps == 0:
        previews = held.member.previews.make(request, moved.latents)
        held.due, held.made = held.due + 1, held.made + bool(previews)
    return RequestStep(
        id=request.id,
        step=moved.step,
        total=moved.total,
        sigma=moved.sigma,
        timestep=moved.timestep,
        rows=request.num_outputs,
        finished=moved.finished,
        previews=previews,
    )
