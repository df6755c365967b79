"""The mixture of experts: against HiDream's in diffusers, and against a sum over all experts written out in float64."""

from __future__ import annotations

import pytest
import torch
from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU
from torch import Tensor

from omni_grpc.nn.feed_forward import SwiGLU
from omni_grpc.nn.linear import Linear, active
from omni_grpc.nn.moe import MixtureOfExperts
from omni_grpc.nn.rows import LayoutCache, Row, Rows

CHANNELS = 48


def batch(*tokens: int) -> Rows:
    """Rows of so many image tokens, each with text that the layer must not count."""
    return Rows([(None, "cond")] * len(tokens), [Row.of(txt=5, img=count) for count in tokens], LayoutCache("cpu"))


def layer(experts: int, top_k: int, *, renormalize: bool = False, shared: int = 0) -> MixtureOfExperts:
    torch.manual_seed(0)
    made = MixtureOfExperts(
        CHANNELS, 32, experts, top_k, stream="img", renormalize=renormalize, shared=shared
    ).requires_grad_(False)
    # weights as they are made route all tokens nearly alike
    made.gate.weight *= 8
    return made


def written_out(made: MixtureOfExperts, x: Tensor) -> Tensor:
    """Every expert on every token; what was not chosen has weight 0."""
    x = x.double()

    def run(expert: SwiGLU) -> Tensor:
        w1, w2, w3 = (linear.weight.double() for linear in (expert.w1, expert.w2, expert.w3))
        gate = x @ w1.T
        return (gate / (1 + (-gate).exp()) * (x @ w3.T)) @ w2.T

    scores = (x @ made.gate.weight.double().T).exp()
    scores = scores / scores.sum(1, keepdim=True)
    least = scores.sort(1, descending=True).values[:, made.top_k - 1 : made.top_k]
    weights = scores * (scores >= least)
    if made.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    out = sum(weights[:, [number]] * run(expert) for number, expert in enumerate(made.experts))
    return out if made.shared_experts is None else out + run(made.shared_experts)


@pytest.mark.parametrize("tokens", [(1,), (7, 4), (33, 1, 3)])
def test_four_experts_of_which_two_are_hidreams(tokens: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    theirs = MOEFeedForwardSwiGLU(CHANNELS, 96, 4, 2).eval().requires_grad_(False)
    mine = MixtureOfExperts(CHANNELS, 256, 4, 2, stream="img", shared=256).requires_grad_(False)
    mine.load_state_dict(theirs.state_dict())
    x = torch.randn(sum(tokens), CHANNELS)
    torch.testing.assert_close(mine(x, batch(*tokens)), theirs(x[None])[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize(("experts", "top_k", "shared"), [(64, 8, 40), (4, 2, 40), (4, 1, 0), (3, 3, 0)])
def test_a_token_gets_its_experts_by_their_weights(experts: int, top_k: int, shared: int, renormalize: bool) -> None:
    made = layer(experts, top_k, renormalize=renormalize, shared=shared)
    x = torch.randn(29, CHANNELS)
    torch.testing.assert_close(made(x, batch(21, 8)).double(), written_out(made, x), atol=1e-6, rtol=1e-5)
    assert made(x[:0], batch(0, 0)).shape == (0, CHANNELS)


def test_a_token_does_not_depend_on_the_others() -> None:
    made = layer(8, 2, shared=40)
    x = torch.randn(40, CHANNELS)
    together = made(x, batch(30, 10))
    turned = torch.randperm(40)
    torch.testing.assert_close(made(x[turned], batch(9, 31)), together[turned], atol=1e-6, rtol=0)
    torch.testing.assert_close(made(x[::3], batch(14)), together[::3], atol=1e-6, rtol=0)
    for token in range(0, 40, 7):
        torch.testing.assert_close(made(x[[token]], batch(1)), together[[token]], atol=1e-6, rtol=0)
    assert torch.equal(made(x, batch(30, 10)), together)


def test_only_the_chosen_experts_run() -> None:
    made = layer(8, 2)
    ran: list[int] = []
    for number, expert in enumerate(made.experts):
        expert.register_forward_hook(lambda *_, number=number: ran.append(number))
    x = torch.randn(1, CHANNELS)
    made(x, batch(1))
    _, chosen = made.route(x)
    assert ran == sorted(chosen[0].tolist())


class PerRow(Linear):
    """Multiplies row r by r + 1, found as a wrapper finds it."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x).clone()
        rows = active.get()
        stream = rows.stream(self.stream)
        assert stream.offsets[-1] == len(x)
        assert stream.cu.tolist() == list(stream.offsets)
        for row in range(len(rows)):
            out[stream.slice(row)] *= row + 1
        return out


def test_a_layer_that_treats_rows_differently_finds_them_in_an_expert() -> None:
    made, plain = layer(4, 2), layer(4, 2)
    for expert in made.experts:
        weight = expert.w2.weight
        expert.w2 = PerRow(32, CHANNELS, bias=False, stream="img").requires_grad_(False)
        expert.w2.weight = weight
    sizes = (11, 0, 6, 17)
    x = torch.randn(sum(sizes), CHANNELS)
    out = made(x, batch(*sizes))
    for row, (got, alone) in enumerate(zip(out.split(sizes), x.split(sizes), strict=True)):
        torch.testing.assert_close(got, (row + 1) * plain(alone, batch(len(alone))), atol=2e-6, rtol=0)


@pytest.mark.parametrize("top_k", [0, 5])
def test_more_experts_than_there_are_cannot_be_chosen(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k {top_k} is outside 1\.\.4"):
        MixtureOfExperts(CHANNELS, 32, 4, top_k, stream="img")
