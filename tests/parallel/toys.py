"""Made-up stacks that one process runs whole and ranks run in parts. Their blocks know nothing of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from omni_grpc.nn.attention import Attention
from omni_grpc.nn.linear import Linear
from omni_grpc.nn.moe import MixtureOfExperts
from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Row, Rows
from omni_grpc.nn.stack import Block, Carry, RunBlocks, Stack, convert
from omni_grpc.types.request import Guidance
from omni_grpc.types.spec import Defaults, Limits, ModelSpec, Split, SplitKind, WeightMap

HEADS, KV_HEADS, HEAD_SIZE = 12, 6, 8
CHANNELS = HEADS * HEAD_SIZE

SPEC = ModelSpec(
    name="Toy",
    family="toy",
    tasks=(),
    pipeline="",
    guidance=(),
    limits=lambda configs: Limits(size_multiple=1, min_size=1, max_size=1, max_pixels=1, max_prompt_tokens=1),
    defaults=lambda configs: Defaults(width=1, height=1, steps=1, guidance=Guidance()),
)

ROWS = (
    Row.of(txt=7, img=((0, 5), (1, 6))),
    Row.of(txt=1, img=1),
    Row.of(txt=4, img=((0, 9), (2, 1))),
    Row.of(txt=0, img=13),
)
"""Parts that are uneven or empty, a stream without tokens, levels that one rank alone has tokens of."""


class Toy(Block):
    """Grouped-query attention, added to what it reads."""

    def __init__(self, **kind: bool) -> None:
        super().__init__()
        self.to_q = Linear(CHANNELS, CHANNELS, stream=JOINT)
        self.to_kv = Linear(CHANNELS, 2 * KV_HEADS * HEAD_SIZE, stream=JOINT)
        self.attention = Attention(HEADS, HEAD_SIZE, KV_HEADS, **kind)

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def heads(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (
            self.to_q(x).unflatten(-1, (HEADS, -1)),
            *self.to_kv(x).unflatten(-1, (2, KV_HEADS, -1)).unbind(1),
        )

    def modulated(self, carry: Sequence[Tensor], rows: Rows, mod: Tensor) -> dict[str, Tensor]:
        return {name: x + mod[rows.index[name]] for name, x in zip(self.carry, carry, strict=True)}


class Joint(Toy):
    """Both streams attend to both."""

    carry = ("txt", "img")

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        x = self.modulated(carry, rows, mod)
        q, k, v = (
            rows.join(dict(zip(x, parts, strict=True))) for parts in zip(*map(self.heads, x.values()), strict=True)
        )
        out = rows.split(self.attention(q * rows["turn"], k * rows["turn"], v, rows).flatten(1))
        return tuple(x[name] + out[name] for name in self.carry)


class Single(Toy):
    """The same on the joint stream."""

    carry = (JOINT,)

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = self.modulated(carry, rows, mod).values()
        q, k, v = self.heads(x)
        return (x + self.attention(q * rows["turn"], k * rows["turn"], v, rows).flatten(1),)


class Across(Toy):
    """The image attends to everything; the text, which is carried along, to itself."""

    carry = ("txt", "img")

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        x = self.modulated(carry, rows, mod)
        (q, k, v), (img_q, img_k, img_v) = map(self.heads, x.values())
        txt = self.attention(q, k, v, rows, over="txt")
        k, v = rows.join({"txt": k, "img": img_k}), rows.join({"txt": v, "img": img_v})
        img = self.attention(img_q, k * rows["turn"], v, rows, over="img", kv=JOINT)
        return x["txt"] + txt.flatten(1), x["img"] + img.flatten(1)


class Cross(Toy):
    """The image attends to itself, and to keys and values of the text, which are constants."""

    carry = ("img",)
    constants = ("text_k", "text_v")

    def __init__(self) -> None:
        super().__init__()
        self.cross = Attention(HEADS, HEAD_SIZE, KV_HEADS, role="cross")

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = self.modulated(carry, rows, mod).values()
        x = x + self.attention(*self.heads(x), rows, over="img").flatten(1)
        q, *_ = self.heads(x)
        return (x + self.cross(q, constants["text_k"], constants["text_v"], rows, over="img", kv="txt").flatten(1),)


class Halfway(Cross):
    """The image attends to what its own keys and the text's constants make up together."""

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = self.modulated(carry, rows, mod).values()
        q, k, v = self.heads(x)
        k, v = (rows.join({"txt": text, "img": own}) for text, own in zip(constants.values(), (k, v), strict=True))
        return (x + self.attention(q, k, v, rows, over="img", kv=JOINT).flatten(1),)


class Bare(Block):
    """Attention of 64 channels: 32 of queries, 16 of keys, 16 of values. It has no weights."""

    carry = ("img",)

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = carry
        q, k, v = (part.unflatten(1, (-1, 8)) for part in x.split([32, 16, 16], 1))
        out = self.attention(q, k, v, rows, over="img").flatten(1)
        return (torch.cat([out, x[:, 32:]], 1),)


class Mixed(Block):
    """A mixture of experts, added to what it reads."""

    carry = ("img",)

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.moe = MixtureOfExperts(16, 24, experts, 2, stream="img", shared=8)

    def modulation(self, temb: Tensor) -> Tensor:
        return temb

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        (x,) = carry
        return (x + self.moe(x, rows),)


STACKS: Mapping[str, Callable[[], Stack]] = {
    "dual_single": lambda: Stack(dual=[Joint(), Joint()], single=[Single()]),
    "across": lambda: Stack(across=[Across(), Across()]),
    "cross": lambda: Stack(cross=[Cross(), Cross()]),
    "causal": lambda: Stack(dual=[Joint(causal=True)]),
    "skipping": lambda: Stack(dual=[Joint(skip_sequence_parallel=True)]),
    "halfway": lambda: Stack(cross=[Halfway()]),
}
SERVED = ("dual_single", "across", "cross")
"""Those that ranks can run, with and without Ulysses."""


class HeaviestFirst:
    """A middleware that takes rows apart by a statistic of all their tokens, as step caches do."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def __call__(self, run: RunBlocks) -> RunBlocks:
        def around(stack: Stack, lo: int, hi: int, carry: Carry, rows: Rows) -> Carry:
            images = rows.stream("img").split(carry["img"])
            self.norms = rows.totals(torch.stack([x.square().sum() for x in images])).tolist()
            lightest, *others = sorted(range(len(rows)), key=self.norms.__getitem__)
            done: dict[int, dict[str, Tensor]] = {}
            for chosen in (sorted(others), [lightest]):
                part = rows.narrow(chosen)
                out = run(stack, lo, hi, {name: rows.stream(name).take(x, chosen) for name, x in carry.items()}, part)
                out = convert(out, tuple(carry), part)
                for place, row in enumerate(chosen):
                    done[row] = {name: x[part.stream(name).slice(place)] for name, x in out.items()}
            return {name: torch.cat([done[row][name] for row in range(len(rows))]) for name in carry}

        return around


def batch(stack: Stack, chosen: Sequence[int]) -> tuple[Carry, Rows]:
    """Rows with all that the toys read. A row's tensors are the same in any company."""
    rows = Rows([(None, str(row)) for row in chosen], [ROWS[row] for row in chosen], LayoutCache("cpu"))

    def drawn(stream: str, seed: int, *shape: int) -> list[Tensor]:
        lengths = rows.stream(stream).lengths
        return [
            torch.randn(length, *shape, generator=torch.Generator().manual_seed(seed + row))
            for row, length in zip(chosen, lengths, strict=True)
        ]

    blocks = len(stack)
    for group in stack.groups:
        rows.bind(group, MOD, drawn(MOD, 100, blocks, CHANNELS))
    rows.bind("turn", JOINT, drawn(JOINT, 200, 1, 1))
    for seed, name in ((300, "text_k"), (400, "text_v")):
        rows.bind(name, "txt", drawn("txt", seed, blocks, KV_HEADS, HEAD_SIZE))
    streams = ("img",) if "cross" in stack.groups else ("txt", "img")
    return {name: torch.cat(drawn(name, 500, CHANNELS)) for name in streams}, rows


def weigh(module: nn.Module) -> None:
    """Weights that are the same in every process."""
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.5 * parameter.shape[-1] ** -0.5


class Wide(nn.Module):
    """Attention and a feed-forward side by side, read by one layer; norms over all heads, of which keys have fewer."""

    def __init__(self) -> None:
        super().__init__()
        inner, kv, hidden = CHANNELS, KV_HEADS * HEAD_SIZE, 4 * CHANNELS
        self.to_qkv = Linear(CHANNELS, inner + 2 * kv, stream=JOINT)
        self.norm_q, self.norm_k = nn.RMSNorm(inner, 1e-5), nn.RMSNorm(kv, 1e-5)
        self.attention = Attention(HEADS, HEAD_SIZE, KV_HEADS)
        self.up = Linear(CHANNELS, hidden, stream=JOINT)
        self.out = Linear(inner + hidden, CHANNELS, stream=JOINT)

    def forward(self, x: Tensor, rows: Rows) -> Tensor:
        share = self.to_qkv.out_features // 4
        q, k, v = self.to_qkv(x).split([2 * share, share, share], -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD_SIZE)) for part in (self.norm_q(q), self.norm_k(k), v))
        out: Tensor = self.out(torch.cat([self.attention(q, k, v, rows).flatten(1), self.up(x).relu()], -1))
        return out


WIDE_WEIGHTS = WeightMap(fused={"to_qkv": ("to_q", "to_k", "to_v")})
WIDE_SPLITS: Mapping[str, Split] = {
    "to_qkv": Split(SplitKind.COLUMN, (2, 1, 1)),
    "norm_?": Split(SplitKind.NORM),
    "attention": Split(SplitKind.HEADS),
    "up": Split(SplitKind.COLUMN),
    "out": Split(SplitKind.ROW, (1, 4)),
}
