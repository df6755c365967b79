"""What each endpoint takes: OpenAI's fields, those of vLLM-Omni and SGLang-Diffusion, and our own options by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from omni_grpc.gate.media import is_video
from omni_grpc.types import request_options as options
from omni_grpc.types.lora import split
from omni_grpc.types.request_options import AUDIO, EDIT, IMAGE, MEDIA, MEDIA_LIST, VIDEO, options_of
from omni_grpc.types.spec import GuidanceKind
from omni_grpc.v1 import sampling_pb2
from omni_grpc.web.openai.body import File
from omni_grpc.web.openai.reading import Field, Fields, Reading, plain, shown, typed
from omni_grpc.wire.cache_choice import write_cache

MAX_PARTIAL_IMAGES = 3
"""As OpenAI has it."""
NOT_OURS = ("request_id", "preview_every_steps", "preview_max_edge_px")
"""Options that have another form here: the header Idempotency-Key, and `partial_images`."""


def _size(reading: Reading, name: str, value: Any) -> None:
    if value == "auto":
        return
    found = re.fullmatch(r"(\d{1,9})x(\d{1,9})", value) if isinstance(value, str) else None
    if found is None:
        reading.refuse(name, f"is {shown(value)}; expected auto, or WIDTHxHEIGHT in pixels, such as 1024x768")
        return
    for side, pixels in zip(("width", "height"), found.groups(), strict=True):
        reading.set(name, side, int(pixels))


def _seed(reading: Reading, name: str, value: Any) -> None:
    several = isinstance(plain(value), list)
    reading.set(name, "sampling.seeds" if several else "sampling.seed", value)
    # our rule for either is about the list
    reading.named("sampling.seed" if several else "sampling.seeds", name)


def _guidance_scale(reading: Reading, name: str, value: Any) -> None:
    """Embedded guidance where the model has it, as in diffusers; else the scale of classifier-free guidance."""
    embedded = GuidanceKind.EMBEDDED in reading.guided
    if embedded or not reading.guided or not {"true_cfg_scale", "cfg_scale"}.isdisjoint(reading.values):
        reading.set(name, "sampling.guidance.scale", value)
        return
    reading.set(name, "sampling.guidance.true_cfg_scale", value)
    reading.warn(
        name,
        "GUIDANCE_SCALE_IS_TRUE_CFG",
        "this model has no embedded guidance: it is used as true_cfg_scale",
        value,
        applied="true_cfg_scale",
    )


def _lora(reading: Reading, name: str, value: Any) -> None:
    """One adapter or several, as objects: vLLM-Omni names them in several ways."""
    value = plain(value)
    if not reading.named("sampling.loras", name):
        return
    for entry in value if isinstance(value, list) else [value]:
        given = dict(entry) if isinstance(entry, Mapping) else {"name": entry}
        path = _first(given, "path", "lora_path", "local_path", "lora_local_path")
        if path is not None:
            reading.refuse(
                f"{name}.path",
                "is not taken: adapters are loaded before (--lora NAME=PATH, LoadLora); name it alone",
            )
        _first(given, "int_id", "lora_int_id")
        lora = reading.message.sampling.loras.add()
        parts = (
            ("lora_id", options.TEXT, _first(given, "name", "lora_name", "adapter", "lora_id", "id")),
            ("scale", options.NUMBER, _first(given, "scale", "lora_scale")),
            ("target", options.TEXT, _first(given, "target")),
        )
        for part, kind, said in parts:
            if said is None:
                continue
            try:
                setattr(lora, part, typed(kind, said))
            except (TypeError, ValueError):
                reading.refuse(f"{name}.{part}", f"is {shown(said)}, expected {kind.expected}")
        for unknown in given:
            reading.refuse(f"{name}.{unknown}", "is unknown; an adapter has name, scale and target")


def _first(given: dict[str, Any], *names: str) -> Any:
    """The first of these names that is there; none of them is left."""
    found = [given.pop(name) for name in names if name in given]
    return next((value for value in found if value is not None), None)


def _loras(reading: Reading, name: str, value: Any) -> None:
    """Our own form, names with their scales, or theirs."""
    value = plain(value)
    if isinstance(value, Mapping) and all(isinstance(scale, int | float) for scale in value.values()):
        asked = ((split(str(lora)), scale) for lora, scale in value.items())
        value = [{"name": lora_id, "target": target or None, "scale": scale} for (lora_id, target), scale in asked]
    _lora(reading, name, value)


def _extra(reading: Reading, name: str, value: Any) -> None:
    reading.set(name, "sampling.extra", plain(value))


def _max_sequence_length(reading: Reading, name: str, value: Any) -> None:
    try:
        reading.message.sampling.extra.update({name: typed(options.COUNT, value)})
        reading.note("sampling.extra", name)
    except (TypeError, ValueError):
        reading.refuse(name, f"is {shown(value)}, expected {options.COUNT.expected}")


def _teacache(reading: Reading, name: str, value: Any) -> None:
    if (on := reading.flag(name, value)) is not None and reading.named("sampling.cache", name):
        cache = sampling_pb2.CacheOptions()
        (cache.tea_cache if on else cache.off).SetInParent()
        reading.message.sampling.cache.CopyFrom(cache)


def _cache_dit(reading: Reading, name: str, value: Any) -> None:
    if value := plain(value):
        _cache(reading, name, {"cache_dit": value})


def _cache(reading: Reading, name: str, value: Any) -> None:
    try:
        choice = typed(options.CACHE, plain(value))
        if reading.named("sampling.cache", name):
            write_cache(reading.message.sampling.cache, choice)
    except (TypeError, ValueError):
        reading.refuse(name, f"is {shown(value)}, expected {options.CACHE.expected}")


def _label(reading: Reading, name: str, value: Any) -> None:
    try:
        reading.message.options.labels[name] = typed(options.TEXT, value)
    except (TypeError, ValueError):
        # half of a surrogate pair is no text that can be sent
        reading.refuse(name, f"is {shown(value)}, expected text")
        return
    if "labels" not in reading.values:
        reading.note("options.labels", name)


def _response_format(reading: Reading, name: str, value: Any) -> None:
    reading.reply[name] = reading.choice(name, value, ("b64_json", "url"))


def _stream(reading: Reading, name: str, value: Any) -> None:
    reading.reply[name] = reading.flag(name, value)


def _partial_images(reading: Reading, name: str, value: Any) -> None:
    try:
        count = typed(options.COUNT, value)
    except (TypeError, ValueError):
        count = -1
    if not 0 <= count <= MAX_PARTIAL_IMAGES:
        reading.refuse(name, f"is {shown(value)}, expected an integer from 0 to {MAX_PARTIAL_IMAGES}")
    reading.reply[name] = count


def _background(reading: Reading, name: str, value: Any) -> None:
    asked = reading.choice(name, value, ("auto", "opaque", "transparent"))
    if asked == "transparent" and "layers" not in reading.values:
        reading.refuse(name, "transparent is made of layers alone: send `layers`, to a model that takes images apart")


def _media(path: str) -> Field:
    def take(reading: Reading, name: str, value: Any) -> None:
        reading.media(name, path, value)

    return Field(path=path, take=take)


def _mask(reading: Reading, name: str, value: Any) -> None:
    """OpenAI's: what is transparent is made anew."""
    reading.media(name, "mask", value)
    reading.transparent.add("mask")


def _reference(reading: Reading, name: str, value: Any) -> None:
    """A picture to begin with, or a video to start from, by its bytes."""
    video = isinstance(value, File) and (value.mime_type.startswith("video/") or is_video(value.data))
    if isinstance(value, Mapping):
        video = "video_url" in value
    reading.media(name, "source_video" if video else "first_frame", value)


def _seconds(path: str) -> Field:
    """A number, which OpenAI writes as text."""

    def take(reading: Reading, name: str, value: Any) -> None:
        try:
            reading.set(name, path, float(value))
        except (TypeError, ValueError):
            reading.refuse(name, f"is {shown(value)}, expected a number of seconds")

    return Field(take=take)


def _video_params(reading: Reading, name: str, value: Any) -> None:
    value = plain(value)
    if not isinstance(value, Mapping):
        reading.refuse(name, f"is {shown(value)}, expected an object")
        return
    for part, said in value.items():
        if part not in ("width", "height", "num_frames", "fps"):
            reading.refuse(f"{name}.{part}", "is unknown; it has width, height, num_frames and fps")
        elif said is not None:
            reading.set(f"{name}.{part}", part, said)


def _sound(reading: Reading, name: str, value: Any) -> None:
    if reading.flag(name, value):
        reading.set(name, "with_audio", True)


def _interpolate(reading: Reading, name: str, value: Any) -> None:
    if reading.flag(name, value) and reading.named("interpolation", name):
        reading.message.interpolation.SetInParent()


def _interpolation(part: str) -> Field:
    def take(reading: Reading, name: str, value: Any) -> None:
        reading.set(name, f"interpolation.{part}", value)
        reading.note("interpolation", name)

    return Field(take=take)


def _own(kind: str, *, without: Iterable[str] = NOT_OURS) -> Fields:
    """Our own options, by their names."""
    found: dict[str, Field] = {}
    for option in options_of(kind):
        if option.name in without:
            continue
        if option.type in (MEDIA, MEDIA_LIST):
            found[option.name] = _media(option.path)
        elif option.type is options.EXTRA:
            found[option.name] = Field(take=_extra)
        elif option.type is options.CACHE:
            found[option.name] = Field(take=_cache)
        else:
            found[option.name] = Field(path=option.path)
    return found


def _refused(why: str, *names: str, unless: tuple[object, ...] = (False,)) -> Fields:
    return {name: Field(refused=why, unless=unless) for name in names}


def _ignored(why: str, *names: str, unless: tuple[object, ...] = ("auto",)) -> Fields:
    return {name: Field(ignored=why, unless=unless) for name in names}


_SHARED: Mapping[str, Field] = {
    "model": Field(path="model"),
    "prompt": Field(path="prompt"),
    "n": Field(path="sampling.num_outputs"),
    "num_outputs_per_prompt": Field(path="sampling.num_outputs"),
    "num_inference_steps": Field(path="sampling.steps"),
    "guidance_scale": Field(take=_guidance_scale),
    "cfg_scale": Field(path="sampling.guidance.true_cfg_scale"),
    "guidance_scale_2": Field(path="sampling.guidance.scale_low_noise"),
    "seed": Field(take=_seed),
    "flow_shift": Field(path="sampling.shift"),
    "sigmas": Field(path="sampling.sigmas"),
    "lora": Field(take=_lora),
    "loras": Field(take=_loras),
    "extra_params": Field(take=_extra),
    "extra_args": Field(take=_extra),
    "diffusers_kwargs": Field(take=_extra),
    "max_sequence_length": Field(take=_max_sequence_length),
    "enable_teacache": Field(take=_teacache),
    "cache_dit_params": Field(take=_cache_dit),
    "user": Field(take=_label),
    "safety_identifier": Field(take=_label),
    **_ignored("noise is drawn the same way on every device", "generator_device"),
    **_refused("is not done here; start a profiler at the server", "profile", "num_profiled_timesteps"),
    **_refused("prompts are used as they are; leave it out", "enhance_prompt"),
    **_refused("is not done here; leave it out", "enable_upscaling", "upscaling_model_path", "upscaling_scale"),
}
_SIZE: Mapping[str, Field] = {
    "size": Field(take=_size),
    **_refused("name the size in pixels: size, or width and height", "resolution", "aspect_ratio", "short_edge"),
}
_PICTURE: Mapping[str, Field] = {
    **_SHARED,
    **_SIZE,
    "response_format": Field(take=_response_format),
    "stream": Field(take=_stream),
    "partial_images": Field(take=_partial_images),
    "background": Field(take=_background),
    **_ignored("the encoder's own setting is used", "output_compression"),
    **_ignored("set num_inference_steps", "quality", "complexity", unless=("auto", "standard")),
    **_ignored("there is no such setting", "style", "moderation", "input_fidelity"),
    **_refused("vector graphics and animations are not made here", "svg", "frame_count", "frame_rate"),
}

GENERATIONS: Mapping[str, Field] = {
    **_own(IMAGE),
    **_refused(
        "needs /v1/images/edits, which takes pictures",
        "image",
        "images",
        "mask",
        "mask_image",
        "url",
        "strength",
        "layers",
    ),
    **_PICTURE,
}
EDITS: Mapping[str, Field] = {
    **_own(EDIT),
    **_PICTURE,
    "image": _media("images"),
    "url": _media("images"),
    "mask": Field(take=_mask),
    "mask_image": _media("mask"),
    **_refused("send it as another image", "reference_image", "markup"),
}
VIDEOS: Mapping[str, Field] = {
    **_own(VIDEO),
    **_SHARED,
    **_SIZE,
    "seconds": _seconds("duration"),
    "video_params": Field(take=_video_params),
    "input_reference": Field(take=_reference),
    "image_reference": Field(take=_reference),
    "reference_url": Field(take=_reference),
    "input_references": _media("reference_images"),
    "video_reference": _media("source_video"),
    "video_url": _media("source_video"),
    "audio_reference": _media("audio"),
    "control_reference": _media("control_video"),
    "generate_sound": Field(take=_sound),
    "enable_frame_interpolation": Field(take=_interpolate),
    "frame_interpolation_exp": _interpolation("exp"),
    "frame_interpolation_scale": _interpolation("scale"),
    "frame_interpolation_model_path": _interpolation("model"),
    **_ignored(
        "the encoder's own setting is used", "quality", "output_quality", "x264_preset", unless=("auto", "default")
    ),
    **_refused("the sound is as long as the video", "sound_duration"),
    **_refused("GET /v1/videos/ID/content has the file", "output_path", "response_format"),
    **_refused("poll GET /v1/videos/ID instead", "stream"),
}
AUDIOS: Mapping[str, Field] = {
    **_own(AUDIO),
    **_SHARED,
    "input": Field(path="prompt"),
    "response_format": Field(path="output_format"),
    "audio_length": _seconds("duration"),
    "audio_start": _seconds("start"),
    **_refused("the speed of sound is not changed here", "speed", unless=(1, 1.0)),
    **_refused("this makes sound from a description, and has no voices", "voice", "instructions"),
    **_refused("the answer is the whole file", "stream"),
}
