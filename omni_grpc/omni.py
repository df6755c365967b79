"""Offline use: the engine in this process, behind a plain call.

with Omni("path/to/checkpoint") as omni:
    result = omni.generate("a red circle left of a blue square", width=256, height=256, seed=7)
    result.images[0].save("out.png")
"""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import io
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, Unpack

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Job, JobState, LocalExecutor, Submission
from omni_grpc.resolve import tasks
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.adapters_and_caches import Lora
from omni_grpc.types.errors import InvalidArgument, Violation
from omni_grpc.types.events import TERMINAL, Event
from omni_grpc.types.media import ImageFormat, Inputs, OutputFormat
from omni_grpc.types.request import Draft, GuidanceDraft, GuidanceNorm, Task
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats
from omni_grpc.types.spec import Checkpoint

if TYPE_CHECKING:
    import PIL.Image

    from omni_grpc.client.media import MediaSource

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """What came out of one call: the encoded outputs, and the truth about how they were made."""

    files: tuple[bytes, ...]
    seeds: tuple[int, ...]
    effective: Effective
    warnings: tuple[RequestWarning, ...]
    stats: Stats
    artifacts: tuple[Artifact, ...] = ()
    """What there is to know of each output: size, number of frames, rates, playing time."""

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs, decoded."""
        import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            size = (self.effective.width, self.effective.height)
            return [PIL.Image.frombytes("RGB", size, data) for data in self.files]
        return [PIL.Image.open(io.BytesIO(data)) for data in self.files]


class Sampling(TypedDict, total=False):
    """What any generation may ask for besides its prompt and its inputs. None means the model's default."""

    negative_prompt: str | None
    """What to steer away from. The empty string counts: it turns classifier-free guidance on."""
    steps: int | None
    guidance_scale: float | None
    """Embedded guidance of distilled models."""
    true_cfg_scale: float | None
    """Classifier-free guidance; active above 1 and with a negative_prompt."""
    guidance_norm: GuidanceNorm | None
    guidance_rescale: float | None
    guidance_start: float | None
    """Guidance is on from this fraction of the steps..."""
    guidance_end: float | None
    """...until before this one."""
    true_cfg_scale_2: float | None
    """Models with two experts: `true_cfg_scale` for the expert for low noise. Not given: the same."""
    boundary_ratio: float | None
    """Models with two experts: the fraction of the training timesteps at which that one takes over, from 0 to 1."""
    seed: int | None
    """Seed of output 0; output i uses seed + i."""
    seeds: Sequence[int] | None
    """One seed for each output. Give this or `seed`."""
    num_outputs: int | None
    scheduler: str | None
    """One of the model's schedulers (`checkpoint.schedulers`) in place of the checkpoint's own."""
    output_format: OutputFormat | None
    loras: Mapping[str, float] | None
    """Adapters that are loaded (the setting `lora`), by name, each with its scale."""
    extra: Mapping[str, Any] | None
    """Parameters of one model, by name."""


class PictureSampling(Sampling, total=False):
    """What is made to be looked at."""

    width: int | None
    """Pixels."""
    height: int | None
    """Pixels."""


_GUIDANCE: Mapping[str, str] = {
    "guidance_scale": "scale",
    "true_cfg_scale": "true_cfg_scale",
    "guidance_norm": "norm",
    "guidance_rescale": "rescale",
    "guidance_start": "interval_start",
    "guidance_end": "interval_end",
    "true_cfg_scale_2": "scale_low_noise",
    "boundary_ratio": "boundary_ratio",
}


class Omni:
    """A model, loaded in this process; by default the small one that comes with this package.

    Settings are those of the server (`EngineConfig.from_settings`). The same engine, scheduler and worker as in the
    server, so the same request gives the same result. CUDA graphs are there where `cuda_graph_tokens` is set: while a
    batch is captured, the caller's threads may not wait for the device or draw from torch's generator for it.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self._open(EngineConfig.from_settings(model=model, **settings))

    @classmethod
    def of(cls, config: EngineConfig, *, alone: bool = False) -> Self:
        """The model of a whole configuration. alone: nothing else in this process works on the device."""
        omni = cls.__new__(cls)
        omni._open(config, alone=alone)
        return omni

    def _open(self, config: EngineConfig, *, alone: bool = False) -> None:
        self.config = config
        checkpoint = open_model(self.config.model, apply=lambda found: apply_settings(self.config, found))
        self._engine = Engine(self.config, checkpoint, LocalExecutor(self.config, checkpoint, alone=alone))
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

    @property
    def checkpoint(self) -> Checkpoint:
        """The model, with what loading it has told."""
        return self._engine.checkpoint

    def close(self) -> None:
        """Stops the engine. Running generations fail with Unavailable."""
        if self._loop.is_closed():
            return
        self._call(self._engine.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def generate(
        self, prompt: str, *, on_event: Callable[[Event], None] | None = None, **sampling: Unpack[PictureSampling]
    ) -> Generation:
        """Makes images, start to end. Raises the OmniError that ended it.

        `on_event` is called with each event; an interrupt cancels the generation.
        """
        return self.run(self._draft(prompt, Task.TEXT_TO_IMAGE, sampling, PictureSampling), on_event)

    def edit_image(
        self,
        prompt: str,
        *,
        images: Sequence[MediaSource],
        mask: MediaSource | None = None,
        strength: float | None = None,
        layers: int | None = None,
        task: Task | None = None,
        on_event: Callable[[Event], None] | None = None,
        **sampling: Unpack[PictureSampling],
    ) -> Generation:
        """Makes images from images: paths, data: URIs, bytes, pictures of PIL's, or artifacts of an earlier call.

        The task follows from what is given, as in the API's EditImageRequest; `task` overrules that.
        """
        media = {"images": images, "mask": mask}
        own = {"strength": strength, "layers": layers}
        given = [name for name, value in (media | own).items() if value is not None]
        draft = self._draft(prompt, task or tasks.edit_task(given), sampling, PictureSampling)
        return self._run_with(dataclasses.replace(draft, strength=strength, layers=layers), media, on_event)

    def generate_video(
        self,
        prompt: str,
        *,
        first_frame: MediaSource | None = None,
        last_frame: MediaSource | None = None,
        source_video: MediaSource | None = None,
        reference_images: Sequence[MediaSource] | None = None,
        control_video: MediaSource | None = None,
        mask_video: MediaSource | None = None,
        audio: MediaSource | None = None,
        strength: float | None = None,
        num_frames: int | None = None,
        duration: float | None = None,
        fps: float | None = None,
        output_fps: float | None = None,
        task: Task | None = None,
        on_event: Callable[[Event], None] | None = None,
        **sampling: Unpack[PictureSampling],
    ) -> Generation:
        """Makes videos. `duration` is in seconds and becomes the nearest number of frames that the model makes.

        The task follows from what is given, as in the API's GenerateVideoRequest; `task` overrules that.
        """
        media = {
            "first_frame": first_frame,
            "last_frame": last_frame,
            "source_video": source_video,
            "reference_images": reference_images,
            "control_video": control_video,
            "mask_video": mask_video,
            "audio": audio,
        }
        given = [name for name, value in media.items() if value is not None]
        draft = self._draft(prompt, task or tasks.video_task(given), sampling, PictureSampling)
        draft = dataclasses.replace(
            draft, strength=strength, num_frames=num_frames, duration=duration, fps=fps, output_fps=output_fps
        )
        return self._run_with(draft, media, on_event)

    def generate_audio(
        self,
        prompt: str,
        *,
        text: str = "",
        reference: MediaSource | None = None,
        strength: float | None = None,
        start: float | None = None,
        duration: float | None = None,
        sample_rate: int | None = None,
        on_event: Callable[[Event], None] | None = None,
        **sampling: Unpack[Sampling],
    ) -> Generation:
        """Makes sounds. Times in seconds, the rate of the file in samples per second."""
        draft = dataclasses.replace(
            self._draft(prompt, Task.TEXT_TO_AUDIO, sampling, Sampling),
            text=text,
            strength=strength,
            start=start,
            duration=duration,
            sample_rate=sample_rate,
        )
        return self._run_with(draft, {"audio": reference}, on_event)

    def run(self, draft: Draft, on_event: Callable[[Event], None] | None = None) -> Generation:
        """The same for a Draft. `on_event` is called with each event; an interrupt cancels the generation."""
        return self._run(Submission(draft=draft), on_event)

    def _run_with(self, draft: Draft, media: Mapping[str, Any], on_event: Callable[[Event], None] | None) -> Generation:
        """Decodes the media, then runs the draft with them. What the model cannot do is refused first."""
        self._engine.check(draft.model, draft.task)
        inputs, notes = self._decode(media)
        submission = Submission(draft=dataclasses.replace(draft, inputs=inputs), warnings=notes)
        return self._run(submission, on_event)

    def _decode(self, media: Mapping[str, Any]) -> tuple[Inputs, tuple[RequestWarning, ...]]:
        given = {name: value for name, value in media.items() if value is not None}
        if not given:
            return Inputs(), ()
        # here, because codecs are worth loading only for those who bring media
        from omni_grpc.client.media import media_input, media_inputs
        from omni_grpc.media_in.inputs import InputFile, decode

        files = []
        for name, value in given.items():
            try:
                several = name in ("images", "reference_images")
                found = media_inputs(value) if several else [media_input(value)]
            except TypeError:
                rule = f"is a {type(value).__name__}, expected media: a path, bytes, a picture or an artifact"
                raise InvalidArgument(f"{name} {rule}", violations=(Violation(name, rule),)) from None
            for i, one in enumerate(found):
                data = self._engine.artifacts.get(one.asset_id)[1] if one.asset_id else one.data
                path = f"{name}[{i}]" if several else name
                files.append(InputFile(path=path, name=name, data=data, uri=one.uri, mime_type=one.mime_type))
        return decode(files, self.config.limits)

    def _draft(self, prompt: str, task: Task, sampling: Sampling, known: type[Sampling]) -> Draft:
        for name in sampling.keys() - known.__annotations__.keys():
            close = difflib.get_close_matches(name, known.__annotations__, n=1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        asked: dict[str, Any] = {name: value for name, value in sampling.items() if value is not None}
        seed, seeds = asked.pop("seed", None), tuple(asked.pop("seeds", ()))
        if seed is not None and seeds:
            raise InvalidArgument("seed and seeds are both set; give one of them")
        loras = tuple(Lora(id=name, scale=scale) for name, scale in asked.pop("loras", {}).items())
        guidance = {field: asked.pop(name) for name, field in _GUIDANCE.items() if name in asked}
        return Draft(
            model=self.checkpoint.name,
            prompt=prompt,
            task=task,
            guidance=GuidanceDraft(**guidance),
            seeds=seeds if seed is None else (seed,),
            loras=loras,
            **asked,
        )

    def _run(self, submission: Submission, on_event: Callable[[Event], None] | None) -> Generation:
        job = self._call(self._submit(submission))
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
        job = self._call(self._submit(Submission(draft=draft)))
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
            artifacts=job.artifacts,
        )

    async def _submit(self, submission: Submission) -> Job:
        job, _ = self._engine.submit(submission)
        return job

    async def _cancel(self, job: Job) -> None:
        self._engine.cancel(job.id, "the caller left the stream")

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()
