"""Runs any diffusers pipeline: one session at a time, a step of its scheduler for each step of the engine."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from diffusers import DiffusionPipeline

from omni_grpc import shared
from omni_grpc.adapter import backends, caches, loading
from omni_grpc.adapter.abilities import Ability, ability
from omni_grpc.adapter.describe import describe, fps, frames_used, sample_rate
from omni_grpc.adapter.outputs import Output, blanked, unpack
from omni_grpc.adapter.parameters import Signature, arguments, check_call_kwargs
from omni_grpc.adapter.preview import Previews
from omni_grpc.adapter.prompts import count_tokens
from omni_grpc.adapter.session import Moved, Session
from omni_grpc.errors import Cancelled, CheckpointError, InvalidArgument
from omni_grpc.plan import Broken, Decoded, Media, Prepared, Progress, Stepped
from omni_grpc.request import (
    AudioFormat,
    ImageFormat,
    Modality,
    PreviewImage,
    Request,
    RequestWarning,
    VideoFormat,
)
from omni_grpc.worker import media
from omni_grpc.worker.base import Loaded, Runner, Setting
from omni_grpc.worker.failure import failure


class SessionRunner(Runner):
    """Holds one pipeline and the session that runs it."""

    def __init__(
        self, pipeline: DiffusionPipeline, able: Ability, setting: Setting, cache: caches.Cache | None = None
    ) -> None:
        self._pipeline = pipeline
        self._ability = able
        self._prefix = setting.prefix
        self._call_kwargs: Mapping[str, Any] = setting.config.adapter.diffusers_call_kwargs or {}
        self._cache = cache
        self._signature = Signature(type(pipeline))
        self._denoisers = loading.denoisers(pipeline)
        self._schedulers = loading.schedulers(pipeline)
        self._previews = Previews(pipeline)
        self._blocks = itertools.count()
        self._lock = threading.Lock()
        self._sessions: dict[str, tuple[Session, Request]] = {}
        self._last: Session | None = None

    @classmethod
    def load(cls, setting: Setting) -> Loaded:
        adapter = setting.config.adapter
        pipeline = loading.load(setting)
        able = ability(type(pipeline))
        if able.reason:
            message = f"{type(pipeline).__name__} cannot be served: it {able.reason}"
            raise CheckpointError(message, reason="MODEL_NOT_SUPPORTED")
        call_kwargs = adapter.diffusers_call_kwargs or {}
        check_call_kwargs(Signature(type(pipeline)), call_kwargs)
        denoisers = loading.denoisers(pipeline)
        attention = backends.choose(
            denoisers,
            adapter.diffusion_attention_backend,
            fallback=adapter.allow_attention_fallback,
            device=setting.device,
            dtype=setting.dtype,
        )
        cache = None
        if adapter.cache_backend is not None:
            cache = caches.Cache(pipeline, denoisers, adapter.cache_backend, adapter.cache_config or {})
        return Loaded(
            runner=cls(pipeline, able, setting, cache),
            weight_bytes=loading.weight_bytes(list(pipeline.components.values())),
            attention_backend=attention.name,
            warnings=attention.warnings,
            checkpoint=describe(pipeline, able, setting.checkpoint, call_kwargs),
        )

    def drop(self, ids: Sequence[str]) -> None:
        """Stops these sessions at their next step. What they changed is undone before the next one begins."""
        with self._lock:
            for request_id in ids:
                if (held := self._sessions.pop(request_id, None)) is not None:
                    held[0].stop()

    def prepare(self, request: Request) -> Prepared:
        """Begins the call and waits until it stands before its first step, with the first prediction made."""
        began = time.monotonic()
        if self._last is not None:
            self._last.join()
        if self._cache is not None:
            self._cache.begin(request)
        tokens, dropped = count_tokens(self._pipeline, request, self._call_kwargs)
        values = arguments(request, self._signature, self._call_kwargs, sample_rate=sample_rate(self._pipeline))
        session = self._last = Session(
            lambda: self._pipeline(**values), self._schedulers, total=self._total, clean_up=self._clean_up
        )
        with self._lock:
            self._sessions[request.id] = (session, request)
        try:
            session.start()
        except (ValueError, TypeError) as error:
            if not session.began and self._refused(error):
                raise InvalidArgument(f"{self._signature.pipeline}: {error}", reason="REFUSED_BY_PIPELINE") from error
            raise
        return Prepared(id=request.id, elapsed=time.monotonic() - began, prompt_tokens=tokens, dropped_tokens=dropped)

    def step(self, ids: Sequence[str]) -> Stepped:
        """One step of the session. Requests that were dropped meanwhile are left out."""
        began = time.monotonic()
        progress, broken = [], []
        for request_id in ids:
            with self._lock:
                held = self._sessions.get(request_id)
            if held is None:
                continue
            session, request = held
            try:
                progress.append(self._progress(request, session.advance()))
            except Exception as error:  # noqa: BLE001 - whatever a pipeline raises is the request's failure
                self.drop((request_id,))
                broken.append(Broken(id=request_id, phase="step", failure=failure(error, f"stepping {request_id}")))
        return Stepped(elapsed=time.monotonic() - began, progress=tuple(progress), broken=tuple(broken))

    def decode(self, request_id: str) -> Decoded:
        """Waits for the call to return, and puts its outputs as files into shared memory."""
        began = time.monotonic()
        with self._lock:
            held = self._sessions.get(request_id)
        if held is None:
            raise Cancelled(f"request {request_id} was dropped before its decode")
        session, request = held
        result = session.output()
        outputs = unpack(result, self._ability.modality)
        # all are encoded before any is put in shared memory: a block belongs to a report
        files = [self._encode(request, output) for output in outputs]
        made = tuple(self._share(request, index, len(files), *file) for index, file in enumerate(files))
        return Decoded(
            id=request_id,
            media=made,
            elapsed=time.monotonic() - began,
            peak_memory_bytes=media.peak_memory_bytes(),
            warnings=self._warnings(request, outputs, result),
            steps=session.steps,
        )

    # --- the call ---------------------------------------------------------------------------------------------------

    def _total(self, scheduler: Any) -> int:
        """Steps of the call, which the pipeline knows from before its first one; more than asked for where a scheduler
        takes several for one, fewer where strength skips some.
        """
        own = getattr(self._pipeline, "num_timesteps", None) if len(self._schedulers) == 1 else None
        return own if isinstance(own, int) else len(scheduler.timesteps)

    def _clean_up(self, failed: bool) -> None:
        if failed:
            # a call that returns does this itself
            self._pipeline.maybe_free_model_hooks()
        caches.reset(self._denoisers)

    def _refused(self, error: BaseException) -> bool:
        """Whether the pipeline's own code raised it, that is its checks of what it is called with."""
        frames = traceback.extract_tb(error.__traceback__)
        return bool(frames) and frames[-1].filename == inspect.getfile(type(self._pipeline))

    def _progress(self, request: Request, moved: Moved) -> Progress:
        previews: tuple[PreviewImage, ...] = ()
        if request.preview is not None and moved.step % request.preview.every_steps == 0:
            previews = self._previews.make(request, moved.latents)
        return Progress(
            id=request.id,
            step=moved.step,
            total=moved.total,
            sigma=moved.sigma,
            timestep=moved.timestep,
            rows=request.num_outputs,
            finished=moved.finished,
            previews=previews,
        )

    # --- outputs ----------------------------------------------------------------------------------------------------

    def _encode(self, request: Request, output: Output) -> tuple[bytes, dict[str, Any]]:
        """The file, and the fields of Media that say what is in it."""
        match request.output_format:
            case ImageFormat() as image:
                assert output.pixels is not None
                height, width, channels = output.pixels.shape
                has_alpha = channels == 4 and media.keeps_alpha(image)
                return media.encode(output.pixels, image), {"width": width, "height": height, "has_alpha": has_alpha}
            case VideoFormat() as video:
                assert output.pixels is not None
                frames, height, width, _ = output.pixels.shape
                rate = request.output_fps or request.fps or fps(self._pipeline, self._signature)
                sound = None if output.samples is None else (output.samples, sample_rate(self._pipeline))
                width, height = media.encoded_size(width, height, video)
                about = {"width": width, "height": height, "num_frames": frames, "duration": frames / rate}
                about["fps"] = float(media.frame_rate(rate))
                if sound is not None:
                    about["sample_rate"] = media.encoded_rate(video, sound[1])
                return media.encode_video(output.pixels[..., :3], rate, video, sound), about
            case AudioFormat() as audio:
                assert output.samples is not None
                rate_hz = sample_rate(self._pipeline)
                target = media.encoded_rate(audio, request.sample_rate or rate_hz)
                data = media.encode_audio(output.samples, rate_hz, audio, request.sample_rate)
                return data, {
                    "width": 0, "height": 0, "sample_rate": target, "duration": output.samples.shape[1] / rate_hz
                }  # fmt: skip

    def _share(self, request: Request, index: int, count: int, data: bytes, about: dict[str, Any]) -> Media:
        # a request for layers gets several outputs for each seed
        seed = request.seeds[index * len(request.seeds) // count]
        return Media(
            index=index,
            data=shared.put(data, f"{self._prefix}{next(self._blocks)}"),
            mime_type=request.output_format.mime_type,
            seed=seed,
            sha256=hashlib.sha256(data).hexdigest(),
            **about,
        )

    def _warnings(self, request: Request, outputs: Sequence[Output], result: Any) -> tuple[RequestWarning, ...]:
        warnings = []
        pixels = outputs[0].pixels
        name = self._signature.pipeline
        if pixels is not None:
            height, width = pixels.shape[-3:-1]
            if (width, height) != (request.width, request.height):
                warnings.append(
                    _rounded(
                        "SIZE", "width, height", name, f"{request.width} x {request.height}", f"{width} x {height}"
                    )
                )
            asked = request.num_frames
            if self._ability.modality is Modality.VIDEO and asked not in (None, len(pixels)):
                warnings.append(_rounded("FRAMES", "num_frames", name, str(asked), str(len(pixels))))
            source = request.inputs.source_video
            if source is not None and (used := frames_used(self._pipeline, source, len(pixels))) < source.num_frames:
                warnings.append(
                    RequestWarning(
                        code="SOURCE_TRIMMED",
                        field="source_video",
                        message=f"{name} used its first {used} frames",
                        requested=str(source.num_frames),
                        applied=str(used),
                    )
                )
        for field in ("prompt", "negative_prompt"):
            if f"{field}_embeds" in request.extra and getattr(request, field):
                message = f"extra.{field}_embeds was used in its place"
                warnings.append(RequestWarning(code="PROMPT_WITHOUT_EFFECT", field=field, message=message))
        for index in blanked(result):
            message = f"the pipeline's safety checker replaced output {index} by a black picture"
            warnings.append(RequestWarning(code="OUTPUT_BLANKED", field="prompt", message=message))
        if request.preview is not None and (why := self._previews.unavailable):
            warnings.append(RequestWarning(code="PREVIEW_NOT_AVAILABLE", field="options.preview", message=why))
        if any(image.channels == 4 for image in request.inputs.images) and "Layered" not in name:
            message = "transparent parts of the input were laid on white"
            warnings.append(RequestWarning(code="ALPHA_FLATTENED", field="images", message=message))
        rate = request.fps or fps(self._pipeline, self._signature)
        if pixels is not None and outputs[0].samples is not None and request.output_fps not in (None, rate):
            message = f"the video was made for {rate:g} frames per second; its sound keeps the time of that"
            warnings.append(
                RequestWarning(
                    code="SOUND_OUT_OF_STEP",
                    field="output_fps",
                    message=message,
                    requested=f"{request.output_fps:g}",
                    applied=f"{rate:g}",
                )
            )
        clipped = sum(media.count_clipped(np.asarray(o.samples)) for o in outputs if o.samples is not None)
        if clipped:
            message = f"{clipped} samples were beyond full scale and were clipped"
            warnings.append(RequestWarning(code="SOUND_CLIPPED", field="", message=message))
        return tuple(warnings)


def _rounded(what: str, field: str, pipeline: str, requested: str, applied: str) -> RequestWarning:
    message = f"{pipeline} made {applied} of {requested}"
    return RequestWarning(code=f"{what}_ROUNDED", field=field, message=message, requested=requested, applied=applied)
