"""vLLM-Omni's offline entry point, over ours."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

from omni_grpc import omni
from omni_grpc.compat.config import STATIC_LORA, OmniDiffusionConfig
from omni_grpc.compat.parallel import DiffusionParallelConfig
from omni_grpc.compat.request import DiffusionOutput, OmniDiffusionRequest, OmniDiffusionSamplingParams, Prompt
from omni_grpc.config import SchedulerConfig
from omni_grpc.types.errors import ConfigError, InvalidArgument, Violation
from omni_grpc.types.events import Event
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Task
from omni_grpc.types.spec import Checkpoint

KEYS = ("prompt", "negative_prompt", "multi_modal_data")

GenerationCall = Callable[..., omni.Generation]
"""One generation that waits to be made; takes `on_event`."""


class Omni:
    """A model, loaded in this process, or spread over others as its DiffusionParallelConfig says. Takes the fields of
    OmniDiffusionConfig and DiffusionParallelConfig as keywords, and any setting of ours (`device="cpu"`). Raises
    ConfigError for what is unknown or cannot be done.
    """

    def __init__(
        self, model: str | None = None, *, od_config: OmniDiffusionConfig | None = None, **settings: Any
    ) -> None:
        self.od_config, own = _configure(od_config, settings if model is None else {"model": model, **settings})
        tree = self.od_config.settings() | own
        # a call may take more at once than the config says, up to what an engine takes by itself
        tree["max_num_seqs"] = max(self.od_config.max_num_seqs, SchedulerConfig().max_num_seqs)
        self.omni = omni.Omni(tree.pop("model", None), **tree)

    def __enter__(self) -> Omni:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stops the engine."""
        self.omni.close()

    def generate(
        self,
        prompts: Prompt | OmniDiffusionRequest | Sequence[Prompt],
        sampling_params: OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None = None,
        *,
        max_num_seqs: int | None = None,
    ) -> list[DiffusionOutput]:
        """One output for each prompt, in their order. `max_num_seqs` of them take their steps together.

        Raises InvalidArgument for what cannot be done before anything is made, and the OmniError of the first
        generation that fails; then the others are cancelled, as they are by an interrupt.
        """
        request = _request(prompts, sampling_params)
        request.sampling_params.check()
        most = self._most(max_num_seqs)
        calls = [self._call(prompt, request.sampling_params, i) for i, prompt in enumerate(request.prompts)]
        generations = _run(calls, most)
        modality = self.omni.checkpoint.tasks[0].modality
        return [DiffusionOutput.of(generation, modality, request.request_id) for generation in generations]

    def _most(self, asked: int | None) -> int:
        if asked is None:
            return self.od_config.max_num_seqs
        limit = self.omni.config.scheduler.max_num_seqs
        if isinstance(asked, int) and not isinstance(asked, bool) and 1 <= asked <= limit:
            return asked
        raise _refused(
            "max_num_seqs", f"is {asked!r}, expected 1 to {limit}; set Omni(..., max_num_seqs=) to allow more"
        )

    def _call(self, prompt: Prompt, params: OmniDiffusionSamplingParams, index: int) -> GenerationCall:
        where = f"prompts[{index}]"
        given = _mapping({"prompt": prompt} if isinstance(prompt, str) else prompt, where)
        if unknown := sorted(given.keys() - set(KEYS)):
            raise _refused(f"{where}.{unknown[0]}", f"not yet: a prompt has {', '.join(KEYS)}")
        if not isinstance(given.get("prompt"), str):
            raise _refused(f"{where}.prompt", f"is {given.get('prompt')!r}, expected text")
        checkpoint = self.omni.checkpoint
        beside = f"{where}.multi_modal_data"
        media = _mapping(given.get("multi_modal_data") or {}, beside)
        media = {name: value for name, value in media.items() if value is not None}
        method, inputs, taken = self._method(media, beside, checkpoint)
        optional = params.of_some(checkpoint.tasks)
        for name in optional.keys() - set(taken):
            asked = {"fps": "frame_rate", "output_fps": "fps"}.get(name, name)
            raise _refused(f"sampling_params.{asked}", f"has no effect in {method.__name__} of {checkpoint.name!r}")
        lora_path, lora_scale = self.od_config.lora_path, self.od_config.lora_scale
        return functools.partial(
            method,
            given["prompt"],
            negative_prompt=given.get("negative_prompt"),
            loras=None if lora_path is None else {STATIC_LORA: lora_scale},
            **inputs,
            **optional,
            **params.of_all(checkpoint.guidance),
        )

    def _method(
        self, media: Mapping[str, Any], where: str, checkpoint: Checkpoint
    ) -> tuple[GenerationCall, dict[str, Any], tuple[str, ...]]:
        """Which of our methods makes it, with which media, and which options it takes that not all do."""
        makes, tasks = checkpoint.tasks[0].modality, checkpoint.tasks
        known = {Modality.IMAGE: ("image",), Modality.VIDEO: ("image", "video", "audio"), Modality.AUDIO: ("audio",)}
        if unknown := sorted(media.keys() - set(known[makes])):
            why = f"not yet: {checkpoint.name!r} takes {', '.join(known[makes])}"
            raise _refused(f"{where}.{unknown[0]}", why)
        sizes = ("height", "width")
        if makes is Modality.AUDIO:
            return self.omni.generate_audio, {"reference": media.get("audio")}, ("strength",)
        if makes is Modality.VIDEO:
            pictures = _several(media.get("image", ()))
            if len(pictures) > 1:
                raise _refused(f"{where}.image", f"has {len(pictures)} images; a video can start from only one")
            sound = Task.TEXT_TO_AUDIO_VIDEO if not media and Task.TEXT_TO_VIDEO not in tasks else None
            inputs = {
                "first_frame": next(iter(pictures), None),
                "source_video": media.get("video"),
                "audio": media.get("audio"),
                "task": sound if sound in tasks else None,
            }
            return self.omni.generate_video, inputs, (*sizes, "num_frames", "fps", "output_fps", "strength")
        if not media:
            return self.omni.generate, {}, sizes
        change = Task.IMAGE_TO_IMAGE if Task.IMAGE_EDIT not in tasks and Task.IMAGE_TO_IMAGE in tasks else None
        return (
            self.omni.edit_image,
            {"images": _several(media["image"]), "task": None if Task.LAYERED in tasks else change},
            (*sizes, "strength", "layers"),
        )


def _configure(
    od_config: OmniDiffusionConfig | None, given: Mapping[str, Any]
) -> tuple[OmniDiffusionConfig, dict[str, Any]]:
    """The config that keywords describe, unless there is one, and those keywords that are settings of ours."""
    degrees = {field.name for field in dataclasses.fields(DiffusionParallelConfig)}
    names = {field.name for field in dataclasses.fields(OmniDiffusionConfig)}
    own = {name: value for name, value in given.items() if name not in names | degrees}
    config = {name: value for name, value in given.items() if name in names}
    ranks = {name: value for name, value in given.items() if name in degrees}
    if od_config is not None:
        _only_one("od_config", config | ranks)
        return od_config, own
    if "parallel_config" in config:
        _only_one("parallel_config", ranks)
    elif ranks:
        config["parallel_config"] = DiffusionParallelConfig(**ranks)
    return OmniDiffusionConfig(**config), own


def _only_one(name: str, others: Mapping[str, Any]) -> None:
    if others:
        rule = f"{min(others)} and {name} are both set; set only {name}, which includes it"
        raise ConfigError(rule, violations=(Violation(min(others), rule),))


def _request(
    prompts: Prompt | OmniDiffusionRequest | Sequence[Prompt],
    sampling_params: OmniDiffusionSamplingParams | Sequence[OmniDiffusionSamplingParams] | None,
) -> OmniDiffusionRequest:
    params = sampling_params
    if isinstance(params, Sequence):
        if len(params) != 1:
            raise _refused("sampling_params", f"has {len(params)} entries, but there is only one stage: give one entry")
        params = params[0]
    if isinstance(prompts, OmniDiffusionRequest):
        if params is not None:
            raise _refused("sampling_params", "is set, but the request has its own; set only one of them")
        return prompts
    listed = list(prompts) if isinstance(prompts, Sequence) and not isinstance(prompts, str) else [prompts]
    return OmniDiffusionRequest(prompts=listed, sampling_params=params or OmniDiffusionSamplingParams())


def _run(calls: Sequence[GenerationCall], most: int) -> list[omni.Generation]:
    """Runs the calls, `most` at once. When one fails, or at an interrupt, the others are cancelled."""
    stopped = threading.Event()

    def watch(event: Event) -> None:
        if stopped.is_set():
            raise concurrent.futures.CancelledError

    with concurrent.futures.ThreadPoolExecutor(most, thread_name_prefix="omni_grpc-compat") as pool:
        futures = [pool.submit(call, on_event=watch) for call in calls]
        try:
            done, _ = concurrent.futures.wait(futures, return_when=concurrent.futures.FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stopped.set()
            for future in futures:
                future.cancel()
            raise
    return [future.result() for future in futures]


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _refused(where, f"is a {type(value).__name__}, expected a dict")
    return value


def _several(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _refused(field: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {why}", reason="NOT_SUPPORTED", violations=(Violation(field, why),))
