"""Offline use: the engine in this process, behind a plain call.

with Omni("path/to/checkpoint") as omni:
    result = omni.generate("a red circle left of a blue square", width=256, height=256, seed=7)
    result.images[0].save("out.png")
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import threading
from collections.abc import Callable, Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, JobState, LocalExecutor, Submission
from omni_grpc.errors import InvalidArgument
from omni_grpc.registry import open_checkpoint
from omni_grpc.request import (
    TERMINAL,
    Draft,
    Effective,
    Event,
    GuidanceDraft,
    GuidanceNorm,
    ImageFormat,
    RequestWarning,
    Stats,
)

if TYPE_CHECKING:
    import PIL.Image

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came out of one call: the encoded outputs, and the truth about how they were made."""

    files: tuple[bytes, ...]
    seeds: tuple[int, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs, decoded."""
        import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            size = (self.effective.width, self.effective.height)
            return [PIL.Image.frombytes("RGB", size, data) for data in self.files]
        return [PIL.Image.open(io.BytesIO(data)) for data in self.files]


class Omni:
    """A model, loaded in this process. Settings are those of the server (`EngineConfig.from_settings`).

    The same engine, scheduler and worker as in the server, so the same request gives the same result.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        self.config = EngineConfig.from_settings(model=model, **settings)
        self.checkpoint = open_checkpoint(self.config.model.model, name=self.config.model.served_model_name)
        self._engine = Engine(self.config, self.checkpoint, LocalExecutor(self.config, self.checkpoint))
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="omni_grpc-engine", daemon=True)
        self._thread.start()
        try:
            self._call(self._engine.start())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stops the engine. Running generations fail with Unavailable."""
        if self._loop.is_closed():
            return
        self._call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self,
        prompt: str,
        *,
        negative_prompt: str | None = None,
        width: int | None = None,
        height: int | None = None,
        steps: int | None = None,
        guidance_scale: float | None = None,
        true_cfg_scale: float | None = None,
        guidance_norm: GuidanceNorm | None = None,
        seed: int | None = None,
        seeds: tuple[int, ...] = (),
        num_outputs: int | None = None,
        output_format: ImageFormat | None = None,
    ) -> Generation:
        """One generation, start to end. None means the model's default. Raises the OmniError that ended it."""
        if seed is not None and seeds:
            raise InvalidArgument("seed and seeds are both set; give one of them")
        return self.run(
            Draft(
                model=self.checkpoint.name,
                prompt=prompt,
                negative_prompt=negative_prompt,
                width=width,
                height=height,
                steps=steps,
                guidance=GuidanceDraft(scale=guidance_scale, true_cfg_scale=true_cfg_scale, norm=guidance_norm),
                seeds=seeds if seed is None else (seed,),
                num_outputs=num_outputs,
                output_format=output_format,
            )
        )

    def run(self, draft: Draft, on_event: Callable[[Event], None] | None = None) -> Generation:
        """The same for a Draft. `on_event` is called with each event; an interrupt cancels the generation."""
        job = self._call(self._submit(draft))
        try:
            for event in self._events(job):
                if on_event is not None:
                    on_event(event)
        except BaseException:
            self._call(self._cancel(job))
            raise
        return self._result(job)

    def stream(self, draft: Draft) -> Iterator[Event]:
        """The events of one generation as they happen. Leaving the iterator early cancels the generation."""
        job = self._call(self._submit(draft))
        try:
            yield from self._events(job)
        finally:
            self._call(self._cancel(job))

    def _events(self, job: Job) -> Iterator[Event]:
        seq = 0
        while True:
            self._call(job.wait(seq))
            for entry in list(job.entries[seq:]):
                seq = entry.seq
                yield entry.event
                if isinstance(entry.event, TERMINAL):
                    return

    def _result(self, job: Job) -> Generation:
        if job.failure is not None:
            raise job.failure.error()
        assert job.state is JobState.SUCCEEDED
        assert job.effective is not None
        assert job.stats is not None
        return Generation(
            files=tuple(self._engine.artifacts.get(artifact.id)[1] for artifact in job.artifacts),
            seeds=tuple(artifact.seed for artifact in job.artifacts),
            effective=job.effective,
            warnings=job.warnings,
            stats=job.stats,
        )

    async def _submit(self, draft: Draft) -> Job:
        job, _ = self._engine.submit(Submission(draft=draft))
        return job

    async def _cancel(self, job: Job) -> None:
        self._engine.cancel(job.id, "the caller left the stream")

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
