"""How many processes share a model, under vLLM-Omni's names and with its defaults, and what they are called here."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from omni_grpc.compat.fields import check, only
from omni_grpc.types.errors import ConfigError, Violation

WHOLE = "text encoders are whole on every rank; leave it out"
ANY_HEADS = "Ulysses shares heads evenly; sequence_parallel_size without ulysses_degree takes any number of heads"
BY_ROWS = "ranks that share decodes have rows of every frame (spatial_shard_height), whichever of the two is given"
AUTO = -1
"""The default of hsdp_shard_size: as many ranks as there are."""


@dataclasses.dataclass(kw_only=True)
class _Degrees:
    """How many ranks share what."""

    pipeline_parallel_size: int = 1
    data_parallel_size: int | None = None
    tensor_parallel_size: int = 1
    sequence_parallel_size: int | None = None
    ulysses_degree: int = 1
    ring_degree: int = 1
    allgather_degree: int = 1
    cfg_parallel_size: int = 1
    vae_patch_parallel_size: int = 1
    text_encoder_tp_size: int = only(1, WHOLE)
    enable_expert_parallel: bool = only(False, "is True or False", True)


@dataclasses.dataclass(kw_only=True)
class _Ways:
    """How they share it."""

    ulysses_mode: str = only("strict", ANY_HEADS)
    ulysses_a2a_permute: bool = only(False, "there is one way to exchange heads; leave it out")
    vae_parallel_mode: str = only("tile", BY_ROWS, "spatial_shard_height")
    mask_sp_padding: bool = only(False, "tokens are packed, there is no padding to mask")
    use_hsdp: bool = only(False, "is True or False", True)
    hsdp_shard_size: int = AUTO
    hsdp_replicate_size: int = 1


SIZES = (
    *("pipeline_parallel_size", "tensor_parallel_size", "ulysses_degree", "ring_degree", "allgather_degree"),
    *("cfg_parallel_size", "vae_patch_parallel_size", "hsdp_replicate_size"),
)
OPTIONAL_SIZES = ("data_parallel_size", "sequence_parallel_size")


@dataclasses.dataclass(kw_only=True)
class DiffusionParallelConfig(_Degrees, _Ways):
    """How a model is spread over processes, on a GPU each. Raises ConfigError for what cannot be done, by name; what
    depends on the model and on the machine is refused when a model is opened with it.

    `data_parallel_size` is the number of replicas, of as many ranks as the other sizes make up. `allgather_degree` is
    our `sequence_parallel_size`. With `use_hsdp`, `hsdp_shard_size` ranks have each weight once between them, and
    `hsdp_replicate_size` groups of such ranks have the same. Where no other size is given, these ranks share tokens
    too: every one of them would compute the same otherwise. -1 for all that share tokens.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Raises ConfigError for what cannot be done; again before use, since fields can be set."""
        check(self, ConfigError)
        for name in (*SIZES, *OPTIONAL_SIZES):
            value = getattr(self, name)
            if not (_is_size(value) or (value is None and name in OPTIONAL_SIZES)):
                raise _refused(name, f"is {value!r}, expected at least 1")
        if self.allgather_degree > 1 and self.ulysses_degree * self.ring_degree > 1:
            raise _refused("allgather_degree", "shares tokens, as ulysses_degree and ring_degree do; set one of them")
        if self.allgather_degree > 1 and self.sequence_parallel_size not in (None, self.allgather_degree):
            raise _refused("sequence_parallel_size", "and allgather_degree are the same here; leave one out")
        self._check_shards()

    def _check_shards(self) -> None:
        shard, replicas = self.hsdp_shard_size, self.hsdp_replicate_size
        if shard != AUTO and not (_is_size(shard) and shard > 1):
            raise _refused("hsdp_shard_size", f"is {shard!r}, expected -1 (all ranks that share tokens) or at least 2")
        if not self.use_hsdp:
            if shard != AUTO or replicas > 1:
                name = "hsdp_replicate_size" if shard == AUTO else "hsdp_shard_size"
                raise _refused(name, "has no effect without use_hsdp; set that too, or leave it out")
            return
        tokens, ranks = self._tokens, self._tokens * self.cfg_parallel_size
        if self._alone:
            if shard == AUTO:
                rule = "needs more than one process: give it an hsdp_shard_size, a ulysses_degree or a ring_degree"
                raise _refused("use_hsdp", rule)
            return
        if self.tensor_parallel_size * self.pipeline_parallel_size > 1 or tokens == 1:
            # refused with the model, by the rules of a server
            return
        if shard == AUTO:
            if replicas > 1 and (ranks % replicas or tokens % (ranks // replicas)):
                nearest = ranks // tokens
                rule = f"is {replicas}, and {tokens} of {ranks} ranks share tokens; a value that works is {nearest}"
                raise _refused("hsdp_replicate_size", rule)
        elif shard * replicas != ranks:
            rule = f"is {replicas}, and with hsdp_shard_size={shard} has to make up the {ranks} ranks"
            if ranks % shard == 0:
                raise _refused("hsdp_replicate_size", f"{rule}: set it to {ranks // shard}")
            raise _refused("hsdp_shard_size", f"is {shard}, and has to divide the {ranks} ranks; {tokens} does")
        elif tokens % shard:
            rule = f"is {shard}, and {tokens} ranks share tokens: each guidance branch keeps weights of its own"
            fix = f"set hsdp_shard_size={tokens} and hsdp_replicate_size={ranks // tokens}"
            raise _refused("hsdp_shard_size", f"{rule}; {fix}")

    @property
    def _tokens(self) -> int:
        """Ranks that share tokens, without those that sharding weights alone would make."""
        return self.sequence_parallel_size or self.allgather_degree * self.ulysses_degree * self.ring_degree

    @property
    def _alone(self) -> bool:
        """Whether sharding weights is all that ranks are asked to do."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.cfg_parallel_size * self._tokens == 1

    @property
    def ranks(self) -> int:
        """Processes of one replica."""
        own = self.hsdp_shard_size * self.hsdp_replicate_size if self.use_hsdp and self._alone else 1
        return own * math.prod(
            (self.tensor_parallel_size, self.pipeline_parallel_size, self.cfg_parallel_size, self._tokens)
        )

    def replicas(self, num_gpus: int | None) -> int:
        """How often the model is there: as many as GPUs are left for, where a number of GPUs is given. Raises
        ConfigError where the sizes do not make up that number.
        """
        self.check()
        if num_gpus is None:
            return self.data_parallel_size or 1
        if not _is_size(num_gpus):
            raise _refused("num_gpus", f"is {num_gpus!r}, expected at least 1")
        replicas = self.data_parallel_size or max(1, num_gpus // self.ranks)
        if replicas * self.ranks != num_gpus:
            of_each = f"{replicas} x {self.ranks}" if replicas > 1 else str(self.ranks)
            raise _refused("num_gpus", f"is {num_gpus}, and the sizes make up {of_each} ranks; leave it out")
        return replicas

    def settings(self, num_gpus: int | None = None) -> dict[str, Any]:
        """The same as settings of ours, without those at their defaults."""
        replicas = self.replicas(num_gpus)
        tokens = self.sequence_parallel_size
        if self.allgather_degree > 1 or (self.use_hsdp and self._alone):
            tokens = self.ranks if self._alone else self._tokens
        ours: dict[str, tuple[Any, Any]] = {
            "data_parallel_size": (replicas, 1),
            "tensor_parallel_size": (self.tensor_parallel_size, 1),
            "pipeline_parallel_size": (self.pipeline_parallel_size, 1),
            "ulysses_degree": (self.ulysses_degree, 1),
            "ring_degree": (self.ring_degree, 1),
            "sequence_parallel_size": (tokens, None),
            "cfg_parallel_size": (self.cfg_parallel_size, 1),
            "vae_patch_parallel_size": (self.vae_patch_parallel_size, 1),
            "enable_expert_parallel": (self.enable_expert_parallel, False),
            "use_hsdp": (self.use_hsdp, False),
            "hsdp_shard_size": (self._shard, None),
        }
        return {name: value for name, (value, usual) in ours.items() if value != usual}

    @property
    def _shard(self) -> int | None:
        """Our hsdp_shard_size: None where all ranks that share tokens are one group."""
        if not self.use_hsdp:
            return None
        tokens = self.ranks if self._alone else self._tokens
        shard = self.hsdp_shard_size
        if shard == AUTO and self.hsdp_replicate_size > 1:
            shard = tokens * self.cfg_parallel_size // self.hsdp_replicate_size
        return None if shard in (AUTO, tokens) else shard


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _refused(name: str, rule: str) -> ConfigError:
    message = f"DiffusionParallelConfig: {name} {rule}"
    return ConfigError(message, reason="NOT_SUPPORTED", violations=(Violation(name, rule),))
