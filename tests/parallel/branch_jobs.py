"""What ranks are asked to do with guidance branches of made-up states."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from omni_grpc.features.cfg_parallel import BranchShares
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.pipeline.batch import LATENTS
from omni_grpc.types.ranks import Axis
from tests.parallel.jobs import Ranked


@dataclasses.dataclass
class Predicted:
    """What came of each step, and what this process has predicted of all of them."""

    predictions: list[Tensor] = dataclasses.field(default_factory=list)
    rows: int = 0
    tokens: int = 0


def states(count: int) -> list[Any]:
    request = SimpleNamespace(cache=None)
    return [SimpleNamespace(slots={}, reports={}, request=request) for _ in range(count)]


def batch(chosen: list[tuple[Any, str, int]]) -> Rows:
    rows = Rows([(state, name) for state, name, _ in chosen], [Row.of(img=n) for *_, n in chosen], LayoutCache("cpu"))
    generator = torch.Generator().manual_seed(len(chosen))
    rows.bind(LATENTS, "img", [torch.randn(n, 4, generator=generator) for *_, n in chosen])
    return rows


@torch.inference_mode()
def predict_branches(mesh: Ranked, branches: tuple[int, ...]) -> Predicted:
    done = Predicted()

    def predict(rows: Rows) -> Tensor:
        done.rows += len(rows)
        done.tokens += len(rows[LATENTS])
        return torch.cat([rows[LATENTS].sin(), rows[LATENTS][:, :1].double().float()], 1)

    run = predict if mesh is None else BranchShares(mesh.groups[Axis.CFG]).around(predict)
    made = states(len(branches))
    every = [
        (state, f"branch {branch}", 3 + 4 * number + branch)
        for number, (state, count) in enumerate(zip(made, branches, strict=True))
        for branch in range(count)
    ]
    for chosen in (every, every, [each for each in every if each[0] is not made[0]] or every):
        done.predictions.append(run(batch(chosen)))
    return done


def assign_twice(mesh: Ranked) -> list[list[int]]:
    assert mesh is not None
    shares, (first, second, third) = BranchShares(mesh.groups[Axis.CFG]), states(3)
    before = shares.assign(batch([(first, "cond", 9), (first, "uncond", 8), (second, "cond", 2)]))
    after = shares.assign(batch([(first, "uncond", 8), (second, "cond", 2), (third, "cond", 5), (third, "uncond", 1)]))
    return [before, after]
