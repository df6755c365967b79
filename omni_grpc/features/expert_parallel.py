"""Expert parallel: each rank has some experts of every mixture-of-experts layer, and all of the router.

Ranks that have parts of the tokens bring them together first. Each then sends to its own experts the tokens that chose
them, and the sums over ranks are what a token gets. To be applied before weights are loaded: a rank never has the
experts of others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from omni_grpc.features import Context
from omni_grpc.nn.linear import AnyLinear, Elsewhere
from omni_grpc.nn.moe import MixtureOfExperts
from omni_grpc.nn.rows import Rows
from omni_grpc.types.errors import ConfigError
from omni_grpc.types.ranks import Axis

__all__ = ["apply"]

Routed = Callable[[Tensor, Rows, range], Tensor]
"""`MixtureOfExperts.routed`."""


def apply(module: nn.Module, config: object, context: Context) -> None:
    """Shares the experts of every such layer between the ranks of "expert". Raises ConfigError by name for a layer with
    fewer experts than ranks, and where there is no such layer.
    """
    group = context.group(Axis.EXPERT, "expert parallel needs ranks to share experts")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    layers = [(path, part) for path, part in module.named_modules() if isinstance(part, MixtureOfExperts)]
    if not layers:
        raise ConfigError(f"enable_expert_parallel: {context.component} has no experts to share; leave it out")
    for path, layer in layers:
        count = len(layer.experts)
        if count < size:
            raise ConfigError(
                f"{context.component}.{path} has {count} experts, fewer than the {size} ranks that share weights and "
                "tokens; leave out enable_expert_parallel, or use fewer ranks"
            )
        mine = range(count * rank // size, count * (rank + 1) // size)
        for number, expert in enumerate(layer.experts):
            if number not in mine:
                _leave(expert)
        layer.run_routed = SharedExperts(layer.routed, layer.stream, mine, group)


def _leave(expert: nn.Module) -> None:
    """Takes the weights of another rank's expert away."""
    for path, layer in list(expert.named_children()):
        if isinstance(layer, AnyLinear):
            expert.set_submodule(path, Elsewhere(layer))
        else:
            _leave(layer)


class SharedExperts:
    """What a layer runs in place of all of its experts, where this rank has those of `mine`."""

    def __init__(self, routed: Routed, stream: str, mine: range, group: dist.ProcessGroup) -> None:
        self.routed, self.stream, self.mine, self._group = routed, stream, mine, group

    def __call__(self, x: Tensor, rows: Rows) -> Tensor:
        """x [T, C] of this rank's tokens -> the sums of all experts [T, C]. Ranks that have parts of the rows first
        bring them together.
        """
        exchange, stream = rows.exchange, self.stream
        if exchange is None or not exchange.spreads(stream):
            out = self.routed(x, rows, self.mine)
            dist.all_reduce(out, group=self._group)
            return out
        out = self(exchange.gather(stream, x), rows.whole)
        first = sum(exchange.counts[stream][: exchange.rank])
        here: Tensor = exchange.ranked[stream][first : first + exchange.counts[stream][exchange.rank]]
        return torch.index_select(out, 0, here)
