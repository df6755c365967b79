"""Offline use: the engine in this process, behind a plain call. The model is in this process too, unless it is spread
over ranks.

with Omni("path/to/checkpoint") as omni:
    result = omni.generate("a red circle left of a blue square", width=256, height=256, seed=7)
    result.images[0].save("out.png")
"""

from __future__ import annotations

import asyncio
import dataclasses
import io
import multiprocessing
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig, options
from omni_grpc.engine import Engine, Job, JobState, LocalExecutor, Submission
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.workers import executors
from omni_grpc.outbound import Outbound
from omni_grpc.resolve import tasks
from omni_grpc.resolve.draft import make_draft
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import ConfigError, InvalidArgument, Violation
from omni_grpc.types.events import TERMINAL, Event
from omni_grpc.types.media import ImageFormat, Inputs
from omni_grpc.types.request import Draft, Task
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, VIDEO, checked_names, normalized, options_of
from omni_grpc.types.requested import Requested
from omni_grpc.types.results import Artifact, Effective, RequestWarning, Stats
from omni_grpc.types.spec import Checkpoint

if TYPE_CHECKING:
    import PIL.Image

    from omni_grpc.client.media import MediaSource
    from omni_grpc.client.options import AudioSampling, EditSampling, ImageSampling, VideoSampling

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
    asked: Requested | None = None
    """What the caller asked for; None where it ran a Draft of its own."""

    @property
    def images(self) -> list[PIL.Image.Image]:
        """The outputs, decoded."""
        import PIL.Image

        if self.effective.output_format is ImageFormat.RAW_RGB8:
            size = (self.effective.width, self.effective.height)
            return [PIL.Image.frombytes("RGB", size, data) for data in self.files]
        return [PIL.Image.open(io.BytesIO(data)) for data in self.files]

    def save(self, path: str | Path, *, metadata: bool = True) -> list[Path]:
        """Writes the encoded outputs and returns their paths, as `MediaResult.save` of the client does: to `path`, to
        path-0, path-1... if there are several, or into it if it is a folder; with their parameters in them, unless
        `metadata` is False. Raises the same.
        """
        # here, because a client is worth loading only for those who write files
        from omni_grpc.client.saving import save

        return save(self, Path(path), metadata=metadata)


ABOUT_SERVERS = ("server", "tls", "identity", "tenants", "audit", "store", "webhooks", "fleet", "http", "metrics")
"""Sections of settings about who calls a server, what it has beside this model, and what outlives it. Here is none."""
OF_SERVERS = (
    *("load_later", "distributed_executor_backend", "ray_address", "ray_placement_timeout"),
    *("rank_port", "rank_secret_file"),
)
"""More settings of that kind."""
OF_SEVERAL = ("devices", "rank_timeout")
"""Settings about several workers. By default there is one, a thread of this process."""


def _refuse_without_effect(settings: Mapping[str, Any]) -> None:
    idle = [
        option.name
        for option in options()
        if option.name in settings and (option.section in ABOUT_SERVERS or option.name in OF_SERVERS)
    ]
    if idle:
        violations = tuple(Violation(name, "has no effect without a server; leave it out") for name in idle)
        raise ConfigError(f"{', '.join(idle)}: no effect without a server; leave it out", violations=violations)


def _refuse_of_several(settings: Mapping[str, Any], config: EngineConfig) -> None:
    """Raises ConfigError for settings of several workers where there is one."""
    if config.processes == 1 and (idle := [name for name in OF_SEVERAL if name in settings]):
        rule = "has no effect on one process; leave it out, or ask for ranks (ulysses_degree=2, for example)"
        violations = tuple(Violation(name, rule) for name in idle)
        raise ConfigError("; ".join(f"{name} {rule}" for name in idle), violations=violations)


def _refuse_import_by_ranks() -> None:
    """Raises ConfigError in a process that is being started and imports the script that starts it: it would start the
    same again.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ConfigError(
            "a model in several processes is asked for while one of them imports this script: put the call under "
            "if __name__ == '__main__'"
        )


def _executors(config: EngineConfig, checkpoint: Checkpoint, *, alone: bool) -> Sequence[Executor]:
    if config.processes > 1:
        return executors(config, checkpoint)
    return [LocalExecutor(config, checkpoint, alone=alone)]


class Omni:
    """A model, loaded in this process; by default the small one that comes with this package.

    Settings are those of the server (`EngineConfig.from_settings`). The same engine, scheduler and worker as in the
    server, so the same request gives the same result. With ranks (`ulysses_degree=2`) or replicas
    (`data_parallel_size=2`) the model is in processes of their own, which import the main script: it has to make its
    Omni under `if __name__ == "__main__"`. CUDA graphs are there where `cuda_graph_tokens` is set: while a
    batch is captured, the caller's threads may not wait for the device or draw from torch's generator for it.
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        """Raises ConfigError for a wrong setting, and for one that has no effect without a server."""
        _refuse_without_effect(settings)
        config = EngineConfig.from_settings(model=model, **settings)
        _refuse_of_several(settings, config)
        self._open(config)

    @classmethod
    def of(cls, config: EngineConfig, *, alone: bool = False) -> Self:
        """The model of a whole configuration. alone: nothing else in this process works on the device. Raises
        ConfigError for one that has no effect.
        """
        omni = cls.__new__(cls)
        omni._open(config, alone=alone)
        return omni

    def _open(self, config: EngineConfig, *, alone: bool = False) -> None:
        if config.processes > 1:
            _refuse_import_by_ranks()
        self.config = config
        self._outbound = Outbound(config.outbound)
        checkpoint = open_model(self.config.model, apply=lambda found: apply_settings(self.config, found))
        executor, *more = _executors(self.config, checkpoint, alone=alone)
        self._engine = Engine(self.config, checkpoint, executor, more=more)
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
        self._outbound.close()

    def generate(
        self, prompt: str | None, *, on_event: Callable[[Event], None] | None = None, **options: Unpack[ImageSampling]
    ) -> Generation:
        """Makes images, start to end. Raises the OmniError that ended it.

        `on_event` is called with each event; an interrupt cancels the generation.
        """
        return self._generate(IMAGE, prompt, options, on_event, lambda given: Task.TEXT_TO_IMAGE)

    def edit_image(
        self,
        prompt: str | None,
        *,
        images: Sequence[MediaSource],
        on_event: Callable[[Event], None] | None = None,
        **options: Unpack[EditSampling],
    ) -> Generation:
        """Makes images from images: paths, data: URLs, https URLs (of the setting `outbound_hosts`), bytes, PIL
        images, uint8 arrays, artifacts of an earlier call.

        The task follows from what is given, as in the API's EditImageRequest; `task` overrules that.
        """
        return self._generate(EDIT, prompt, {"images": images, **options}, on_event, tasks.edit_task)

    def generate_video(
        self, prompt: str | None, *, on_event: Callable[[Event], None] | None = None, **options: Unpack[VideoSampling]
    ) -> Generation:
        """Makes videos. `duration` is in seconds and becomes the nearest number of frames that the model makes.

        The task follows from what is given, as in the API's GenerateVideoRequest; `task` overrules that.
        """
        return self._generate(VIDEO, prompt, options, on_event, tasks.video_task)

    def generate_audio(
        self, prompt: str | None, *, on_event: Callable[[Event], None] | None = None, **options: Unpack[AudioSampling]
    ) -> Generation:
        """Makes sounds. Times in seconds, the rate of the file in samples per second."""
        return self._generate(AUDIO, prompt, options, on_event, lambda given: Task.TEXT_TO_AUDIO)

    def run(self, draft: Draft, on_event: Callable[[Event], None] | None = None) -> Generation:
        """The same for a Draft. `on_event` is called with each event; an interrupt cancels the generation."""
        return self._run(Submission(draft=draft), on_event)

    def _generate(
        self,
        kind: str,
        prompt: str | None,
        options: Mapping[str, Any],
        on_event: Callable[[Event], None] | None,
        task_of: Callable[[Collection[str]], Task],
    ) -> Generation:
        """Runs one generation of a kind. What the model cannot do is refused before its media are decoded."""
        given = checked_names(kind, options)
        served = [option.name for option in options_of(kind) if option.needs_server]
        if job := [name for name in served if given.get(name) is not None]:
            raise TypeError(f"{job[0]!r} means nothing without a server")
        faults: dict[str, str] = {}
        found = normalized(kind, given, faults)
        values = dict(found)
        if prompt is not None and not isinstance(prompt, str):
            faults["prompt"] = f"is {prompt!r}, expected text"
        task = values.pop("task", None) or task_of(values)
        draft = make_draft(kind, self.checkpoint.name, prompt or "", task, values, faults.__setitem__)
        if faults:
            violations = tuple(Violation(path, fault) for path, fault in faults.items())
            raise InvalidArgument("; ".join(f"{v.field} {v.description}" for v in violations), violations=violations)
        inputs = {o.draft.removeprefix("inputs."): o.name for o in options_of(kind) if o.draft.startswith("inputs.")}
        media = {name: values[keyword] for name, keyword in inputs.items() if keyword in values}
        asked = Requested(
            kind=kind,
            model=draft.model,
            prompt=draft.prompt,
            options={
                option.name: found[option.name]
                for option in options_of(kind)
                if option.name in found and option.name not in inputs.values() and not option.of_job
            },
        )
        if not media:
            return dataclasses.replace(self.run(draft, on_event), asked=asked)
        self._engine.check(draft.model, draft.task)
        decoded, notes, told = self._decode(media)
        asked = dataclasses.replace(asked, inputs={inputs[name]: traits for name, traits in told.items()})
        draft = dataclasses.replace(draft, inputs=decoded, input_traits=asked.inputs)
        submission = Submission(draft=draft, warnings=notes)
        return dataclasses.replace(self._run(submission, on_event), asked=asked)

    def _decode(self, media: Mapping[str, Any]) -> tuple[Inputs, tuple[RequestWarning, ...], dict[str, Any]]:
        """The decoded media of a request, how they were converted, and by name what tells them from others."""
        # here, because codecs are worth loading only for those who bring media
        from omni_grpc.client.asked import medium_traits
        from omni_grpc.client.media import media_input, media_inputs
        from omni_grpc.client.pictures import NotMedia
        from omni_grpc.media_in import fetch
        from omni_grpc.media_in.inputs import InputFile, decode

        files, told = [], {}
        for name, value in media.items():
            try:
                several = name in ("images", "reference_images")
                found = media_inputs(value) if several else [media_input(value)]
            except NotMedia as error:
                raise InvalidArgument(f"{name} {error}", violations=(Violation(name, str(error)),)) from error
            except TypeError:
                rule = (
                    f"is a {type(value).__name__}, expected media: a path, bytes, a PIL image, an array or an artifact"
                )
                raise InvalidArgument(f"{name} {rule}", violations=(Violation(name, rule),)) from None
            told[name] = [medium_traits(one) for one in found]
            for i, one in enumerate(found):
                data = self._call(self._engine.artifacts.data(one.asset_id)) if one.asset_id else one.data
                path = f"{name}[{i}]" if several else name
                files.append(InputFile(path=path, name=name, data=data, uri=one.uri, mime_type=one.mime_type))
        if any(map(fetch.is_remote, files)):
            fetch.check(files, self._outbound)
            files = self._fetch(fetch.fetched(files, self._outbound, max_bytes=self.config.limits.max_input_bytes))
        return *decode(files, self.config.limits), told

    def _fetch(self, fetching: Coroutine[Any, Any, T]) -> T:
        """What is fetched on the engine's loop; an interrupt ends it."""
        future = asyncio.run_coroutine_threadsafe(fetching, self._loop)
        try:
            return future.result()
        finally:
            future.cancel()

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
            files=tuple(self._call(self._engine.artifacts.data(one.artifact_id)) for one in job.artifacts),
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
