"""What a pipeline class can do, read off its signatures: its tasks, or the reason why it has none."""

from __future__ import annotations

import dataclasses
import inspect

from omni_grpc.adapter.parameters import NAMES, OWN, Signature
from omni_grpc.adapter.quirks import NOT_SERVED, WITHOUT_IMAGE
from omni_grpc.resolve.rules import TAKEN
from omni_grpc.types.media import Modality
from omni_grpc.types.request import Task
from omni_grpc.types.spec import GuidanceKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """`reason` says why there are no tasks, or is empty."""

    modality: Modality
    tasks: tuple[Task, ...] = ()
    guidance: tuple[GuidanceKind, ...] = ()
    takes: frozenset[str] = frozenset()
    reason: str = ""


def ability(pipeline: type, *, guided: bool = False) -> Ability:
    """What the adapter can do with a DiffusionPipeline class. guided: one of it has a guider with a scale."""
    signature = Signature(pipeline, guided=guided)
    modality = _modality(signature)
    if reason := _reason(pipeline, signature):
        return Ability(modality=modality, reason=reason)
    if modality is Modality.AUDIO:
        tasks: tuple[Task, ...] = (Task.TEXT_TO_AUDIO,)
    else:
        tasks = _video_tasks(pipeline, signature) if modality is Modality.VIDEO else _image_tasks(signature)
    kinds = (("scale", GuidanceKind.EMBEDDED), ("true_cfg_scale", GuidanceKind.TRUE_CFG))
    return Ability(
        modality=modality,
        tasks=tasks,
        guidance=tuple(kind for field, kind in kinds if field in signature),
        takes=_takes(signature, modality),
    )


def _modality(signature: Signature) -> Modality:
    if "num_waveforms_per_prompt" in signature.parameters or "duration" in signature:
        return Modality.AUDIO
    is_video = "num_frames" in signature or "num_videos_per_prompt" in signature.parameters
    return Modality.VIDEO if is_video or "Video" in signature.pipeline else Modality.IMAGE


def _reason(pipeline: type, signature: Signature) -> str:
    if pipeline.__name__ in NOT_SERVED:
        return NOT_SERVED[pipeline.__name__]
    for field, reason in (("prompt", "takes no prompt"), ("steps", "takes no number of steps")):
        if field not in signature:
            return reason
    if "generator" not in signature.parameters:
        return "takes no generator, so that seeds mean nothing"
    known = {name for names in NAMES.values() for name in names} | set(OWN)
    if unmet := [name for name in signature.required if name not in known]:
        return f"needs {', '.join(unmet)}"
    return "" if any("scheduler" in name for name in inspect.signature(pipeline).parameters) else "has no scheduler"


def _image_tasks(signature: Signature) -> tuple[Task, ...]:
    if "Layered" in signature.pipeline:
        return (Task.LAYERED,)
    if "images" not in signature:
        return (Task.TEXT_TO_IMAGE,)
    if "mask" in signature:
        return (Task.INPAINT,)
    if "strength" in signature:
        return (Task.IMAGE_TO_IMAGE,)
    without = (Task.TEXT_TO_IMAGE,) if signature.pipeline in WITHOUT_IMAGE else ()
    return (*without, Task.IMAGE_EDIT)


def _video_tasks(pipeline: type, signature: Signature) -> tuple[Task, ...]:
    tasks = [Task.IMAGE_TO_VIDEO] if "first_frame" in signature else []
    if "source_video" in signature:
        tasks.append(Task.VIDEO_TO_VIDEO)
    if not tasks or signature.pipeline in WITHOUT_IMAGE:
        tasks.insert(0, Task.TEXT_TO_VIDEO)
        if inspect.signature(pipeline).parameters.keys() & {"vocoder", "audio_vae"}:
            tasks.append(Task.TEXT_TO_AUDIO_VIDEO)
    if "mask_video" in signature or "control_video" in signature:
        tasks.append(Task.VIDEO_EDIT)
    return tuple(tasks)


def _takes(signature: Signature, modality: Modality) -> frozenset[str]:
    takes = {field for field in TAKEN if field in NAMES and field in signature} | {"extra"}
    # the one parameter `image` is the first frame of a video, and what a picture is made from
    takes -= {"images"} if modality is Modality.VIDEO else {"first_frame"}
    # where a second prediction has a scale of its own, that decides whether there is one
    if "true_cfg_scale" not in signature:
        takes |= {field for field in ("negative_prompt", "rescale", "scale_low_noise") if field in signature}
    return frozenset(takes)
