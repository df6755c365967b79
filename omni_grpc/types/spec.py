"""What a model says about itself, as data: no torch, so that the server can validate requests before any worker exists.

A family folder under `models/` exports `SPECS`, one `ModelSpec` per diffusers pipeline class that it serves natively.
"""

from __future__ import annotations

import dataclasses
import enum
import pkgutil
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.preset import Preset
from omni_grpc.types.request import Guidance, Task

Configs = Mapping[str, Mapping[str, Any]]
"""The JSON configs of a checkpoint in the diffusers layout: component name -> its config ("" is model_index.json)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Lazy:
    """A function by its import string, imported when it is called: a spec is read without torch, and is pickled."""

    path: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return pkgutil.resolve_name(self.path)(*args, **kwargs)


class GuidanceKind(enum.StrEnum):
    """How a model can be guided: by a scale it was trained on, or by a second prediction."""

    EMBEDDED = "EMBEDDED"
    TRUE_CFG = "TRUE_CFG"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the checkpoint supports. Sizes in pixels; `size_multiple` follows from the VAE and the patch size, never
    from a constant. A video longer than `segment_frames` is made in segments of so many frames, one after the other; 0:
    all frames at once.
    """

    size_multiple: int
    min_size: int
    max_size: int
    max_pixels: int
    max_prompt_tokens: int
    max_input_images: int = 0
    max_frames: int = 0
    frame_multiple: int = 1
    frame_offset: int = 0
    segment_frames: int = 0
    max_duration: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PromptScale:
    """The usual guidance scale of a model that guides some prompts in another way: those in which `pattern`, a regular
    expression, is found, and requests that bring `embeds` which are not all zeros. None is no guidance.
    """

    pattern: str
    embeds: str
    found: float | None
    otherwise: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """The defaults of requests.

    `prompt_scale`: in place of `guidance.scale`, where that depends on the prompt.
    `negative_prompt`: None where a model uses classifier-free guidance only if a negative prompt is given.
    `image_area`: pixels of what is made from a picture, in the shape of that picture; None: as many as the picture has.
    `frames_of_source`: what is made from a video has as many frames.
    """

    width: int
    height: int
    steps: int
    guidance: Guidance
    prompt_scale: PromptScale | None = None
    negative_prompt: str | None = None
    image_area: int | None = None
    num_frames: int | None = None
    frames_of_source: bool = False
    fps: float | None = None
    duration: float | None = None
    sample_rate_hz: int | None = None
    strength: float | None = None
    layers: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LatentRgb:
    """A linear map from latent channels to RGB in -1..1: the sum of latent * factors over the channels, plus bias."""

    factors: tuple[tuple[float, float, float], ...]
    bias: tuple[float, float, float] = (0.0, 0.0, 0.0)


def vae_scale_factor(vae: Mapping[str, Any]) -> int:
    """Pixels per latent pixel along an edge, from the config of a VAE: every stage but one halves the image."""
    return int(2 ** (len(vae.get("block_out_channels") or vae["dim_mult"]) - 1))


def image_limits(size_multiple: int, *, max_size: int = 4096, max_prompt_tokens: int = 512) -> Limits:
    """The limits of an image model whose sizes are multiples of `size_multiple` pixels.

    The most pixels, 2048 x 2048, are a choice, not a limit of the models: four times their usual default.
    """
    return Limits(
        size_multiple=size_multiple,
        min_size=size_multiple,
        max_size=max_size,
        max_pixels=min(2048, max_size) ** 2,
        max_prompt_tokens=max_prompt_tokens,
    )


def check_config(config: Mapping[str, Any], served: Mapping[str, Any], component: str = "transformer") -> None:
    """Raises CheckpointError for a setting of a component's config whose value is not the one that is served. A setting
    that the config leaves out has the value that is served.
    """
    for name, value in served.items():
        if config.get(name, value) != value:
            raise CheckpointError(f"{component}: {name} = {config[name]!r} is not served yet")


class SplitKind(enum.StrEnum):
    """What each rank has of a module whose weights are sharded (tensor parallel).

    COLUMN: a share of a linear layer's output channels. ROW: a share of its input channels; outputs are summed over the
    ranks. HEADS: a share of an attention's heads. NORM: a share of the channels of an RMS norm over all heads.
    PER_HEAD: a share of a module's values, one for each head; a single value for all heads stays whole.
    """

    COLUMN = "COLUMN"
    ROW = "ROW"
    HEADS = "HEADS"
    NORM = "NORM"
    PER_HEAD = "PER_HEAD"


@dataclasses.dataclass(frozen=True, slots=True)
class Split:
    """How a module is sharded. `parts` are the relative sizes of what is concatenated along the sharded channels; each
    part is sharded by itself: (1, 4) for a layer that reads attention and a feed-forward of four times its width.
    Without `parts`, outputs have as many equal parts as WeightMap.fused says, and inputs have one. `optional`: some
    checkpoints have no such module.
    """

    kind: SplitKind
    parts: tuple[int, ...] = ()
    optional: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How the names in a checkpoint become the names of our modules.

    `renames` are (regular expression, replacement) pairs, applied in order to each checkpoint name. `fused` maps the
    last part of one of our module paths to the checkpoint modules (named after `renames`, in the same parent) whose
    weights and biases are concatenated along the output dimension to make it: {"attn.to_qkv": ("attn.to_q",
    "attn.to_k", "attn.to_v")}. Parameters of ours whose names `float32` (regular expressions) finds stay in float32,
    whatever the precision of the others.
    """

    renames: tuple[tuple[str, str], ...] = ()
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    float32: tuple[str, ...] = ()

    def in_float32(self, name: str) -> bool:
        """Whether a parameter of ours stays in float32."""
        return any(re.search(pattern, name) for pattern in self.float32)


@dataclasses.dataclass(frozen=True, slots=True)
class RowSlice:
    """Some rows of a tensor in a file: the module of the checkpoint that they belong to, their number relative to the
    tensor's other rows, and their place among the rows of that module.
    """

    module: str
    size: int = 1
    place: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FileLayout:
    """Names that single files of a model have in place of the checkpoint's.

    `mark` is the name of a tensor by which such a file is known. `renames` are (regular expression, replacement) pairs
    as in WeightMap, which make names of the checkpoint; `cuts` are modules (the last part of a path, after `renames`)
    whose rows are shared out to several of the same parent, or put in another order. Tensors whose names `unused`
    (regular expressions) finds belong to nothing.
    """

    mark: str
    renames: tuple[tuple[str, str], ...]
    cuts: Mapping[str, tuple[RowSlice, ...]] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SingleFile:
    """Single files (GGUF) that a denoiser can be loaded from: the architectures that they may declare, and the layouts
    that they may have besides the checkpoint's own names.
    """

    architectures: tuple[str, ...]
    layouts: tuple[FileLayout, ...] = ()


def same(configs: Configs) -> Mapping[str, Any]:
    """The variant of a class that stands for one model."""
    return {}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One pipeline class of one family.

    `name` is the diffusers pipeline class that model_index.json names; `pipeline` is the import string of our class.
    `tensor_parallel` says, per component, which modules can be sharded over ranks: pattern -> Split, where a pattern is
    a path with `*` for any part of it; a component without a table is not sharded. `limits` and `defaults` are computed
    from the checkpoint's own configs; they are module-level functions, since a spec travels to the worker process.
    Without `latent_rgb`, previews show three groups of latent channels as colors. `variant` returns the fields in which
    the spec differs for checkpoints with certain configs, where one pipeline class stands for several models; it raises
    CheckpointError for those that the family does not serve.

    `guidance` is a function of the configs where checkpoints of the class differ in it. `schedulers` are those that a
    request may choose in place of the checkpoint's own, by class name in diffusers.

    `takes` names what the model uses besides prompt, size, steps, guidance and seeds: fields of a Draft ("strength",
    "num_frames", "fps", "duration", "start", "text") and of its inputs ("images", "mask", "first_frame", ...).
    `settings` names settings of the server that replace an entry of the configs: setting -> (component, key).
    `exclusive`: one request at a time, from its prepare to the end of its decode.

    `preprocess(request, configs)` turns a request's pictures and videos into what the model reads, by input, without
    weights; `postprocess(decoded)` turns what the VAE decoded into an Output. `Pipeline.prepare` and `Pipeline.decode`
    call them; so may other code, see docs/adding-a-model.md.

    For features: `step_cache`, what is known of the model for step caches: method -> fields and their values (such as
    the coefficients that TeaCache was fitted to), and quality -> {method: fields}; `sensitive_layers`, those that lose
    too much when quantized: parts of their names, paths with `*`, or "re:" and a regular expression. By default these
    are the routers of mixture-of-experts layers, where a small difference selects another expert. `single_file`: files
    that replace the weights of a denoiser. `other_names`: layouts of files that have something for its layers, beside
    those of `single_file`.
    """

    name: str
    family: str
    tasks: tuple[Task, ...]
    pipeline: str
    guidance: tuple[GuidanceKind, ...] | Callable[[Configs], tuple[GuidanceKind, ...]]
    limits: Callable[[Configs], Limits]
    defaults: Callable[[Configs], Defaults]
    variant: Callable[[Configs], Mapping[str, Any]] = same
    weights: Mapping[str, WeightMap] = dataclasses.field(default_factory=dict)
    tensor_parallel: Mapping[str, Mapping[str, Split]] = dataclasses.field(default_factory=dict)
    latent_rgb: LatentRgb | None = None
    takes: frozenset[str] = frozenset()
    schedulers: tuple[str, ...] = ()
    settings: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
    runner: str = "omni_grpc.worker.packed:PackedRunner"
    exclusive: bool = False
    preprocess: Lazy = Lazy("omni_grpc.pipeline.pictures:preprocess")
    postprocess: Lazy = Lazy("omni_grpc.pipeline.outputs:postprocess")
    step_cache: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    sensitive_layers: tuple[str, ...] = (r"re:\.gate$",)
    single_file: SingleFile | None = None
    other_names: tuple[FileLayout, ...] = ()

    @property
    def layouts(self) -> tuple[FileLayout, ...]:
        """The names that files have in place of the checkpoint's."""
        return (*(() if self.single_file is None else self.single_file.layouts), *self.other_names)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Preferences:
    """Settings of one checkpoint that the spec of its family cannot know. `defaults` are fields of Defaults, `guidance`
    those of its guidance; `step_cache` is like that of the spec.
    """

    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    guidance: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    latent_rgb: LatentRgb | None = None
    step_cache: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint folder and the spec that serves it. `name` is the model name in requests.

    `siblings` are the same weights under other specs, for tasks that this one lacks; `refusals` say why a task is still
    lacking. `preferences` take precedence over the spec. The weights of components in `replaced` come from elsewhere.
    `presets` are those that fit it, `recipe` the name of the one that is its default ("": none), and `recipe_loras`
    the adapters that this brings: id -> its file, a path or ORG/NAME:FILE on the hub.
    """

    name: str
    path: Path
    spec: ModelSpec
    configs: Configs
    siblings: tuple[Checkpoint, ...] = ()
    refusals: Mapping[Task, str] = dataclasses.field(default_factory=dict)
    preferences: Preferences = Preferences()
    replaced: frozenset[str] = frozenset()
    presets: tuple[Preset, ...] = ()
    recipe: str = ""
    recipe_loras: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def described(self) -> bool:
        """False while only loading the model can tell what it supports: it has no tasks, limits or defaults then."""
        return bool(self.spec.tasks)

    @property
    def parts(self) -> tuple[Checkpoint, ...]:
        """Itself and its siblings."""
        return (self, *self.siblings)

    @property
    def tasks(self) -> tuple[Task, ...]:
        """All tasks, those of its own spec first."""
        return tuple(dict.fromkeys(task for part in self.parts for task in part.spec.tasks))

    def of(self, task: Task) -> Checkpoint:
        """The part that supports a task; itself if none does."""
        return next((part for part in self.parts if task in part.spec.tasks), self)

    @property
    def denoisers(self) -> tuple[str, ...]:
        """The components of ours that it has, in the order of the spec."""
        return tuple(component for component in self.spec.weights if component in self.configs)

    @property
    def text_encoders(self) -> tuple[str, ...]:
        """The components that encode prompts, by the names that diffusers has for them."""
        named = self.configs.get("", {}).items()
        return tuple(name for name, kind in named if re.fullmatch(r"text_encoder(_\d+)?", name) and any(kind or ()))

    @property
    def limits(self) -> Limits:
        return self.spec.limits(self.configs)

    @property
    def defaults(self) -> Defaults:
        usual = self.spec.defaults(self.configs)
        if not (self.preferences.guidance or self.preferences.defaults):
            # asked for ten times for each request
            return usual
        guidance = dataclasses.replace(usual.guidance, **self.preferences.guidance)
        return dataclasses.replace(usual, guidance=guidance, **self.preferences.defaults)

    @property
    def latent_rgb(self) -> LatentRgb | None:
        return self.preferences.latent_rgb or self.spec.latent_rgb

    @property
    def known_words(self) -> frozenset[str]:
        """Every word that the model was trained on, in lower case, where its tokenizer's config lists them under
        "known_words"; empty: any word may be known.
        """
        return frozenset(word for config in self.configs.values() for word in config.get("known_words", ()))

    @property
    def guidance(self) -> tuple[GuidanceKind, ...]:
        kinds = self.spec.guidance
        return kinds(self.configs) if callable(kinds) else kinds

    @property
    def scheduler(self) -> str:
        """Class name of the checkpoint's scheduler."""
        return str(self.configs.get("scheduler", {}).get("_class_name", ""))

    @property
    def schedulers(self) -> tuple[str, ...]:
        """What a request may name: the checkpoint's own scheduler, then the others."""
        return tuple(dict.fromkeys(name for name in (self.scheduler, *self.spec.schedulers) if name))
