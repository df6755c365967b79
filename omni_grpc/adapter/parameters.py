"""From a request to the arguments of a pipeline's `__call__`, by the names in its own signature."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import PIL.Image
import torch

from omni_grpc.adapter.quirks import AS_LONG_AS_SOURCE, SEVERAL_IMAGES, SEVERAL_VIDEOS, STRENGTH_IS_KEPT
from omni_grpc.types.errors import ConfigError, InvalidArgument, Violation
from omni_grpc.types.media import AudioInput, ImageInput, VideoInput
from omni_grpc.types.request import Request, has_negative

NAMES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "width": ("width",),
    "height": ("height",),
    "steps": ("num_inference_steps",),
    "scale": ("guidance_scale",),
    "true_cfg_scale": ("true_cfg_scale",),
    "rescale": ("guidance_rescale",),
    "scale_low_noise": ("guidance_scale_2",),
    "num_outputs": ("num_images_per_prompt", "num_videos_per_prompt", "num_waveforms_per_prompt"),
    "strength": ("strength",),
    "layers": ("layers",),
    "num_frames": ("num_frames", "frames", "video_length"),
    "fps": ("frame_rate", "fps"),
    "duration": ("audio_end_in_s", "audio_length_in_s", "audio_duration", "audio_duration_s", "duration"),
    "start": ("audio_start_in_s",),
    "text": ("lyrics",),
    "images": ("image", "images"),
    "mask": ("mask_image",),
    "first_frame": ("image",),
    "last_frame": ("last_image",),
    "reference_images": ("reference_images", "control_image"),
    "source_video": ("video",),
    "control_video": ("control_video", "conditioning_frames"),
    "mask_video": ("mask_video", "mask"),
    "audio": ("initial_audio_waveforms",),
}
"""Our name of a parameter -> the names that pipelines use; the first one that a signature has counts."""

PATHS: Mapping[str, str] = {
    "steps": "sampling.steps",
    "num_outputs": "sampling.num_outputs",
    "scale": "sampling.guidance.scale",
    "true_cfg_scale": "sampling.guidance.true_cfg_scale",
    "rescale": "sampling.guidance.rescale",
    "scale_low_noise": "sampling.guidance.scale_low_noise",
}
"""Paths in a request of the fields that are not at its top level."""

OWN = (
    "generator", "output_type", "return_dict", "callback", "callback_steps", "callback_on_step_end",
    "callback_on_step_end_tensor_inputs", "prior_callback_on_step_end", "prior_callback_on_step_end_tensor_inputs",
    "initial_audio_sampling_rate",
)  # fmt: skip
"""Parameters that the adapter sets itself, so users may not."""


class Signature:
    """The parameters of a pipeline class's `__call__`. `**kwargs` do not count: what they swallow has no effect.
    guided: it has a guider, which takes the scale in place of a parameter.
    """

    def __init__(self, pipeline: type, *, guided: bool = False) -> None:
        named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        call = inspect.signature(pipeline.__call__).parameters
        self.pipeline = pipeline.__name__
        self.guided = guided
        self.parameters = {name: p for name, p in call.items() if p.kind in named and name != "self"}

    def name(self, field: str) -> str | None:
        """This pipeline's name for one of NAMES, None if it has no such parameter."""
        return next((name for name in NAMES[field] if name in self.parameters), None)

    def __contains__(self, field: str) -> bool:
        return self.name(field) is not None or (self.guided and field == "scale")

    def default(self, field: str) -> Any:
        """The default of that parameter; None if it has none."""
        name = self.name(field)
        value = self.parameters[name].default if name else None
        return None if value is inspect.Parameter.empty else value

    @property
    def required(self) -> tuple[str, ...]:
        """Parameters without a default."""
        return tuple(name for name, p in self.parameters.items() if p.default is inspect.Parameter.empty)

    def number(self, name: str, value: Any) -> Any:
        """The value, as an integer if the parameter is one: JSON and protobuf's Struct have a single number type."""
        kind = str(self.parameters[name].annotation)
        return int(value) if isinstance(value, float) and value.is_integer() and "float" not in kind else value

    def unknown(self, name: str) -> str:
        """Why `name` is not to be passed to this pipeline, or ""."""
        if name in OWN:
            return "is set by the adapter itself; leave it out"
        if name in self.parameters:
            return ""
        close = difflib.get_close_matches(name, self.parameters, n=1)
        return f"is no parameter of {self.pipeline}" + (f"; did you mean {close[0]!r}?" if close else "")


def check_call_kwargs(signatures: Sequence[Signature], call_kwargs: Mapping[str, Any]) -> None:
    """Raises ConfigError naming each key of --diffusers-call-kwargs that none of these pipelines takes."""
    first, *others = signatures
    wrong = {
        key: why for key in call_kwargs if (why := first.unknown(key)) and all(other.unknown(key) for other in others)
    }
    if wrong:
        message = "; ".join(f"--diffusers-call-kwargs: {key!r} {why}" for key, why in wrong.items())
        raise ConfigError(message, violations=(Violation("diffusers_call_kwargs", message),))


def arguments(
    request: Request, signature: Signature, call_kwargs: Mapping[str, Any], *, sample_rate: int = 0
) -> dict[str, Any]:
    """The arguments of one call. What the request says wins over `call_kwargs`, which win over the pipeline's defaults.

    `sample_rate` is the pipeline's own, in Hz. Raises InvalidArgument naming each field that the pipeline cannot take.
    """
    asked = _asked(request, signature, sample_rate)
    faults = list(_faults(request, signature, asked))
    if faults:
        message = "; ".join(f"{fault.field}: {fault.description}" for fault in faults)
        raise InvalidArgument(message, violations=tuple(faults))
    fields = {name: value for field, value in asked.items() if (name := signature.name(field))}
    if request.sigmas:
        fields["sigmas"] = list(request.sigmas)
    extra = {name: signature.number(name, value) for name, value in request.extra.items()}
    settings = dict(call_kwargs)
    if "true_cfg_scale" in signature and not has_negative(request):
        # guidance is off for this request; a negative prompt of the settings would turn it on again
        settings = {name: value for name, value in settings.items() if not name.startswith("negative_prompt")}
    return {**_own(request, signature, sample_rate), **settings, **extra, **fields}


def _asked(request: Request, signature: Signature, sample_rate: int) -> dict[str, Any]:
    """The values that the request sets, by our names."""
    inputs, guidance = request.inputs, request.guidance
    size = None if signature.name("width") else (request.width, request.height)
    # without a negative prompt it would only bring warnings
    has_cfg = "true_cfg_scale" in signature and has_negative(request)
    end = (request.start or 0.0) + request.duration if request.duration is not None else None
    convert: dict[str, Callable[[], Any]] = {
        "images": lambda: _several(inputs.images, signature, size),
        "mask": lambda: _mask(inputs.mask, size),
        "first_frame": lambda: picture(inputs.first_frame),
        "last_frame": lambda: picture(inputs.last_frame),
        "reference_images": lambda: [picture(image) for image in inputs.reference_images],
        "source_video": lambda: _source(request, signature, size),
        "control_video": lambda: frames(inputs.control_video),
        "mask_video": lambda: [frame.convert("L") for frame in _trimmed(inputs.mask_video, request, signature)],
        "audio": lambda: samples(inputs.audio, sample_rate),
    }
    values: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "steps": request.steps,
        "scale": guidance.scale,
        "true_cfg_scale": guidance.true_cfg_scale if has_cfg else None,
        "rescale": guidance.rescale if "rescale" in signature else guidance.rescale or None,
        "scale_low_noise": guidance.scale_low_noise,
        "strength": strength(signature, request.strength),
        "layers": request.layers,
        "num_frames": request.num_frames,
        # that of the pipeline's own making is no argument
        "fps": request.fps if "fps" in signature else None,
        "duration": end if signature.name("duration") == "audio_end_in_s" else request.duration,
        "start": request.start,
        "text": request.text or None,
        "num_outputs": request.num_outputs if request.num_outputs > 1 or "num_outputs" in signature else None,
    }
    if request.width:
        values |= {"width": request.width, "height": request.height}
    values |= {field: convert[field]() for field in inputs.given}
    if len(inputs.reference_images) == 1 and signature.name("reference_images") == "control_image":
        values["reference_images"] = picture(inputs.reference_images[0])
    # pipelines take a text or its embeddings, never both
    given = {key for key, value in request.extra.items() if value is not None}
    embedded = {field for field in ("prompt", "negative_prompt") if f"{field}_embeds" in given}
    return {field: value for field, value in values.items() if value is not None and field not in embedded}


def _faults(request: Request, signature: Signature, asked: Mapping[str, Any]) -> list[Violation]:
    faults = [Violation(f"extra.{key}", why) for key in request.extra if (why := signature.unknown(key))]
    covered = {signature.name(field): PATHS.get(field, field) for field in NAMES}
    faults += [
        Violation(f"extra.{key}", f"has a field of its own: {covered[key]}") for key in request.extra if key in covered
    ]
    if request.sigmas and "sigmas" in request.extra:
        faults.append(Violation("extra.sigmas, sampling.sigmas", "are both set; set sampling.sigmas alone"))
    faults += [
        Violation(f"extra.{key}", "is a tensor, which only a caller in Python can give")
        for key, value in request.extra.items()
        if ("embeds" in key or key.endswith("latents")) and not isinstance(value, torch.Tensor | None)
    ]
    faults += [
        Violation(f"extra.{key}", f"cannot be null in {signature.pipeline}; leave it out")
        for key, value in request.extra.items()
        if value is None and key in signature.parameters and signature.parameters[key].default is not None
    ]
    # pictures carry their size where a pipeline has no parameters for it
    faults += [
        Violation(PATHS.get(field, field), f"{signature.pipeline} does not take it; leave it unset")
        for field in asked
        if field not in signature and field not in ("width", "height")
    ]
    if {"first_frame", "source_video"} <= asked.keys():
        faults.append(Violation("first_frame, source_video", f"{signature.pipeline} takes one; leave the other out"))
    source, count = request.inputs.source_video, request.num_frames
    if source is not None and signature.pipeline in AS_LONG_AS_SOURCE and (count or 0) > source.num_frames:
        rule = f"{count} is more than the {source.num_frames} frames of source_video; leave it unset, or ask for fewer"
        faults.append(Violation("num_frames", rule))
    for name in ("norm", "interval_start", "interval_end"):
        default = type(request.guidance)()
        if getattr(request.guidance, name) != getattr(default, name):
            faults.append(Violation(f"sampling.guidance.{name}", f"{signature.pipeline} does not take it"))
    return faults


def _own(request: Request, signature: Signature, sample_rate: int) -> dict[str, Any]:
    """Noise comes from CPU generators, so that a seed means the same on every device."""
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in request.seeds]
    own: dict[str, Any] = {"generator": generators[0] if len(generators) == 1 else generators}
    if "output_type" in signature.parameters:
        own["output_type"] = "np"
    if request.inputs.audio is not None:
        own["initial_audio_sampling_rate"] = sample_rate
    return own


def strength(signature: Signature, value: float | None) -> float | None:
    """The share that becomes noise as what this pipeline calls strength, and the other way round."""
    return 1 - value if value is not None and signature.pipeline in STRENGTH_IS_KEPT else value


# --- media ----------------------------------------------------------------------------------------------------------


def picture(image: ImageInput | None) -> PIL.Image.Image | None:
    """A picture as pipelines expect it: RGB, with transparent parts on white."""
    return None if image is None else _flat(image)


def _flat(image: ImageInput) -> PIL.Image.Image:
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
    made = PIL.Image.frombytes(mode, (image.width, image.height), image.data)
    if mode == "RGBA":
        white = PIL.Image.new("RGBA", made.size, (255, 255, 255, 255))
        made = PIL.Image.alpha_composite(white, made)
    return made.convert("RGB")


def frames(video: VideoInput | None) -> list[PIL.Image.Image]:
    """The frames of a video as pictures."""
    if video is None:
        return []
    pixels = np.frombuffer(video.data, np.uint8).reshape(video.num_frames, video.height, video.width, 3)
    return [PIL.Image.fromarray(frame) for frame in pixels]


def _source(request: Request, signature: Signature, size: tuple[int, int] | None) -> Any:
    made = [_sized(frame, size) for frame in _trimmed(request.inputs.source_video, request, signature)]
    return [made] if signature.pipeline in SEVERAL_VIDEOS else made


def _trimmed(video: VideoInput | None, request: Request, signature: Signature) -> list[PIL.Image.Image]:
    return frames(video)[: request.num_frames] if signature.pipeline in AS_LONG_AS_SOURCE else frames(video)


def samples(audio: AudioInput | None, sample_rate: int) -> torch.Tensor | None:
    """Sound as [1, channels, samples] in -1..1: a pipeline reads two dimensions as a batch of mono sounds. Raises
    InvalidArgument for another rate than the pipeline's.
    """
    if audio is None:
        return None
    if audio.sample_rate != sample_rate:
        message = f"is sampled at {audio.sample_rate} Hz, this pipeline takes {sample_rate} Hz; resample it"
        raise InvalidArgument(f"reference: {message}", violations=(Violation("reference", message),))
    values = np.frombuffer(audio.data, "<f4").reshape(1, audio.channels, -1)
    return torch.from_numpy(values.copy())


def _several(images: tuple[ImageInput, ...], signature: Signature, size: tuple[int, int] | None) -> Any:
    layered = "Layered" in signature.pipeline
    made = [_sized(_alpha(image) if layered else _flat(image), size) for image in images]
    return made if signature.pipeline in SEVERAL_IMAGES else made[0]


def _sized(image: PIL.Image.Image, size: tuple[int, int] | None) -> PIL.Image.Image:
    return image if size is None or size == image.size else image.resize(size, PIL.Image.Resampling.LANCZOS)


def _alpha(image: ImageInput) -> PIL.Image.Image:
    mode = {1: "L", 3: "RGB", 4: "RGBA"}[image.channels]
    return PIL.Image.frombytes(mode, (image.width, image.height), image.data).convert("RGBA")


def _mask(mask: ImageInput | None, size: tuple[int, int] | None) -> PIL.Image.Image | None:
    if mask is None:
        return None
    made = _flat(mask).convert("L")
    return made if size is None or size == made.size else made.resize(size, PIL.Image.Resampling.NEAREST)
