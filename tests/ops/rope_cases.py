"""What a kernel of the rope family must hold, as plain functions: pytest runs them, and so does tools/gpu_test.py.

Inputs are random and new in every run; a failure names the seed.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from omni_grpc.ops.quant import LARGEST
from omni_grpc.ops.rope import NORMS, PAIRS, Heads, parts_of, qk_norm_rope, qk_norm_rope_quantize
from omni_grpc.ops.rope_heads import qk_norm_rope_quantize_heads, qk_norm_rope_quantize_heads_op

F32, BF16 = torch.float32, torch.bfloat16


@dataclasses.dataclass(frozen=True)
class Case:
    """`turning`: rotary pairs; None: half of the head, 0: there is no table. `placed`: with one stream, too."""

    tokens: tuple[int, ...] = (5, 9)
    heads: int = 4
    kv_heads: int = 4
    size: int = 64
    turning: int | None = None
    norm: str = "rms"
    pairs: str = "interleaved"
    dtype: torch.dtype = F32
    weight_dtype: torch.dtype = F32
    view: str = "fused"
    affine: str = "weights"
    placed: bool = True

    def __str__(self) -> str:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return "-".join(
            f"{name}={value}".replace("torch.", "").replace(" ", "")
            for name, value in values.items()
            if value != getattr(Case, name)
        )


def _cases() -> Iterator[Case]:
    for norm, pairs, dtype in itertools.product(NORMS, PAIRS, (F32, BF16)):
        yield Case(norm=norm, pairs=pairs, dtype=dtype, weight_dtype=dtype, affine="" if norm == "none" else "both")
    # one, several and odd numbers of channels for a thread, and more heads than a block has room for
    for size, pairs, norm in itertools.product((2, 16, 32, 40, 96, 128, 256, 1024), PAIRS, ("rms", "rms_across")):
        yield Case(size=size, pairs=pairs, norm=norm, dtype=BF16, weight_dtype=BF16)
    for size, norm in itertools.product((1, 7, 20), ("rms", "layer", "rms_across")):
        yield Case(size=size, norm=norm, turning=size // 2)
    for heads, kv_heads, norm in itertools.product((72, 40, 24), (8, 4), ("rms", "rms_across", "layer")):
        yield Case((3,), heads, kv_heads, 128, norm=norm, dtype=BF16, weight_dtype=BF16)
    for heads, norm in itertools.product((24, 40), ("rms", "rms_across")):
        yield Case((3, 4), heads, heads, 128, norm=norm, dtype=BF16, weight_dtype=BF16)
    for heads, norm in itertools.product((1, 3, 70), ("rms", "rms_across")):
        yield Case((2, 3), heads, 1, 128, norm=norm)
    for size, turning, pairs in itertools.product((64, 96), (0, 8, 12, 16, 6), PAIRS):
        yield Case(size=size, turning=turning, pairs=pairs, dtype=BF16)
    for turning, pairs, norm in itertools.product((0, 8, 12, 16, 64), PAIRS, ("layer", "none")):
        yield Case(
            size=128, turning=turning, pairs=pairs, norm=norm, dtype=BF16, affine="" if norm == "none" else "both"
        )
    for view, norm, dtype in itertools.product(("whole", "odd", "transposed"), ("rms", "rms_across"), (F32, BF16)):
        yield Case(norm=norm, view=view, dtype=dtype)
    for affine, norm in itertools.product(("", "biases", "odd"), ("rms", "rms_across", "layer")):
        yield Case(norm=norm, affine=affine, dtype=BF16)
    for tokens in ((0,), (1,), (300,), (0, 4), (4, 0), (0, 0), (3, 0, 2, 1), (1, 1, 1, 1, 1, 1, 1, 1)):
        yield Case(tokens)
    yield Case((7,), placed=False)
    yield Case((7,), placed=False, norm="rms_across", dtype=BF16, kv_heads=2)


CASES = tuple(_cases())


@dataclasses.dataclass
class Inputs:
    streams: list[Heads]
    table: Tensor | None
    place: list[Tensor]

    def double(self) -> Inputs:
        streams = [
            Heads(*(x.double() for x in stream[:3]), *(tuple(x.double() for x in group) for group in stream[3:]))
            for stream in self.streams
        ]
        return Inputs(streams, None if self.table is None else self.table.double(), self.place)


def inputs(case: Case, device: str, seed: int) -> Inputs:
    """One channel of every head is far out, as those of trained models are, and a head of v is zero."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    def affine(heads: int) -> Tensor:
        channels = case.size * (heads if case.norm == "rms_across" else 1)
        odd = case.affine == "odd"  # no address is a multiple of 16
        return (draw(channels + odd) * 0.3 + 1).to(device, case.weight_dtype)[odd:]

    streams = []
    for tokens in case.tokens:
        parts = [draw(tokens, heads, case.size) + 0.5 for heads in (case.heads, case.kv_heads, case.kv_heads)]
        for x in parts:
            x[..., case.size // 2] += 20
        parts[2][:, -1] = 0
        weights, biases = (
            tuple(affine(heads) for heads in (case.heads, case.kv_heads)) if case.affine in kinds else ()
            for kinds in (("weights", "both", "odd"), ("biases", "both"))
        )
        streams.append(Heads(*_as_views(parts, case, device), weights, biases))
    total = sum(case.tokens)
    turning = case.size // 2 if case.turning is None else case.turning
    angles = draw(total, turning) * 3
    table = torch.stack([angles.cos(), angles.sin()], -1).to(device) if case.turning != 0 else None
    place = torch.randperm(total, generator=generator).int().to(device).split(case.tokens)
    return Inputs(streams, table, list(place) if case.placed else [])


def _as_views(parts: list[Tensor], case: Case, device: str) -> list[Tensor]:
    """The same numbers, laid out as the case says."""
    moved = [x.to(device, case.dtype) for x in parts]
    if case.view == "whole":
        return moved
    if case.view == "transposed":
        return [x.permute(2, 1, 0).contiguous().permute(2, 1, 0) for x in moved]
    start = {"fused": 0, "odd": 3}[case.view]
    heads = [x.shape[1] for x in moved]
    fused = torch.cat([x.flatten(1) for x in moved], 1)
    fused = torch.cat([fused.new_zeros(len(fused), start), fused], 1)[:, start:]
    return list(fused.unflatten(1, (sum(heads), case.size)).split(heads, 1))


def apply(case: Case, given: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    return qk_norm_rope(given.streams, given.table, given.place, norm=case.norm, pairs=case.pairs)


def check_case(case: Case, device: str, seed: int) -> None:
    """The op against its own definition in float64: within the rounding of its output dtype, element by element."""
    given = inputs(case, device, seed)
    out, exact = apply(case, given), apply(case, given.double())
    for name, mine, true in zip("qkv", out, exact, strict=True):
        assert mine.shape == true.shape, f"{case}: {name} has shape {mine.shape}"
        assert mine.dtype == case.dtype, f"{case}: {name} has dtype {mine.dtype}"
        if name == "v":
            assert torch.equal(mine, true.to(case.dtype)), f"{case} on {device}, seed {seed}: v is not what came"
            continue
        assert mine.is_contiguous(), f"{case}: {name} has strides {mine.stride()}"
        relative = 2.0**-8 if case.dtype is BF16 else 1e-5
        # a turn mixes two channels, so what counts is the larger of them
        excess = (mine.double() - true).abs() - relative * true.abs() - 2e-6 * (1 + true.abs().amax(-1, keepdim=True))
        worst = excess.amax().item() if excess.numel() else 0.0
        assert worst <= 0, f"{case} on {device}, seed {seed}: {name} is off by {worst:.3g} more than rounding allows"


def check_codes(case: Case, codes: torch.dtype, device: str, seed: int) -> None:
    """Scales to a few units in the last place of float32, codes within a step."""
    given = inputs(case, device, seed)
    made = qk_norm_rope_quantize(given.streams, given.table, given.place, codes=codes, norm=case.norm, pairs=case.pairs)
    exact = apply(case, given.double())
    most = LARGEST[codes]
    for name, code, scale, true in zip("qkv", made[:3], made[3:], exact, strict=True):
        about = f"{case} in {codes} on {device}, seed {seed}: {name}"
        assert code.dtype == codes, f"{about} has {code.dtype}"
        assert code.shape == true.shape, f"{about} has shape {code.shape}"
        assert code.is_contiguous(), f"{about} has strides {code.stride()}"
        amax = true.abs().amax(-1)
        torch.testing.assert_close(scale.double(), torch.where(amax > 0, amax / most, 1.0), rtol=2e-5, atol=1e-8)
        scaled = true / scale.double()[..., None]
        # half a step of int8 is 0.5; of e4m3 a sixteenth of the value, or 2^-10 below its least normal number
        step = 0.5 if codes == torch.int8 else (scaled.abs() / 16).clamp_min(2.0**-10)
        worst = ((code.double() - scaled).abs() - step - 2e-3).amax().item() if code.numel() else 0.0
        assert worst <= 0, f"{about} is off by {worst:.3g} more than half a step"


def _code_cases() -> Iterator[Case]:
    for size, norm, pairs, dtype in itertools.product((128, 96, 20), NORMS[1:], PAIRS, (F32, BF16)):
        yield Case(size=size, norm=norm, pairs=pairs, dtype=dtype)
    yield Case((0,))
    for heads, norm in itertools.product((24, 40), ("rms", "rms_across")):
        yield Case((3, 4), heads, heads, 128, norm=norm, dtype=BF16, weight_dtype=BF16)
    for view, norm in itertools.product(("odd", "fused"), ("rms", "rms_across")):
        yield Case((300,), 40, 8, 128, norm=norm, dtype=BF16, view=view)


CODE_CASES = tuple(_code_cases())


def check_row_is_independent(device: str, seed: int) -> None:
    """A token's result is the same bits alone and among others."""
    for norm in NORMS[1:]:
        case = Case((131,), 24, 24, 128, norm=norm, dtype=BF16, weight_dtype=BF16, placed=False)
        given = inputs(case, device, seed)
        together = apply(case, given)
        for token in (0, 64, 130):
            (stream,), table = given.streams, given.table
            assert table is not None
            one = stream._replace(**{name: getattr(stream, name)[token : token + 1] for name in "qkv"})
            alone = apply(case, Inputs([one], table[token : token + 1], []))
            for mine, all_of_them in zip(alone, together, strict=True):
                assert torch.equal(mine[0], all_of_them[token]), f"{norm}, token {token} on {device}, seed {seed}"


def check_streams_are_those_of_one(device: str, seed: int) -> None:
    """Tokens that come in two streams give the same bits as in one."""
    case = Case((6, 11), 24, 24, 128, dtype=BF16, weight_dtype=BF16)
    given = inputs(case, device, seed)
    first, second = given.streams
    given.streams[1] = second = second._replace(weights=first.weights)
    one = Heads(*(torch.cat([a, b]) for a, b in zip(first[:3], second[:3], strict=True)), first.weights)
    whole = apply(case, Inputs([one], given.table, [torch.cat(given.place)]))
    for mine, theirs in zip(apply(case, given), whole, strict=True):
        assert torch.equal(mine, theirs), f"on {device}, seed {seed}"


def check_current_stream(device: str, seed: int) -> None:
    """The kernel runs after what its stream did before, on whichever stream that is."""
    case = Case((2048,), 8, 8, 128, placed=False, norm="layer", affine="")
    given = inputs(case, device, seed)
    (stream,) = given.streams
    want = apply(case, given)
    late = stream._replace(q=torch.zeros_like(stream.q), k=torch.zeros_like(stream.k))
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late.q.copy_(stream.q)
        late.k.copy_(stream.k)
        out = apply(case, Inputs([late], given.table, []))
    torch.cuda.synchronize()
    for mine, theirs in zip(out[:2], want[:2], strict=True):
        assert torch.allclose(mine, theirs, atol=1e-3), f"seed {seed}: the kernel did not wait for its stream"


def check_all_codes(device: str, seed: int) -> None:
    for case, codes in itertools.product(CODE_CASES, LARGEST):
        check_codes(case, codes, device, seed)


def check_row_codes(case: Case, device: str, seed: int) -> None:
    """Codes with a scale for each row: those of the definition but for a step, and what they are of to half a step."""
    given = inputs(case, device, seed)
    total, generator = sum(case.tokens), torch.Generator().manual_seed(seed)
    cuts = sorted(torch.randint(0, total + 1, (3,), generator=generator).tolist())
    cu = torch.tensor([0, *cuts, total], dtype=torch.int32, device=device)
    # streams have their tokens in the order of the rows
    place = [each.sort().values for each in given.place]
    given = Inputs(given.streams, given.table, place)
    made = qk_norm_rope_quantize_heads(given.streams, given.table, place, cu, norm=case.norm, pairs=case.pairs)
    q, k, v, weights, _ = parts_of(given.streams)
    want = qk_norm_rope_quantize_heads_op.reference(
        q, k, v, weights, given.table, place, cu, case.norm, case.pairs, 1e-6
    )
    about = f"{case} in codes of rows on {device}, seed {seed}"
    torch.testing.assert_close(made.scales, want[3], rtol=1e-6, atol=0, msg=about)
    rows = torch.arange(4, device=device).repeat_interleave(cu.diff())
    for which, (code, right, true) in enumerate(zip(made, want, apply(case, given.double()), strict=False)):
        assert (code.shape, code.dtype, code.is_contiguous()) == (true.shape, torch.float8_e4m3fn, True), about
        step = (code.float() - right.float()).abs() - 0.13 * right.float().abs() - 2**-9
        assert not step.numel() or step.max() <= 0, f"{about}: {'qkv'[which]}"
        scale = made.scales[which][rows].double().repeat_interleave(true.shape[1] // case.kv_heads, 1)[..., None]
        excess = (code.double() * scale - true).abs() - true.abs() / 15.9 - scale * 2**-9 - 1e-6
        assert not excess.numel() or excess.max() <= 0, f"{about}: {'qkv'[which]} is off by {excess.max():.3g} more"


def _row_code_cases() -> Iterator[Case]:
    for size, norm, pairs, dtype in itertools.product((128, 96, 20), ("rms", "rms_across"), PAIRS, (F32, BF16)):
        yield Case((50, 31), size=size, norm=norm, pairs=pairs, dtype=dtype, weight_dtype=dtype)
    for heads, kv_heads, norm in itertools.product((72, 40, 24), (8, 4), ("rms", "rms_across")):
        yield Case((3, 40), heads, kv_heads, 128, norm=norm, dtype=BF16, weight_dtype=BF16)
    yield Case((0, 4))
    yield Case((0,))
    yield Case((300,), 24, 24, 128, dtype=BF16, placed=False)
    yield Case((300,), 40, 8, 128, norm="rms_across", dtype=BF16, view="odd")
    yield Case((30, 9), norm="rms", affine="", dtype=BF16)
    # more tokens than blocks, and rows that a block has several of
    yield Case((700, 1300), 24, 24, 128, norm="rms", dtype=BF16, weight_dtype=BF16)
    yield Case((1900, 20), 8, 2, 128, norm="rms_across", dtype=BF16, weight_dtype=F32)


def check_all_row_codes(device: str, seed: int) -> None:
    for case in _row_code_cases():
        check_row_codes(case, device, seed)


CHECKS: tuple[Callable[[str, int], None], ...] = (
    check_row_is_independent,
    check_streams_are_those_of_one,
    check_all_row_codes,
)
CUDA_CHECKS: tuple[Callable[[str, int], None], ...] = (*CHECKS, check_all_codes, check_current_stream)
