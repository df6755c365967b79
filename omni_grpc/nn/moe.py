"""Mixture of experts (https://arxiv.org/abs/1701.06538): a feed-forward that sends each token to a few experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.nn.feed_forward import SwiGLU
from omni_grpc.nn.linear import Linear, activate
from omni_grpc.nn.rows import Rows, Stream


class Routed(Rows):
    """A batch as one expert sees it: of one stream, only the tokens that were sent to the expert are there, row by row
    and in their order. What is bound is still that of all tokens.
    """

    def __init__(self, rows: Rows, name: str, lengths: Sequence[int], cu: Tensor) -> None:
        vars(self).update(vars(rows))
        self._name = name
        self._stream = Stream(lengths)
        self._stream.cu = cu

    def stream(self, name: str) -> Stream:
        return self._stream if name == self._name else super().stream(name)


class MixtureOfExperts(nn.Module):
    """The sum over a token's `top_k` experts of weight * expert(token), plus a shared expert that takes every token.

    The weights are the softmax over all experts, in float32. `renormalize` makes the chosen ones sum to 1
    (HunyuanImage); without it they are what the softmax gave them (HiDream). `shared` are the hidden channels of the
    shared expert, 0 where there is none. Experts are SwiGLU with layers of their own, so that whatever edits a linear
    layer edits each.

    Tokens are sorted by expert, and within an expert they stay in the order of the rows: a layer that treats rows
    differently finds its rows in the active batch as everywhere. A token's result depends on nothing but the token; its
    experts are added up in the order of their weights.

    How many tokens of which row an expert has is known on the device alone, so each call reads it back once, rows x
    experts integers: on CUDA the host waits there for the work before. The ways around cost more or need what is not
    given here: to run every expert on every token takes experts / top_k times the work (2 for HiDream, 8 for Hunyuan),
    and a grouped product wants the weights of all experts in one tensor, which no linear layer could then replace. A
    graph (torch.compile, CUDA graphs) ends before this layer and starts again behind it.
    """

    run_routed: Callable[[Tensor, Rows], Tensor] | None = None
    """In place of all experts on the tokens that are here: where ranks share experts."""

    def __init__(
        self,
        channels: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        stream: str,
        renormalize: bool = False,
        shared: int = 0,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= experts:
            raise ValueError(f"top_k {top_k} is outside 1..{experts}, the number of experts")
        self.top_k = top_k
        self.stream = stream
        self.renormalize = renormalize
        self.gate = Linear(channels, experts, bias=False, stream=stream)
        self.experts = nn.ModuleList(SwiGLU(channels, hidden, stream=stream) for _ in range(experts))
        self.shared_experts = SwiGLU(channels, shared, stream=stream) if shared else None

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        """x [T, C], packed by `stream` -> [T, C]."""
        out = self.routed(x, rows, range(len(self.experts))) if self.run_routed is None else self.run_routed(x, rows)
        return out if self.shared_experts is None else out + self.shared_experts(x)

    def routed(self, x: Tensor, rows: Rows, experts: range) -> Tensor:
        """What some of the experts, those of one rank, make of x [T, C], packed by `stream` -> [T, C]."""
        weights, chosen = self.route(x)
        order = chosen.flatten().argsort(stable=True)
        sent = x[order // self.top_k]
        made = torch.zeros_like(sent)
        cu = self._offsets(chosen, rows)
        start = 0
        for number, (offsets, lengths) in enumerate(zip(cu, cu.diff().tolist(), strict=True)):
            end, expert = start + sum(lengths), self.experts[number]
            if end > start and number in experts:
                with activate(Routed(rows, self.stream, lengths, offsets)):
                    made[start:end] = expert(sent[start:end])
            start = end
        # back to [T, top_k, C]: a sum over one axis has one order, additions into place have any
        mine = made[order.argsort()].unflatten(0, (len(x), self.top_k))
        out: Tensor = (mine * weights[..., None].to(x.dtype)).sum(1)
        return out

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, C] -> weights, float32 [T, top_k], of each token the largest first, and experts, int64 [T, top_k]."""
        weights, chosen = self.gate(x).float().softmax(-1).topk(self.top_k, -1)
        if self.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights, chosen

    def _offsets(self, chosen: Tensor, rows: Rows) -> Tensor:
        """Where each row begins among the tokens of each expert: int32 [experts, rows + 1]."""
        picked = torch.zeros(len(chosen), len(self.experts), dtype=torch.int32, device=chosen.device)
        before = F.pad(picked.scatter_(1, chosen, 1).cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
        return before.index_select(0, rows.stream(self.stream).cu).T.contiguous()
