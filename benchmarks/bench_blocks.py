"""Times one full-size block of Qwen-Image, FLUX.1 and Wan 2.2 A14B in bfloat16: diffusers eager, diffusers compiled,
and ours; and ours again with one family of kernels at a time replaced by its references: what that family is worth. All
of them with torch's attention, as diffusers has it; and ours with the backend that it takes by itself.

    python -m benchmarks.bench_blocks [--seconds 150] [--results FOLDER]     on a GPU

A measurement is a CUDA graph of one call, timed with events. Weights are random. Ours has its modulation and its text's
keys computed ahead, as in a request; diffusers' computes them in the block. torch.compile comes last, as it takes
longest; what is measured is in the results at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from unittest import mock

import torch
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock, FluxTransformerBlock
from diffusers.models.transformers.transformer_qwenimage import QwenImageTransformerBlock
from diffusers.models.transformers.transformer_wan import WanTransformerBlock
from torch import Tensor, nn

from benchmarks import timing
from omni_grpc import ops
from omni_grpc.config.backends import AUTO, choose
from omni_grpc.config.command_line import Parser
from omni_grpc.nn.attention import Attention
from omni_grpc.nn.cross_dit import CrossDiTBlock, text_constants
from omni_grpc.nn.dual_stream import DualStreamBlock
from omni_grpc.nn.parallel_single import ParallelSingleBlock
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Stack
from omni_grpc.ops.attention import use_of
from omni_grpc.ops.declare import cell_of, is_op

DEVICE, DTYPE = "cuda", torch.bfloat16
FAMILIES: Mapping[str, tuple[str, ...]] = {"norm": ("norm",), "rope": ("rope",), "activation": ("quant",)}
"""A row of the table -> the modules of omni_grpc.ops whose ops give way to their references in it."""

OWN_ATTENTION = "ours, its own attention"
PASSES = (
    ("ours", "diffusers eager"),
    (*(f"ours without {family} kernels" for family in FAMILIES), OWN_ATTENTION),
    ("diffusers compiled",),
)

Call = Callable[[], object]


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """One block: what diffusers does, and what we do for the same tokens with the attention of that name."""

    name: str
    theirs: Callable[[], Call]
    ours: Callable[[str], Call]


@dataclasses.dataclass(frozen=True)
class Measurement:
    block: str
    what: str
    milliseconds: float | None
    problem: str = ""


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=DTYPE)


def _weights(make: Callable[[], nn.Module]) -> nn.Module:
    """Small random weights, so that nothing overflows."""
    with torch.device(DEVICE):
        module = make().to(DTYPE).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
    return module


def _angles(tokens: int, pairs: int) -> Tensor:
    return torch.rand(tokens, pairs, device=DEVICE) * 6.28


def _ours(
    make: Callable[[], nn.Module], row: Row, carry: tuple[str, ...], channels: int, modulation: int, attention: str
) -> Call:
    """One row through a stack of one block."""
    block = _weights(make)
    stack = Stack(blocks=[block])  # type: ignore[list-item]
    for part in block.modules():
        if isinstance(part, Attention):
            part.backend = attention
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
        block = _weights(lambda: QwenImageTransformerBlock(3072, 24, 128))
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
        lambda attention: _ours(
            lambda: DualStreamBlock(24, 128), Row.of(txt=txt, img=img), ("txt", "img"), 3072, 12, attention
        ),
    )


def flux_dual(txt: int = 512, img: int = 4096) -> Case:
    def theirs() -> Call:
        block, angles = (
            _weights(lambda: FluxTransformerBlock(3072, 24, 128)),
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
        "FLUX.1 dual",
        theirs,
        lambda attention: _ours(
            lambda: DualStreamBlock(24, 128), Row.of(txt=txt, img=img), ("txt", "img"), 3072, 12, attention
        ),
    )


def flux_single(txt: int = 512, img: int = 4096) -> Case:
    def theirs() -> Call:
        block, angles = (
            _weights(lambda: FluxSingleTransformerBlock(3072, 24, 128)),
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
        lambda attention: _ours(
            lambda: ParallelSingleBlock(24, 128), Row.of(txt=txt, img=img), ("joint",), 3072, 3, attention
        ),
    )


def wan(txt: int = 512, img: int = 32760) -> Case:
    def theirs() -> Call:
        block = _weights(lambda: WanTransformerBlock(5120, 13824, 40, cross_attn_norm=True))
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
        lambda attention: _ours(
            lambda: CrossDiTBlock(40, 128, 13824),
            Row.of(txt=txt, img=img, aside=("txt",)),
            ("img",),
            5120,
            6,
            attention,
        ),
    )


CASES = (qwen_image, flux_dual, flux_single, wan)


@contextlib.contextmanager
def references(family: str) -> Iterator[None]:
    """In the block below, a family's functions call the references of its ops: torch's operators, in float32."""
    with contextlib.ExitStack() as patches:
        for module in (importlib.import_module(f"omni_grpc.ops.{name}") for name in FAMILIES[family]):
            for op in filter(is_op, vars(module).values()):
                cell = cell_of(op, "_overload")
                patches.callback(setattr, cell, "cell_contents", cell.cell_contents)
                cell.cell_contents = op.reference
                patches.enter_context(mock.patch.object(op, "overload", op.reference))
        yield


def measure(seconds: float) -> Iterator[Measurement]:
    """Every candidate of every block, in the order of PASSES. Nothing new starts after `seconds`."""
    deadline = time.monotonic() + seconds
    for names, make in itertools.product(PASSES, CASES):
        for what in names:
            taken, problem = None, "no time left"
            case = make()
            if time.monotonic() < deadline:
                torch.manual_seed(0)
                with _replaced(what), torch.inference_mode():
                    taken, problem = timing.attempt(_seconds, _candidate(case, what), None)
            yield Measurement(case.name, what, taken and 1e3 * taken, problem)
            torch.cuda.empty_cache()


def _candidate(case: Case, what: str) -> Callable[[], Call]:
    if what == "diffusers eager":
        return case.theirs
    if what == "diffusers compiled":
        torch.compiler.reset()
        return lambda: torch.compile(case.theirs(), dynamic=False)
    return lambda: case.ours(AUTO if what == OWN_ATTENTION else "TORCH_SDPA")


def _replaced(what: str) -> contextlib.AbstractContextManager[None]:
    family = what.removeprefix("ours without ").removesuffix(" kernels")
    return references(family) if family in FAMILIES else contextlib.nullcontext()


def _seconds(build: Callable[[], Call], _: object) -> float:
    return timing.time_on_gpu(build(), [(), ()], calls=1)


def table(measurements: Sequence[Measurement]) -> str:
    """Milliseconds of each candidate, and its time over ours."""
    ours = {m.block: m.milliseconds for m in measurements if m.what == "ours"}
    lines = []
    for m in sorted(measurements, key=lambda m: list(ours).index(m.block)):
        base = ours[m.block]
        ratio = f"{m.milliseconds / base:5.2f}x" if m.milliseconds and base else ""
        lines.append(f"{m.block:28} {m.what:34} {m.problem or f'{m.milliseconds:8.3f} ms'} {ratio}")
    return "\n".join(lines)


def main() -> None:
    parser = Parser(description="time full-size blocks against diffusers")
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--results", type=Path, default=timing.RESULTS, help="folder of the JSON file")
    options = parser.parse_args()
    timing.require_gpu()
    own = choose(AUTO, use_of(torch.device(DEVICE), DTYPE, 128, causal=False, grouped=False))
    made = measure(options.seconds)
    measurements = timing.recorded("benchmarks/bench_blocks.py", "blocks", made, options.results, own_attention=own)
    print(f"{table(measurements)}\nits own attention: {own}")
    print({name: keys for name, keys in ops.kernels().items() if keys})


if __name__ == "__main__":
    main()
