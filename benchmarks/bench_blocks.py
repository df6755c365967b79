"""Times one full-size block of Qwen-Image, FLUX.1 and Wan 2.2 A14B in bfloat16: diffusers eager, diffusers compiled,
and ours; and ours again with one family of kernels at a time replaced by its references: what that family is worth.

    python -m benchmarks.bench_blocks [--seconds 150]     on a GPU

A measurement is a CUDA graph of one call where that can be captured, timed with events. Weights are random. Ours has
its modulation and its text's keys computed ahead, as in a request; diffusers' computes them in the block.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from unittest import mock

import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from omni_grpc import ops
from omni_grpc.nn.cross_dit import CrossDiTBlock, text_constants
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack

DEVICE, DTYPE = "cuda", torch.bfloat16
REPEATS = 12
FAMILIES: Mapping[str, tuple[str, ...]] = {"norm": ("norm",), "rope": ("rope",), "activation": ("quant",)}
"""A row of the table -> the modules of omni_grpc.ops whose functions go back to their references in it."""

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One block: what diffusers does, and what we do for the same tokens."""

    name: str
    theirs: Callable[[], Call]
    ours: Callable[[], Call]


@dataclasses.dataclass(frozen=True)
class Measurement:
    block: str
    what: str
    milliseconds: float | None
    problem: str = ""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _weights(module: nn.Module) -> nn.Module:
    """Small random weights, so that nothing overflows."""
    module = module.to(DEVICE, DTYPE).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
    return module


def _angles(tokens: int, pairs: int) -> Tensor:
    return torch.rand(tokens, pairs, device=DEVICE) * 6.28


def _ours(block: nn.Module, row: Row, carry: tuple[str, ...], channels: int, modulation: int) -> Call:
    """One row through a stack of one block."""
    stack = Stack(blocks=[_weights(block)])  # type: ignore[list-item]
    rows = Rows([(None, "cond")], [row], LayoutCache(DEVICE))
    where = "joint" if row.joined == row.names else "img"
    tokens = rows.stream(where).total
    size = block.attn1 if hasattr(block, "attn1") else block.attn
    table = torch.stack([(a := _angles(tokens, size.head_size // 2)).cos(), a.sin()], -1)
    rows.bind("rope", where, [table])
    rows.bind("blocks", "mod", [_random(1, 1, modulation * channels) * 0.1])
    if isinstance(block, CrossDiTBlock):
        for name, (stream, tensor) in text_constants([block], _random(rows.stream("txt").total, channels)).items():
            rows.bind(name, stream, [tensor])
    start = {name: _random(rows.stream(name).total, channels) for name in carry}
    return lambda: stack(start, rows)


def qwen_image(txt: int = 256, img: int = 4096) -> Case:
    def theirs() -> Call:
        block = _weights(QwenImageTransformerBlock(3072, 24, 128))
        inputs = {
            "hidden_states": _random(1, img, 3072),
            "encoder_hidden_states": _random(1, txt, 3072),
            "encoder_hidden_states_mask": None,
            "temb": _random(1, 3072),
            "image_rotary_emb": tuple(
                torch.polar(torch.ones(n, 64, device=DEVICE), _angles(n, 64)) for n in (img, txt)
            ),
        }
        return lambda: block(**inputs)

    return Case(
        "Qwen-Image",
        theirs,
        lambda: _ours(DualStreamBlock(24, 128), Row.of(txt=txt, img=img), ("txt", "img"), 3072, 12),
    )


def flux_dual(txt: int = 512, img: int = 4096) -> Case:
    def theirs() -> Call:
        block, angles = _weights(FluxTransformerBlock(3072, 24, 128)), _angles(txt + img, 64).repeat_interleave(2, 1)
        inputs = {
            "hidden_states": _random(1, img, 3072),
            "encoder_hidden_states": _random(1, txt, 3072),
            "temb": _random(1, 3072),
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }
        return lambda: block(**inputs)

    return Case(
        "FLUX.1 dual",
        theirs,
        lambda: _ours(DualStreamBlock(24, 128), Row.of(txt=txt, img=img), ("txt", "img"), 3072, 12),
    )


def flux_single(txt: int = 512, img: int = 4096) -> Case:
    def theirs() -> Call:
        block, angles = (
            _weights(FluxSingleTransformerBlock(3072, 24, 128)),
            _angles(txt + img, 64).repeat_interleave(2, 1),
        )
        inputs = {
            "hidden_states": _random(1, img, 3072),
            "encoder_hidden_states": _random(1, txt, 3072),
            "temb": _random(1, 3072),
            "image_rotary_emb": (angles.cos(), angles.sin()),
        }
        return lambda: block(**inputs)

    return Case(
        "FLUX.1 single",
        theirs,
        lambda: _ours(ParallelSingleBlock(24, 128), Row.of(txt=txt, img=img), ("joint",), 3072, 3),
    )


def wan(txt: int = 512, img: int = 32760) -> Case:
    def theirs() -> Call:
        block = _weights(WanTransformerBlock(5120, 13824, 40, cross_attn_norm=True))
        angles = _angles(img, 64).repeat_interleave(2, 1)[None, :, None]
        inputs = {
            "hidden_states": _random(1, img, 5120),
            "encoder_hidden_states": _random(1, txt, 5120),
            "temb": torch.randn(1, 6, 5120, device=DEVICE) * 0.1,
            "rotary_emb": (angles.cos(), angles.sin()),
        }
        return lambda: block(**inputs)

    return Case(
        "Wan2.2 A14B 480p 81 frames",
        theirs,
        lambda: _ours(CrossDiTBlock(40, 128, 13824), Row.of(txt=txt, img=img, aside=("txt",)), ("img",), 5120, 6),
    )


CASES = (qwen_image, flux_dual, flux_single, wan)


@contextlib.contextmanager
def references(family: str) -> Iterator[None]:
    """Layers call the references of a family's functions in the block below."""
    with contextlib.ExitStack() as patches:
        for module in FAMILIES[family]:
            functions = vars(importlib.import_module(f"omni_grpc.ops.{module}"))
            for name, function in functions.items():
                reference = functions.get(f"{name}_reference")
                if reference is None:
                    continue
                for user in [m for path, m in sys.modules.items() if path.startswith("omni_grpc.nn.")]:
                    for own, value in list(vars(user).items()):
                        if value is function:
                            patches.enter_context(mock.patch.object(user, own, reference))
        yield


def measure(seconds: float) -> list[Measurement]:
    """Every candidate of every block. Nothing new starts after `seconds`."""
    deadline, measurements = time.monotonic() + seconds, []
    for make in CASES:
        case = make()
        candidates: dict[str, Callable[[], Call]] = {
            "diffusers eager": case.theirs,
            "ours": case.ours,
            **{f"ours without {family} kernels": case.ours for family in FAMILIES},
            "diffusers compiled": lambda case=case: torch.compile(case.theirs()),  # type: ignore[misc]
        }
        for what, build in candidates.items():
            family = what.removeprefix("ours without ").removesuffix(" kernels")
            context = references(family) if family in FAMILIES else contextlib.nullcontext()
            taken, problem = None, "no time left"
            if time.monotonic() < deadline:
                with context, torch.inference_mode():
                    taken, problem = _try(build)
            measurements.append(Measurement(case.name, what, taken, problem))
            torch.cuda.empty_cache()
    return measurements


def _try(build: Callable[[], Call]) -> tuple[float | None, str]:
    try:
        torch.manual_seed(0)
        return _milliseconds(build()), ""
    except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and the other rows still count
        return None, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _milliseconds(call: Call) -> float:
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(REPEATS + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def table(measurements: list[Measurement]) -> str:
    """Milliseconds of each candidate, and its time over ours."""
    ours = {m.block: m.milliseconds for m in measurements if m.what == "ours"}
    lines = []
    for m in measurements:
        base = ours[m.block]
        ratio = f"{m.milliseconds / base:5.2f}x" if m.milliseconds and base else ""
        lines.append(f"{m.block:28} {m.what:34} {m.problem or f'{m.milliseconds:8.3f} ms'} {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time full-size blocks against diffusers")
    parser.add_argument("--seconds", type=float, default=150.0)
    print(table(measure(parser.parse_args().seconds)))
    print({name: keys for name, keys in ops.kernels().items() if keys})


if __name__ == "__main__":
    main()
