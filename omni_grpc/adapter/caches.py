"""Step caches of diffusers, by name: which pipelines they work on, and their state between requests."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from typing import Any

import diffusers
from diffusers import DiffusionPipeline, ModelMixin
from diffusers.models.cache_utils import CacheMixin

from omni_grpc.adapter.guiders import guiders
from omni_grpc.adapter.loading import planned_steps
from omni_grpc.types.errors import ConfigError, InvalidArgument, Violation

NEGATIVE = ("negative_prompt", "negative_prompt_embeds")
"""What a pipeline with a scale of its own for the second prediction makes one of."""

DENOISES = re.compile(r"\b(?:self\.(?:transformer|transformer_2|unet)|current_model)\(")
"""A prediction in the source of a pipeline's `__call__`."""


TELLS_STEP = re.compile(r"\bstep_index=|[\"']step_index[\"']:")
"""That a pipeline tells a cache which step it is, as an argument or in a dict of them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheMethod:
    """A cache of diffusers. `per_pass`: it keeps a state for each named pass of a step, so the pipeline must name them.
    `needs_place`: it must be told which step it is. `of_whole`: it may skip a whole denoiser and not blocks one by
    one. `presets` are arguments that any pipeline needs.
    """

    config: str
    per_pass: bool = False
    needs_place: bool = False
    of_whole: bool = False
    presets: Mapping[str, Any] = dataclasses.field(default_factory=dict)


KINDS: Mapping[str, CacheMethod] = {
    "first_block": CacheMethod(config="FirstBlockCacheConfig", per_pass=True),
    "taylorseer": CacheMethod(config="TaylorSeerCacheConfig", per_pass=True),
    "mag_cache": CacheMethod(config="MagCacheConfig"),
    # its other mode expects both passes in one batch, which no pipeline with named passes does
    "faster": CacheMethod(config="FasterCacheConfig", presets={"is_guidance_distilled": True}),
    "pab": CacheMethod(config="PyramidAttentionBroadcastConfig", presets={"spatial_attention_block_skip_range": 2}),
    "sea_cache": CacheMethod(config="SeaCacheConfig", per_pass=True, needs_place=True, of_whole=True),
    "text_kv": CacheMethod(config="TextKVCacheConfig"),
}


class Cache:
    """One kind of cache on the denoisers of one pipeline. Raises ConfigError if it does not work there."""

    def __init__(
        self, pipeline: DiffusionPipeline, denoisers: Sequence[ModelMixin], name: str, config: Mapping[str, Any]
    ) -> None:
        self.name = name
        self._pipeline = pipeline
        self._denoisers = denoisers
        self._kind = _kind(name)
        self._config = {**self._kind.presets, **config}
        self.check(pipeline)
        self._configs: list[Any] = []
        self._steps_known = True
        self._enable()
        for denoiser in denoisers:
            if not _hooked(denoiser, whole=self._kind.of_whole):
                raise self._error(f"finds no block of {type(denoiser).__name__} that it could skip")

    def check(self, pipeline: DiffusionPipeline) -> None:
        """Raises ConfigError where the cache does not work on a pipeline over these denoisers."""
        call = inspect.getsource(type(pipeline).__call__)
        self._refuse(pipeline, call, self._mixes_passes(pipeline))

    def begin(self, pipeline: DiffusionPipeline, values: Mapping[str, Any]) -> None:
        """Readies the cache for one call of one pipeline with these arguments. Raises InvalidArgument for what would
        come out wrong.
        """
        self._pipeline = pipeline
        self._steps_known = False
        against = next((name for name in NEGATIVE if values.get(name) is not None), None)
        if against is not None and self._mixes_passes(pipeline):
            message = f"the cache {self.name!r} mixes up the two passes of guidance; leave the negative prompt unset"
            field = against if against == "negative_prompt" else f"extra.{against}"
            raise InvalidArgument(f"{field}: {message}", violations=(Violation(field, message),))

    def _enable(self) -> None:
        for number, denoiser in enumerate(self._denoisers):
            config = self._make(number, steps=None)
            self._configs.append(config)
            try:
                denoiser.enable_cache(config)
            except (ValueError, IndexError) as error:
                # blocks that diffusers has no entry for, or fewer than it needs
                raise self._error(f"does not work on {type(denoiser).__name__}: {error}") from error
            if hasattr(config, "num_inference_steps"):
                denoiser.register_forward_pre_hook(self._count_steps)

    def _count_steps(self, *_: Any) -> None:
        """Tells the cache before the first prediction of a call how many steps there are. They are those that the
        pipeline has planned by then, which sigmas, timesteps, strength and the order of the scheduler decide; each of
        two experts takes its part of them.
        """
        if self._steps_known:
            return
        self._steps_known = True
        for number, (config, denoiser) in enumerate(zip(self._configs, self._denoisers, strict=True)):
            # the hooks hold the config that they were made with; an expert without a step asks it nothing
            if steps := steps_of(denoiser, self._pipeline):
                vars(config).update(vars(self._make(number, steps)))

    def _make(self, number: int, steps: int | None) -> Any:
        """The config of the denoiser of this number."""
        kind = getattr(diffusers, self._kind.config)
        known = {field.name for field in dataclasses.fields(kind)}
        if unknown := sorted(self._config.keys() - known):
            raise self._error(f"takes no {', '.join(unknown)}; it takes {', '.join(sorted(known))}", "cache_config")
        values = {name: tuple(v) if isinstance(v, list) and "range" in name else v for name, v in self._config.items()}
        if isinstance(ratios := values.get("mag_ratios"), list) and any(isinstance(each, list) for each in ratios):
            if len(ratios) != len(self._denoisers) or not all(isinstance(each, list) for each in ratios):
                rule = f"takes mag_ratios for all denoisers or a list for each; there are {len(self._denoisers)}"
                raise self._error(f"{rule}, got {len(ratios)}", "cache_config")
            values["mag_ratios"] = ratios[number]
        if steps is not None:
            values["num_inference_steps"] = steps
        if "current_timestep_callback" in known:
            values["current_timestep_callback"] = lambda: self._pipeline.current_timestep
        try:
            return kind(**values)
        except (TypeError, ValueError) as error:
            raise self._error(str(error), "cache_config") from error

    def _mixes_passes(self, pipeline: DiffusionPipeline) -> bool:
        """Whether the second prediction of guidance would be made of what was kept of the first."""
        call = inspect.getsource(type(pipeline).__call__)
        # a guider has its passes made in a loop, by one line
        several = len(DENOISES.findall(call)) > 1 or bool(guiders(pipeline))
        if self._kind.per_pass or not several:
            return False
        return self.name in ("pab", "faster") or "cache_context" not in call

    def _refuse(self, of: DiffusionPipeline, call: str, mixed: bool) -> None:
        pipeline = type(of).__name__
        for denoiser in self._denoisers:
            if not isinstance(denoiser, CacheMixin):
                raise self._error(f"does not work on {pipeline}: {type(denoiser).__name__} supports no cache")
        if self._kind.per_pass and "cache_context" not in call:
            raise self._error(f"does not work on {pipeline}, which does not name the passes of its steps")
        if self._kind.needs_place and not TELLS_STEP.search(call):
            raise self._error(f"does not work on {pipeline}, which does not tell it the step")
        if mixed and "true_cfg_scale" not in inspect.signature(type(of).__call__).parameters:
            raise self._error(f"does not work on {pipeline}: it mixes up the two passes of guidance")
        if self._config.get("is_guidance_distilled") is False:
            raise self._error("works with is_guidance_distilled true alone", "cache_config")

    def _error(self, why: str, field: str = "cache_backend") -> ConfigError:
        flag = "--" + field.replace("_", "-")
        return ConfigError(f"{flag}: {self.name!r} {why}", violations=(Violation(field, why),))


def steps_of(denoiser: ModelMixin, pipeline: DiffusionPipeline) -> int:
    """Steps of the planned ones that this denoiser takes. Of the two experts of Wan2.2 the second has those whose
    timestep is below the boundary, the first the others.
    """
    scheduler: Any = getattr(pipeline, "scheduler", None)
    planned = planned_steps(pipeline, scheduler)
    second, boundary = getattr(pipeline, "transformer_2", None), pipeline.config.get("boundary_ratio")
    if second is None or boundary is None:
        return planned
    threshold: float = boundary * scheduler.config.num_train_timesteps
    # strength leaves out the first ones
    timesteps: list[float] = scheduler.timesteps[-planned:].tolist()
    of_first = sum(timestep >= threshold for timestep in timesteps)
    return planned - of_first if denoiser is second else of_first


def reset(denoisers: Sequence[ModelMixin]) -> None:
    """Clears what caches kept of a request, so that the next one starts as if it were the first."""
    for denoiser in denoisers:
        if isinstance(denoiser, CacheMixin) and denoiser.is_cache_enabled:
            denoiser._reset_stateful_cache()


def _kind(name: str) -> CacheMethod:
    if name not in KINDS:
        message = f"--cache-backend is {name!r}; expected one of {', '.join(KINDS)}"
        raise ConfigError(message, violations=(Violation("cache_backend", message),))
    return KINDS[name]


def _hooked(denoiser: ModelMixin, *, whole: bool) -> bool:
    """Whether any part of it has a hook, or itself where that counts: patterns that match no block are no error to
    diffusers, and have no effect.
    """
    parts = (module for module in denoiser.modules() if whole or module is not denoiser)
    return any(getattr(getattr(part, "_diffusers_hook", None), "hooks", None) for part in parts)
