"""A made-up stack of blocks, as it is and offloaded. It needs nothing but torch and omni_grpc."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor, nn

from omni_grpc.config import OffloadConfig
from omni_grpc.features import Context
from omni_grpc.features.layerwise_offload import apply
from omni_grpc.nn.linear import AnyLinear, Linear
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.nn.stack import Block, Stack
from tests.toy import toy_spec

WIDTH, BLOCKS = 64, 5
LAYER_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Two(Block):
    """Two layers on its tokens, one that makes its modulation, and one that works on a text ahead of the steps."""

    carry = ("img",)

    def __init__(self) -> None:
        super().__init__()
        self.mod = Linear(WIDTH, WIDTH, stream="mod")
        self.key = Linear(WIDTH, WIDTH, stream="txt")
        self.up, self.down = (Linear(WIDTH, WIDTH, stream="img") for _ in range(2))
        self.norm = nn.RMSNorm(WIDTH)

    def modulation(self, temb: Tensor) -> Tensor:
        return self.mod(temb)

    def forward(self, *carry: Tensor, rows: Rows, mod: Tensor, **constants: Tensor) -> tuple[Tensor, ...]:
        return (carry[0] + self.down(torch.tanh(self.up(self.norm(carry[0])) + mod[rows.index["img"]])),)


def pair(device: str = "cpu", *, resident: int = 0) -> tuple[Stack, Stack, list[Two]]:
    """A stack, the same one offloaded, and the blocks of the latter. Weights are given as a checkpoint gives them."""
    torch.manual_seed(0)
    plain = Stack(blocks=[Two() for _ in range(BLOCKS)]).requires_grad_(False).to(device)
    with torch.device("meta"):
        module = nn.ModuleDict({"stack": Stack(blocks=[Two() for _ in range(BLOCKS)])})
    where = torch.device(device)
    apply(
        module,
        OffloadConfig(enable_layerwise_offload=True, layerwise_resident_blocks=resident),
        Context(component="transformer", spec=toy_spec(), device=where, dtype=torch.float32),
    )
    stack = module["stack"]
    for path, owner in plain.named_modules():
        if isinstance(owner, AnyLinear):
            for name, tensor in owner.named_parameters():
                stack.get_submodule(path).load_tensor(name, tensor.clone())
        elif isinstance(owner, nn.RMSNorm):
            stack.get_submodule(path).weight = nn.Parameter(owner.weight.clone(), requires_grad=False)
    return plain, stack, list(stack.group("blocks"))


def run(stack: Stack, device: str = "cpu") -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x, temb = (torch.randn(count, WIDTH, generator=generator).to(device) for count in (7, 2))
    rows = Rows([(SimpleNamespace(), "cond")] * 2, [Row.of(img=4), Row.of(img=3)], LayoutCache(device))
    rows.bind("blocks", "mod", stack.modulation(temb)["blocks"].split(1))
    return stack({"img": x}, rows)["img"]


def held(*modules: nn.Module) -> int:
    """Bytes of the parameters of linear layers, as they are now."""
    layers = [part for module in modules for part in module.modules() if isinstance(part, Linear)]
    return sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
