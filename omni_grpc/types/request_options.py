"""The options of a request, each declared once: name, path in the API, type, meaning and unit.

Everything that repeats an option is made from this table or checked against it: the keywords of the client and of
`Omni` (`client/options.py`, generated), the arguments of the command line, the fields that the server reads and those
that it refuses as not yet served. What a value may be is checked here by type alone; `resolve/rules.py` has the limits.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from omni_grpc.types.cache_choice import EXPECTED, cache_choice
from omni_grpc.types.media import AudioFormat, ImageFormat, VideoFormat
from omni_grpc.types.request import MAX_SEED, GuidanceNorm, RestartPolicy, Task
from omni_grpc.types.step_cache import METHODS

MAX_UINT32 = 2**32 - 1
MAX_INT32 = 2**31 - 1
MAX_UINT64 = 2**64 - 1
MAX_SECONDS = 315_576_000_000.0
"""What a google.protobuf.Duration holds: 10,000 years."""

IMAGE, EDIT, VIDEO, AUDIO = "image", "edit", "video", "audio"
"""The four kinds of generation, each a request message of its own."""
PICTURES = (IMAGE, EDIT, VIDEO)
ALL = (*PICTURES, AUDIO)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """What an option may hold.

    annotation: its Python type, as code. expected: the same for people. normalize: the value as plain Python, from
    anything that stands for it (a NumPy integer is an int, True is none); raises TypeError or ValueError. choices: the
    enum whose members it names, if any.
    """

    name: str
    annotation: str
    expected: str
    normalize: Callable[[Any], Any]
    choices: type[enum.StrEnum] | None = None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(value)
    return str(value)


def _whole(low: int, high: int) -> Callable[[Any], int]:
    def normalize(value: Any) -> int:
        if isinstance(value, bool):
            raise TypeError(value)
        number = operator.index(value)
        if not low <= number <= high:
            raise ValueError(value)
        return number

    return normalize


def _number(value: Any) -> float:
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise TypeError(value)
    return float(value)


def _seconds(value: Any) -> float:
    seconds = _number(value)
    if not abs(seconds) <= MAX_SECONDS:
        raise ValueError(value)
    return seconds


def _seeds(value: Any) -> tuple[int, ...]:
    if isinstance(value, str | bytes):
        raise TypeError(value)
    return tuple(SEED.normalize(seed) for seed in value)


def _numbers(value: Any) -> tuple[float, ...]:
    if isinstance(value, str | bytes):
        raise TypeError(value)
    return tuple(_number(number) for number in value)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise TypeError(value)
    return {_text(name): inner for name, inner in value.items()}


def _labels(value: Any) -> dict[str, str]:
    return {name: _text(inner) for name, inner in _mapping(value).items()}


def _loras(value: Any) -> dict[str, float]:
    return {name: _number(scale) for name, scale in _mapping(value).items()}


def _as_it_is(value: Any) -> Any:
    """Media are read where their bytes are needed."""
    return value


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(value)
    return value


def _one_of(kind: type[enum.StrEnum]) -> ValueType:
    return ValueType(
        name="CHOICE",
        annotation=f"{kind.__name__} | str",
        expected=f"one of {', '.join(kind)}",
        normalize=lambda value: kind(_text(value).upper()),
        choices=kind,
    )


_SEED_TEXT = f"an integer from 0 to {MAX_SEED}"
_MEDIA_TEXT = "a path, bytes, a PIL image, a uint8 array, an uploaded asset or an artifact"

FLAG = ValueType(name="FLAG", annotation="bool", expected="True or False", normalize=_flag)
TEXT = ValueType(name="TEXT", annotation="str", expected="text", normalize=_text)
COUNT = ValueType(
    name="COUNT", annotation="int", expected=f"an integer from 0 to {MAX_UINT32}", normalize=_whole(0, MAX_UINT32)
)
SIGNED = ValueType(name="SIGNED", annotation="int", expected="an integer", normalize=_whole(-MAX_INT32 - 1, MAX_INT32))
# what the wire holds; resolve/rules.py refuses seeds above MAX_SEED, with the nearest valid one
SEED = ValueType(name="SEED", annotation="int", expected=_SEED_TEXT, normalize=_whole(0, MAX_UINT64))
SEEDS = ValueType(
    name="SEEDS", annotation="Sequence[int]", expected=f"a list, each entry {_SEED_TEXT}", normalize=_seeds
)
NUMBER = ValueType(name="NUMBER", annotation="float", expected="a number", normalize=_number)
NUMBERS = ValueType(name="NUMBERS", annotation="Sequence[float]", expected="a list of numbers", normalize=_numbers)
FRACTION = ValueType(name="FRACTION", annotation="float", expected="a number from 0 to 1", normalize=_number)
SECONDS = ValueType(name="SECONDS", annotation="float", expected="a number of seconds", normalize=_seconds)
LORAS = ValueType(
    name="LORAS",
    annotation="Mapping[str, float]",
    expected="a mapping of LoRA adapter names to scales",
    normalize=_loras,
)
EXTRA = ValueType(
    name="EXTRA", annotation="Mapping[str, Any]", expected="a mapping of names to JSON values", normalize=_mapping
)
CACHE = ValueType(
    name="CACHE", annotation="str | Mapping[str, Mapping[str, Any]]", expected=EXPECTED, normalize=cache_choice
)
LABELS = ValueType(
    name="LABELS", annotation="Mapping[str, str]", expected="a mapping of strings to strings", normalize=_labels
)
MEDIA = ValueType(name="MEDIA", annotation="MediaSource", expected=_MEDIA_TEXT, normalize=_as_it_is)
MEDIA_LIST = ValueType(
    name="MEDIA_LIST",
    annotation="Sequence[MediaSource]",
    expected=f"a list, each entry {_MEDIA_TEXT}",
    normalize=_as_it_is,
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOption:
    """One option.

    name: its keyword in Python, and with hyphens its flag. path: its field in the API's messages, relative to the
    request. of: the kinds of generation that have it. draft: its field in a Draft; "" where it is read by hand or
    belongs to the job alone (its priority, say). flags: its spellings on the command line where they are not just the
    name; `cli` False: it has an argument of another kind there, or none. renamed: names that it had in earlier
    versions, which are taken with a warning until the next one.
    """

    name: str
    path: str
    type: ValueType
    doc: str
    of: tuple[str, ...] = ALL
    draft: str = ""
    flags: tuple[str, ...] = ()
    cli: bool = True
    renamed: tuple[str, ...] = ()

    @property
    def of_job(self) -> bool:
        """Whether it is about the job or its files, and not about what is made: no parameter of the generation."""
        return self.path.startswith("options.")

    @property
    def needs_server(self) -> bool:
        """Whether it sets how a server treats the job, and so has no effect without a server."""
        return self.of_job and not self.draft


def _guidance(name: str, field: str, type: ValueType, doc: str, *renamed: str) -> RequestOption:
    path = f"sampling.guidance.{field}"
    return RequestOption(name=name, path=path, type=type, doc=doc, draft=f"guidance.{field}", renamed=renamed)


def _sampling(name: str, type: ValueType, doc: str, **more: Any) -> RequestOption:
    return RequestOption(name=name, path=f"sampling.{name}", type=type, doc=doc, **{"draft": name, **more})


def _own(name: str, type: ValueType, doc: str, *of: str, **more: Any) -> RequestOption:
    return RequestOption(name=name, path=name, type=type, doc=doc, of=of, **{"draft": name, **more})


def _input(name: str, type: ValueType, doc: str, *of: str, **more: Any) -> RequestOption:
    return _own(name, type, doc, *of, **{"draft": f"inputs.{name}", **more})


def _job(name: str, type: ValueType, doc: str, **more: Any) -> RequestOption:
    return RequestOption(name=name, path=f"options.{name}", type=type, doc=doc, **more)


OPTIONS: tuple[RequestOption, ...] = (
    RequestOption(
        name="negative_prompt",
        path="negative_prompt",
        type=TEXT,
        doc="Negative prompt. An empty string counts: it turns classifier-free guidance (CFG) on.",
        draft="negative_prompt",
    ),
    _sampling("steps", COUNT, "Number of denoising steps.", flags=("--steps", "--num-inference-steps")),
    _guidance("guidance_scale", "scale", NUMBER, "Embedded guidance scale of distilled models."),
    _guidance(
        "true_cfg_scale",
        "true_cfg_scale",
        NUMBER,
        "Classifier-free guidance (CFG) scale; active above 1 and with a negative prompt.",
    ),
    _guidance(
        "guidance_norm",
        "norm",
        _one_of(GuidanceNorm),
        "What happens to the length of the guided prediction, token by token.",
    ),
    _guidance(
        "guidance_rescale",
        "rescale",
        FRACTION,
        "Share of the guided prediction that is rescaled to the standard deviation of the conditional one, 0 to 1.",
    ),
    _guidance(
        "guidance_interval_start",
        "interval_start",
        FRACTION,
        "CFG is on from this fraction of the steps, 0 to 1.",
        "guidance_start",
    ),
    _guidance(
        "guidance_interval_end",
        "interval_end",
        FRACTION,
        "CFG is on until before this fraction of the steps, 0 to 1.",
        "guidance_end",
    ),
    _guidance(
        "guidance_scale_low_noise",
        "scale_low_noise",
        NUMBER,
        "CFG scale of the low-noise expert, for models with two experts. Not given: true_cfg_scale.",
        "true_cfg_scale_2",
    ),
    _guidance(
        "boundary_ratio",
        "boundary_ratio",
        FRACTION,
        "Fraction of the training timesteps at which the low-noise expert takes over, 0 to 1.",
    ),
    _sampling("seed", SEED, "Seed of output 0; output i uses seed + i. Not given: random.", draft="seeds"),
    _sampling("seeds", SEEDS, "One seed per output. Set this or seed.", draft="seeds"),
    _sampling("num_outputs", COUNT, "Number of outputs."),
    _sampling("scheduler", TEXT, "One of the model's schedulers, by class name. Not given: the checkpoint's own."),
    _sampling(
        "shift",
        NUMBER,
        "Constant time shift of the schedule, in place of the checkpoint's rule. Not given: that rule.",
    ),
    _sampling("sigmas", NUMBERS, "Noise levels before the shift, one for each step, falling from at most 1."),
    _sampling(
        "preset",
        TEXT,
        "A preset of the model, which sets what this request does not: steps, schedule, guidance, adapters. none: no "
        "preset. Not given: the model's default one, if it has one.",
    ),
    _sampling("loras", LORAS, "LoRA adapters, by NAME or NAME@COMPONENT, with scales.", flags=("--adapter",)),
    _sampling(
        "cache",
        CACHE,
        "Step cache: off, a quality (near_lossless, balanced, fast), a method, or {method: {field: value}}. Not given: "
        "the server's own.",
    ),
    _sampling("extra", EXTRA, "Parameters of this one model, by name."),
    _own("width", COUNT, "Width in pixels.", *PICTURES),
    _own("height", COUNT, "Height in pixels.", *PICTURES),
    _input("images", MEDIA_LIST, "Images to start from, in order.", EDIT, flags=("--image", "--image-path")),
    _input("mask", MEDIA, "Mask, as large as the first image: white is regenerated (inpainted), black is kept.", EDIT),
    _input("first_frame", MEDIA, "Image that the video starts with (image to video).", VIDEO),
    _input("last_frame", MEDIA, "Image that the video ends with.", VIDEO),
    _input("source_video", MEDIA, "Video to start from (video to video).", VIDEO),
    _input("reference_images", MEDIA_LIST, "Images of what is to appear.", VIDEO, flags=("--reference-image",)),
    _input("control_video", MEDIA, "Control video: poses, depth or edges to follow.", VIDEO),
    _input("mask_video", MEDIA, "Mask: white is regenerated (inpainted), black is kept.", VIDEO),
    _input("audio", MEDIA, "Audio that drives the video.", VIDEO),
    _own("text", TEXT, "Words to sing or speak.", AUDIO),
    _input("reference", MEDIA, "Reference audio to start from.", AUDIO, draft="inputs.audio"),
    _own("strength", FRACTION, "Fraction of noise added to the input, 0 to 1.", EDIT, VIDEO, AUDIO),
    _own("layers", COUNT, "Number of layers to take the image apart into, each with alpha.", EDIT),
    _own("num_frames", COUNT, "Number of frames. Set this or duration.", VIDEO),
    _own("start", SECONDS, "Start of the clip within the whole piece, in seconds.", AUDIO),
    _own("end", SECONDS, "End of the clip within the whole piece, in seconds. Set this or duration.", AUDIO, draft=""),
    _own("duration", SECONDS, "Length in seconds. A video gets the nearest valid number of frames.", VIDEO, AUDIO),
    _own("fps", NUMBER, "Frame rate that the video is generated for.", VIDEO),
    _own("output_fps", NUMBER, "Frame rate of the file.", VIDEO),
    _own("sample_rate_hz", COUNT, "Sampling rate of the file, in Hz.", AUDIO, renamed=("sample_rate",)),
    _own("task", _one_of(Task), "The task. Not given: found from the inputs.", EDIT, VIDEO, draft=""),
    _own("output_format", _one_of(ImageFormat), "How images are encoded.", IMAGE, EDIT, cli=False),
    _own("output_format", _one_of(VideoFormat), "How videos are encoded.", VIDEO, cli=False),
    _own("output_format", _one_of(AudioFormat), "How sounds are encoded.", AUDIO, cli=False),
    RequestOption(
        name="preview_every_steps",
        path="options.preview.every_steps",
        type=COUNT,
        doc="Small pictures of the latents on every n-th step event (`step_progress.previews`). Not given: none.",
        of=PICTURES,
        cli=False,
        renamed=("preview_every",),
    ),
    RequestOption(
        name="preview_max_edge_px",
        path="options.preview.max_edge_px",
        type=COUNT,
        doc="Longer side of a preview in pixels at most.",
        of=PICTURES,
        cli=False,
        renamed=("preview_max_edge",),
    ),
    _job("request_id", TEXT, "Idempotency key. Not given: a new UUID4."),
    _job("labels", LABELS, "Labels of the job, to list jobs by.", flags=("--label",)),
    _job("priority", SIGNED, "Priority, -100 to 100; jobs with a higher one run first."),
    _job("queue_timeout", SECONDS, "Seconds after which a job that has not started fails, whoever waits for it."),
    _job("run_timeout", SECONDS, "Seconds from its start after which a job fails."),
    _job("retention", SECONDS, "Seconds that the server keeps the job and its outputs after its end."),
    _job(
        "on_server_restart",
        _one_of(RestartPolicy),
        "What becomes of the job if the server is lost while it runs: REQUEUE starts it over, FAIL ends it.",
    ),
    _job(
        "embed_parameters",
        FLAG,
        "Write the parameters (prompt, seed, settings) into the output files where they are made, and not only when "
        "they are saved.",
        draft="embed_parameters",
    ),
    RequestOption(
        name="webhook_url",
        path="options.webhook.url",
        type=TEXT,
        doc="HTTPS address that is told when the job ends.",
    ),
    RequestOption(
        name="webhook_secret_name",
        path="options.webhook.secret_name",
        type=TEXT,
        doc="Name of the server's secret that signs what is sent to webhook_url.",
    ),
)
"""Every option that Python and the command line have."""

API_ONLY: Mapping[str, tuple[str, ...]] = {
    "model": ALL,
    "prompt": ALL,
    "sampling.cache.off": ALL,
    "sampling.cache.quality": ALL,
    **{
        f"sampling.cache.{method}.{field.name}": ALL
        for method, record in METHODS.items()
        for field in dataclasses.fields(record)
    },
    "with_audio": (VIDEO,),
    "options.client_job_id": ALL,
    "options.on_disconnect": ALL,
    "options.disconnect_grace": ALL,
    "options.delivery": ALL,
    "options.webhook.states": ALL,
    "options.min_progress_interval": ALL,
    "options.deadline": ALL,
    "options.preview.method": PICTURES,
    "options.preview.format": PICTURES,
}
"""Fields of the API that are served and are no option by themselves: path -> the kinds of generation that have it."""


EXCLUSIVE = (("seed", "seeds"), ("num_frames", "duration"), ("end", "duration"))
"""Options that exclude each other."""


def options_of(kind: str) -> Iterator[RequestOption]:
    """The options of one kind of generation, in the order of the table."""
    return (option for option in OPTIONS if kind in option.of)


def served_paths(kind: str) -> frozenset[str]:
    """The fields of one kind of request that are served; any other field that is set is refused by name."""
    # of a cache, each field is served by itself
    paths = [option.path for option in options_of(kind) if option.type is not CACHE]
    return frozenset(paths + [path for path, of in API_ONLY.items() if kind in of])


def checked_names(kind: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are given, under today's names. Raises TypeError for an unknown name, with the nearest
    one, and warns about one that was renamed.
    """
    today = {name: option.name for option in options_of(kind) for name in (option.name, *option.renamed)}
    for name in given:
        if name not in today:
            close = difflib.get_close_matches(name, today, n=1)
            raise TypeError(f"unknown option {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
        if name != today[name]:
            message = f"the option {name!r} is called {today[name]!r} now; the old name goes with the next version"
            warnings.warn(message, DeprecationWarning, stacklevel=4)
    return {today[name]: value for name, value in given.items()}


def normalized(kind: str, given: Mapping[str, Any], faults: dict[str, str]) -> dict[str, Any]:
    """The options that are given, as plain Python; None is the same as not given. Invalid values are added to `faults`,
    under the option's path.
    """
    found: dict[str, Any] = {}
    for option in options_of(kind):
        value = given.get(option.name)
        if value is None:
            continue
        try:
            found[option.name] = option.type.normalize(value)
        except (TypeError, ValueError, OverflowError):
            faults[option.path] = f"is {value!r}, expected {option.type.expected}"
    return found


def exclusive_faults(kind: str, given: Mapping[str, Any]) -> dict[str, str]:
    """Options that exclude each other, where a request gives both: path -> what is wrong."""
    paths = {option.name: option.path for option in options_of(kind)}
    pairs = (pair for pair in EXCLUSIVE if all(name in given and name in paths for name in pair))
    return {", ".join(paths[name] for name in pair): "are both set; set only one of them" for pair in pairs}
