"""FeatureRules: the declaration that a feature makes about its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.types.diffusers_spec import OPAQUE_FAMILY
from omni_grpc.types.ranks import Axis
from omni_grpc.types.spec import Checkpoint, ModelSpec

Faults = Mapping[str, str]
"""Setting -> what is wrong with it, phrased to follow the setting's name."""

Variants = Mapping[str, Mapping[str, Any]]
"""Name of a variant of a feature -> the settings that turn it on. A feature without variants has one, called ""."""


def _no_faults(config: EngineConfig, checkpoint: Checkpoint) -> Faults:
    return {}


def _no_variants(spec: ModelSpec) -> Variants:
    return {}


def _nothing_replaced(config: EngineConfig, checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRules:
    """What one feature declares. Everything here works without torch, so that both towers can read it.

    section: what `apply` gets as its `config`; None where the configuration leaves the feature off.
    apply: import string of the function that edits a denoiser; "" for a feature that edits none.
    faults: what the feature refuses of a configuration for a checkpoint: settings without effect, settings that need
    others, values that the model does not take.
    excludes: names of features that it cannot run beside. Where one of them is on, this feature is off, and asking for
    it by `setting` is refused with the text given here.
    setting: the setting that asks for the feature; of use with `excludes` alone.
    replaces: the components whose weights do not come from the checkpoint.
    open_weights: import string of the function that opens the files with those weights.
    axis: what ranks have to share for the feature to be on, in place of a section; None: it needs no ranks.
    column, variants: the column of `models --features` that shows the feature, and what is tried to fill it.
    """

    name: str
    section: Callable[[EngineConfig], Any]
    apply: str = ""
    faults: Callable[[EngineConfig, Checkpoint], Faults] = _no_faults
    excludes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    setting: str = ""
    replaces: Callable[[EngineConfig, Checkpoint], frozenset[str]] = _nothing_replaced
    open_weights: str = ""
    axis: Axis | None = None
    column: str = ""
    variants: Callable[[ModelSpec], Variants] = _no_variants


def is_native(checkpoint: Checkpoint) -> bool:
    """Whether the model has an implementation here; others run through the diffusers adapter."""
    return checkpoint.spec.family != OPAQUE_FAMILY


def no_effect_through_diffusers(checkpoint: Checkpoint) -> str:
    """The fault of a setting of native models alone."""
    return f"has no effect on {checkpoint.spec.name}, which runs through diffusers"
