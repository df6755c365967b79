"""What ranks can share of a checkpoint, known before any is started, and the features that spread it over them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.feature_rules.base import Faults, FeatureRules, is_native, no_effect_through_diffusers
from omni_grpc.types.ranks import Axis, ParallelSizes
from omni_grpc.types.spec import Checkpoint, GuidanceKind

Legal = Callable[[int], bool]


@dataclasses.dataclass(frozen=True, slots=True)
class DenoiserShape:
    """What of a denoiser has to be shared evenly: heads of queries, heads of keys and values, hidden channels of the
    feed-forward (0 where the config does not say), and how many blocks and experts it has.
    """

    heads: int
    kv_heads: int
    hidden: int
    blocks: int
    experts: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> DenoiserShape:
        """From a component's config, by the names that diffusers has for these."""

        def first(*names: str) -> int:
            return next((int(config[name]) for name in names if config.get(name)), 0)

        heads = first("num_attention_heads", "n_heads", "num_heads")
        return cls(
            heads=heads,
            kv_heads=first("num_key_value_heads", "n_kv_heads", "num_kv_heads") or heads,
            hidden=first("ffn_dim", "intermediate_size"),
            blocks=first("num_layers", "n_layers") + first("num_single_layers"),
            experts=first("num_experts", "num_routed_experts"),
        )

    def shared_by(self, ranks: int) -> str:
        """What so many ranks cannot share evenly, "" where they can share everything."""
        counts = {"heads": self.heads, "key/value heads": self.kv_heads, "hidden channels": self.hidden}
        return next((f"{count} {what}" for what, count in counts.items() if count % ranks), "")


def check_sizes(checkpoint: Checkpoint, sizes: ParallelSizes, devices: int) -> Faults:
    """What is wrong with sizes for a checkpoint on a host with so many devices: setting -> what is wrong, phrased to
    follow the setting's name, with the nearest value that works. Empty where nothing is.

    It reads configs alone. What they do not say (the hidden channels of some models) the features check, and refuse by
    the module's name, once the model is built.
    """
    wrong = {
        name: f"is {value}, and must be at least 1"
        for name, value in dataclasses.asdict(sizes).items()
        if value is not None and value < 1 and not isinstance(value, bool)
    }
    asked = _asked(sizes)
    if wrong or not asked:
        return wrong
    if not is_native(checkpoint):
        return dict.fromkeys(asked, no_effect_through_diffusers(checkpoint))
    if sizes.enable_expert_parallel and not any(name in checkpoint.configs for name in checkpoint.spec.weights):
        wrong = {"enable_expert_parallel": f"must be off: {checkpoint.spec.name} has no experts"}
    for component in checkpoint.spec.weights:
        if component in checkpoint.configs:
            shape = DenoiserShape.of(checkpoint.configs[component])
            for fault in (_tensor(checkpoint, component, shape, sizes), _ulysses(shape, sizes)):
                wrong = fault | wrong
            wrong = _pipeline(component, shape, sizes) | _experts(component, shape, sizes) | wrong
    wrong = _sequence(sizes) | _branches(checkpoint, sizes) | _decode(sizes) | _shards(sizes) | wrong
    return wrong or _world(sizes, devices)


def _asked(sizes: ParallelSizes) -> list[str]:
    """The settings that ask for more than one rank."""
    usual = dataclasses.asdict(ParallelSizes())
    return [name for name, value in dataclasses.asdict(sizes).items() if value not in (usual[name], None)]


def nearest(asked: int, legal: Legal, most: int) -> int:
    """The legal value of 1..most that is nearest to `asked`, the smaller of two. 1 is always legal."""
    return min((n for n in range(1, most + 1) if n == 1 or legal(n)), key=lambda n: (abs(n - asked), n))


def _instead(asked: int, legal: Legal) -> str:
    return f"; the nearest value that works is {nearest(asked, legal, max(asked * 2, 8))}"


def _tensor(checkpoint: Checkpoint, component: str, shape: DenoiserShape, sizes: ParallelSizes) -> dict[str, str]:
    size = sizes.tensor_parallel_size
    if size == 1:
        return {}
    if component not in checkpoint.spec.tensor_parallel:
        rule = f"must be 1: {checkpoint.spec.name} does not say how {component} is sharded; use ulysses_degree instead"
        return {"tensor_parallel_size": rule}
    if uneven := shape.shared_by(size):
        instead = _instead(size, lambda n: not shape.shared_by(n))
        return {"tensor_parallel_size": f"is {size}, which cannot share the {uneven} of {component} evenly{instead}"}
    return {}


def _ulysses(shape: DenoiserShape, sizes: ParallelSizes) -> dict[str, str]:
    tensor, degree = sizes.tensor_parallel_size, sizes.ulysses_degree
    heads = dataclasses.replace(shape, hidden=0)
    if degree == 1 or heads.shared_by(tensor) or not (uneven := heads.shared_by(tensor * degree)):
        return {}
    of_each = f" after a tensor_parallel_size of {tensor}" if tensor > 1 else ""
    instead = _instead(degree, lambda n: not heads.shared_by(tensor * n))
    rest = "; ring_degree and sequence_parallel_size take any number of heads"
    return {"ulysses_degree": f"is {degree}, which cannot share {uneven} evenly{of_each}{instead}{rest}"}


def _sequence(sizes: ParallelSizes) -> dict[str, str]:
    given, degree, ring = sizes.sequence_parallel_size, sizes.ulysses_degree, sizes.ring_degree
    if given is None or given == degree * ring:
        return {}
    if ring > 1:
        rule = f"is {given}, and ulysses_degree x ring_degree is {degree * ring}; leave it out or give that"
        return {"sequence_parallel_size": rule}
    if given % degree:
        instead = max(1, round(given / degree)) * degree
        rule = f"is {given}, no multiple of the ulysses_degree of {degree}; the nearest value that works is {instead}"
        return {"sequence_parallel_size": rule}
    return {}


def _branches(checkpoint: Checkpoint, sizes: ParallelSizes) -> dict[str, str]:
    most = 2 if GuidanceKind.TRUE_CFG in checkpoint.guidance else 1
    if sizes.cfg_parallel_size <= most:
        return {}
    why = "two guidance branches" if most > 1 else "no second guidance branch"
    rule = f"is {sizes.cfg_parallel_size}, and {checkpoint.spec.name} has {why}; the nearest value that works is {most}"
    return {"cfg_parallel_size": rule}


def _pipeline(component: str, shape: DenoiserShape, sizes: ParallelSizes) -> dict[str, str]:
    size = sizes.pipeline_parallel_size
    if size <= max(1, shape.blocks):
        return {}
    rule = f"is {size}, and {component} has {shape.blocks} blocks; the nearest value that works is {shape.blocks}"
    return {"pipeline_parallel_size": rule}


def _decode(sizes: ParallelSizes) -> dict[str, str]:
    size = sizes.vae_patch_parallel_size
    if sizes.world % size == 0:
        return {}
    instead = nearest(size, lambda n: sizes.world % n == 0, sizes.world)
    rule = f"is {size}, and has to divide the {sizes.world} ranks of the model; the nearest value that works is"
    return {"vae_patch_parallel_size": f"{rule} {instead}"}


def _shards(sizes: ParallelSizes) -> dict[str, str]:
    if not sizes.use_hsdp:
        given = sizes.hsdp_shard_size is not None
        return {"hsdp_shard_size": "has no effect without use_hsdp; set that too, or leave it out"} if given else {}
    if sizes.tensor_parallel_size > 1:
        return {"use_hsdp": "must be off beside tensor_parallel_size, which shards the same weights; leave one out"}
    if sizes.pipeline_parallel_size > 1:
        return {"use_hsdp": "must be off beside pipeline_parallel_size, which shares the same blocks; leave one out"}
    if sizes.enable_expert_parallel:
        return {"use_hsdp": "must be off beside enable_expert_parallel, which shares the same layers; leave one out"}
    if sizes.sequence == 1:
        return {"use_hsdp": "needs ranks that share tokens: give it a ulysses_degree or a sequence_parallel_size"}
    shard = sizes.shard
    if shard == 1 or sizes.sequence % shard:
        instead = min(
            (n for n in range(2, sizes.sequence + 1) if sizes.sequence % n == 0), key=lambda n: abs(n - shard)
        )
        rule = f"is {shard}, and has to divide the {sizes.sequence} ranks that share tokens into groups of two or more"
        return {"hsdp_shard_size": f"{rule}; the nearest value that works is {instead}"}
    return {}


def _experts(component: str, shape: DenoiserShape, sizes: ParallelSizes) -> dict[str, str]:
    if not sizes.enable_expert_parallel:
        return {}
    if not shape.experts:
        return {"enable_expert_parallel": f"must be off: {component} has no experts"}
    ranks = sizes.tensor_parallel_size * sizes.sequence
    if ranks == 1:
        return {"enable_expert_parallel": "must be off: one rank has all experts; give it a tensor_parallel_size"}
    if shape.experts < ranks:
        rule = (
            f"must be off: {component} has {shape.experts} experts, fewer than the {ranks} ranks that would share them"
        )
        return {"enable_expert_parallel": rule}
    return {}


def _world(sizes: ParallelSizes, devices: int) -> dict[str, str]:
    if sizes.world <= devices:
        return {}
    of_each = {
        "tensor_parallel_size": sizes.tensor_parallel_size,
        "ulysses_degree": sizes.ulysses_degree,
        "ring_degree": sizes.ring_degree,
        "cfg_parallel_size": sizes.cfg_parallel_size,
        "pipeline_parallel_size": sizes.pipeline_parallel_size,
    }
    if sizes.sequence_parallel_size is not None:
        of_each["sequence_parallel_size"] = sizes.sequence
    name = max(of_each, key=lambda each: of_each[each])
    most = max(1, devices * of_each[name] // sizes.world)
    rule = f"is {of_each[name]}, which makes {sizes.world} ranks, and there are {devices} devices; "
    return {name: f"{rule}give it {most} or less"}


def _nothing(config: EngineConfig) -> None:
    """Ranks turn these features on, no section of the configuration."""


TENSOR = FeatureRules(
    name="tensor_parallel", section=_nothing, apply="omni_grpc.features.tensor_parallel:apply", axis=Axis.TENSOR
)
PIPELINE = FeatureRules(
    name="pipeline_parallel", section=_nothing, apply="omni_grpc.features.pipeline_parallel:apply", axis=Axis.PIPELINE
)
EXPERT = FeatureRules(
    name="expert_parallel", section=_nothing, apply="omni_grpc.features.expert_parallel:apply", axis=Axis.EXPERT
)
HSDP = FeatureRules(name="hsdp", section=_nothing, apply="omni_grpc.features.hsdp:apply", axis=Axis.SHARD)
ULYSSES = FeatureRules(name="ulysses", section=_nothing, apply="omni_grpc.features.ulysses:apply", axis=Axis.ULYSSES)
CFG = FeatureRules(name="cfg_parallel", section=_nothing, apply="omni_grpc.features.cfg_parallel:apply", axis=Axis.CFG)
VAE = FeatureRules(
    name="vae_parallel",
    section=lambda config: config.adapter,
    apply="omni_grpc.features.vae_parallel:apply",
    axis=Axis.VAE,
)
ENCODERS = FeatureRules(
    name="encode_once", section=_nothing, apply="omni_grpc.features.encode_once:apply", axis=Axis.WORLD
)
SEQUENCE = FeatureRules(
    name="sequence_parallel", section=_nothing, apply="omni_grpc.features.sequence_parallel:apply", axis=Axis.SEQUENCE
)
