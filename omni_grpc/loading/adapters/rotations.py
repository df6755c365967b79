"""OFT and BOFT in files: the tensors of a layer as the rotation that they say.

A block of numbers becomes a rotation by the Cayley transform of its skew-symmetric part. LyCORIS and kohya rotate the
outputs of a layer, PEFT its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omni_grpc.loading.adapters.keys import Entry
from omni_grpc.loading.adapters.parts import Malformed, NotServed, number
from omni_grpc.loading.adapters.transforms import Rotation, Stage

NEUMANN_TERMS = 5
"""Of the series that PEFT takes for an inverse, unless its config says otherwise."""


def rotation(entry: Entry, config: Mapping[str, Any], shape: tuple[int, int]) -> Rotation:
    """The rotation of a layer with a weight of `shape` [out, in]. `config` is PEFT's, for this layer.

    Raises NotServed for files of versions whose formulas are not those of today, Malformed for blocks that do not fit.
    """
    for part in ("oft_diag", "oft_r", "oft_s"):
        if part in entry.tensors:
            raise NotServed(f"{part} is of an older OFT, whose formulas differed; load and save it with a newer tool")
    if "oft_blocks" in entry.tensors:
        return _lycoris(entry, shape)
    if "boft_R" in entry.tensors:
        return _peft_boft(entry, shape)
    if "oft_R" in entry.tensors:
        return _peft_oft(entry, config, shape)
    raise Malformed(f"{entry.layer} has {', '.join(entry.keys.values())}, and no blocks to rotate by")


def _lycoris(entry: Entry, shape: tuple[int, int]) -> Rotation:
    """Blocks of outputs, [n, b, b], or one such set for each stage of BOFT."""
    blocks = entry.tensors["oft_blocks"].float()
    stages = blocks if blocks.dim() == 4 else blocks[None]
    _check(entry, "oft_blocks", stages, shape[0])
    skew = stages - stages.mT
    limit = number(entry, "alpha") * shape[0] if "alpha" in entry.tensors else 0.0
    norm = float(torch.linalg.vector_norm(skew)) + 1e-8
    if 0 < limit < norm:
        skew = skew * (limit / norm)
    turned = _cayley(-skew)
    if blocks.dim() == 3:
        # its blocks are multiplied from the other side
        made: tuple[Stage, ...] = (Stage(turned[0].mT.contiguous()),)
    else:
        orders = _lycoris_orders(shape[0], turned.shape[2], len(turned))
        made = tuple(Stage(part, order) for part, order in zip(turned, orders, strict=True))
    return Rotation(made, shape, of_inputs=False, rescale=_rescale(entry, "rescale", shape[0]))


def _lycoris_orders(channels: int, size: int, stages: int) -> list[Tensor]:
    """By stage, the channels in the order in which blocks take them: at stage i, pairs that lie 2^i half blocks
    apart.
    """
    numbers, orders = torch.arange(channels), []
    for stage in range(stages):
        reach = 2**stage * (size // 2)
        if not reach or channels % (2 * reach):
            raise Malformed(f"{stages} stages of blocks of {size} do not fit {channels} outputs")
        orders.append(numbers.view(-1, 2, reach).transpose(1, 2).reshape(-1))
    return orders


def _peft_oft(entry: Entry, config: Mapping[str, Any], shape: tuple[int, int]) -> Rotation:
    """Blocks of inputs, [n, b (b - 1) / 2]: what is above the diagonal of each."""
    vectors, inputs = entry.tensors["oft_R"].float(), shape[1]
    if vectors.dim() != 2 or not vectors.numel():
        raise Malformed(f"{entry.keys['oft_R']} is {tuple(vectors.shape)}; PEFT has a row for each block")
    size = round((1 + math.sqrt(1 + 8 * vectors.shape[1])) / 2)
    count = inputs // size if config.get("block_share") else vectors.shape[0]
    if size * (size - 1) // 2 != vectors.shape[1] or count * size != inputs:
        raise Malformed(f"{entry.keys['oft_R']} is {tuple(vectors.shape)}, which are no blocks of {inputs} inputs")
    upper = vectors.new_zeros(vectors.shape[0], size, size)
    rows, columns = torch.triu_indices(size, size, 1)
    upper[:, rows, columns] = vectors
    skew = upper - upper.mT
    if config.get("coft"):
        limit = float(config.get("eps", 6e-5)) / math.sqrt(len(skew))
        norm = torch.linalg.vector_norm(skew, dim=(1, 2), keepdim=True)
        skew = torch.where(norm > limit, skew * (limit / norm.clamp_min(1e-30)), skew)
    if config.get("use_cayley_neumann", False):
        turned = _neumann(skew, int(config.get("num_cayley_neumann_terms", NEUMANN_TERMS)))
    else:
        turned = _cayley(skew)
    return Rotation((Stage(turned.expand(count, size, size).contiguous()),), shape, of_inputs=True)


def _peft_boft(entry: Entry, shape: tuple[int, int]) -> Rotation:
    """Stages of blocks of inputs, [m, n, b, b], and the factors boft_s [out, 1]."""
    stages, inputs = entry.tensors["boft_R"].float(), shape[1]
    stages = stages if stages.dim() == 4 else stages[None]
    _check(entry, "boft_R", stages, inputs)
    turned = _cayley((stages - stages.mT) / 2)
    made = []
    for step, blocks in enumerate(turned):
        order = None
        if len(turned) > 1:
            order = _butterfly(inputs, blocks.shape[0] // 2**step, blocks.shape[1] // 2)
        made.append(Stage(blocks.contiguous(), order))
    return Rotation(tuple(made), shape, of_inputs=True, rescale=_rescale(entry, "boft_s", shape[0]))


def _butterfly(channels: int, groups: int, half: int) -> Tensor:
    """The order in which blocks of 2 * `half` take channels: in each of the groups, first the even runs of `half`
    channels, then the odd ones.
    """
    if not groups or not half or channels % groups or (channels // groups) % (2 * half):
        raise Malformed(f"stages of boft_R with blocks of {2 * half} do not fit {channels} inputs")
    runs = torch.arange(channels).view(groups, -1, half)
    order = torch.cat([runs[:, 0::2], runs[:, 1::2]], 1).reshape(-1)
    # PEFT multiplies by this permutation first, so blocks see what its inverse takes
    return torch.argsort(order)


def _cayley(skew: Tensor) -> Tensor:
    """(I - Q) (I + Q)^-1, for Q [..., b, b]."""
    one = torch.eye(skew.shape[-1])
    solved: Tensor = torch.linalg.solve(one + skew, one - skew, left=False)
    return solved


def _neumann(skew: Tensor, terms: int) -> Tensor:
    """I + 2Q + 2Q^2 + ... + Q^(terms - 1), as PEFT ends the series: the last power counts once."""
    total = torch.eye(skew.shape[-1]).expand_as(skew).clone()
    if terms > 1:
        total += 2 * skew
    if terms > 2:
        power = skew @ skew
        total += 2 * power
        for _ in range(3, terms - 1):
            power = power @ skew
            total += 2 * power
        total += power @ skew
    return total


def _check(entry: Entry, part: str, stages: Tensor, channels: int) -> None:
    """Raises Malformed where stages [m, n, b, b] are no blocks of so many channels."""
    square = stages.dim() == 4 and stages.numel() and stages.shape[2] == stages.shape[3]
    if not square or stages.shape[1] * stages.shape[2] != channels:
        raise Malformed(f"{entry.keys[part]} is {tuple(entry.tensors[part].shape)}, no blocks of {channels} channels")


def _rescale(entry: Entry, part: str, outputs: int) -> Tensor | None:
    if part not in entry.tensors:
        return None
    if (found := entry.tensors[part].float().flatten()).numel() != outputs:
        raise Malformed(f"{entry.keys[part]} has {found.numel()} values; the layer has {outputs} outputs")
    return found
