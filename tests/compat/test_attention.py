"""Attention of [B, S, H, D] with a mask of keys, against torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from omni_grpc.compat import Attention, AttentionMetadata
from omni_grpc.nn.attention import Attention as PackedAttention
from omni_grpc.types.errors import Code, InvalidArgument

MASK = torch.tensor(
    [
        [True, True, True, False, False],  # padding behind
        [False, True, False, True, True],  # holes
        [False] * 5,  # no key at all
        [True] * 5,
    ]
)


def operands(heads: int, kv_heads: int, queries: int, keys: int = 5, size: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = ((4, queries, heads, size), (4, keys, kv_heads, size), (4, keys, kv_heads, size))
    query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
    return query, key, value


def sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool = False) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    keep = None if mask is None else mask[:, None, None].expand(-1, 1, q.shape[2], -1)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=keep, is_causal=causal, scale=0.3, enable_gqa=q.shape[1] != k.shape[1]
    )
    if mask is not None:
        out = out.masked_fill(~mask.any(1)[:, None, None, None], 0.0)
    return out.transpose(1, 2)


@pytest.mark.parametrize("form", ["bool", "int", "4-d"])
@pytest.mark.parametrize("queries", [5, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_a_mask_of_keys_gives_what_torch_gives(heads: int, kv_heads: int, queries: int, form: str) -> None:
    query, key, value = operands(heads, kv_heads, queries)
    attention = Attention(heads, 8, softmax_scale=0.3, num_kv_heads=kv_heads)
    mask = {"bool": MASK, "int": MASK.long(), "4-d": MASK[:, None, None]}[form]
    # what is masked must not count, whatever it is
    key[~MASK], value[~MASK] = float("nan"), float("nan")
    out = attention(query, key, value, attn_metadata=AttentionMetadata(attn_mask=mask))
    expected = sdpa(query, key.nan_to_num(), value.nan_to_num(), MASK)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(out[2], torch.zeros(queries, heads, 8))


@pytest.mark.parametrize(("causal", "queries"), [(False, 5), (False, 2), (True, 5)])
@pytest.mark.parametrize("metadata", [None, AttentionMetadata()])
def test_without_a_mask(causal: bool, queries: int, metadata: AttentionMetadata | None) -> None:
    query, key, value = operands(4, 2, queries)
    out = Attention(4, 8, causal=causal, softmax_scale=0.3, num_kv_heads=2)(query, key, value, metadata)
    torch.testing.assert_close(out, sdpa(query, key, value, None, causal), atol=1e-6, rtol=1e-5)


def test_one_mask_serves_every_row() -> None:
    query, key, value = operands(4, 4, 5)
    out = Attention(4, 8, softmax_scale=0.3)(query, key, value, AttentionMetadata(MASK[1:2]))
    torch.testing.assert_close(out, sdpa(query, key, value, MASK[1:2].expand(4, -1)), atol=1e-6, rtol=1e-5)


def test_the_scale_is_that_of_the_head_size_unless_it_is_given() -> None:
    query, key, value = operands(4, 4, 5)
    given = Attention(4, 8, softmax_scale=8**-0.5)(query, key, value)
    assert torch.equal(Attention(4, 8)(query, key, value), given)
    assert not torch.equal(Attention(4, 8, softmax_scale=0.3)(query, key, value), given)


def test_roles_are_those_of_the_attention_inside() -> None:
    attention = Attention(4, 8, role="mymodel.audio_to_video", role_category="cross", skip_sequence_parallel=True)
    (inside,) = (module for module in attention.modules() if isinstance(module, PackedAttention))
    for one in (attention, inside):
        assert (one.role, one.role_category) == ("mymodel.audio_to_video", "cross")
    assert inside.skip_sequence_parallel
    assert Attention(4, 8).role_category == "self"

    class Doubled(nn.Module):
        def forward(self, q: Tensor, *_: object, **__: object) -> Tensor:
            return 2 * q

    attention.packed = Doubled()  # as a feature replaces it
    query, key, value = operands(4, 4, 5)
    assert torch.equal(attention(query, key, value, AttentionMetadata(MASK)), 2 * query)


@pytest.mark.parametrize(
    ("mask", "causal", "message"),
    [
        (MASK[:, None].expand(4, 5, 5), False, "a mask per query or head is not yet served"),
        (MASK[:, None, None].expand(4, 1, 5, 5), False, "a mask per query or head is not yet served"),
        (MASK[:, :3], False, r"has shape \[4, 3\], expected \[4, 5\]"),
        (MASK[:3], False, r"has shape \[3, 5\]"),
        (MASK.float(), False, "torch.float32, which is not yet served; use bool"),
    ],
)
def test_other_masks_are_refused_by_name(mask: Tensor, causal: bool, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as refused:
        Attention(4, 8, causal=causal)(*operands(4, 4, 5), AttentionMetadata(mask))
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.violations[0].field == "attn_mask"


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2)])
def test_a_mask_beside_causal_leaves_tokens_out(heads: int, kv_heads: int) -> None:
    """Queries that are left out give zeros; the others see the keys that are kept, up to their own."""
    query, key, value = operands(heads, kv_heads, 5)
    key[~MASK], value[~MASK] = float("nan"), float("nan")
    attention = Attention(heads, 8, causal=True, softmax_scale=0.3, num_kv_heads=kv_heads)
    out = attention(query, key, value, AttentionMetadata(MASK))
    q, k, v = (x.transpose(1, 2) for x in (query, key.nan_to_num(), value.nan_to_num()))
    seen = MASK[:, None, None] & torch.ones(5, 5, dtype=torch.bool).tril()
    expected = F.scaled_dot_product_attention(
        q, k, v, attn_mask=seen | torch.eye(5, dtype=torch.bool), scale=0.3, enable_gqa=heads != kv_heads
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected * MASK[:, :, None, None], atol=1e-6, rtol=1e-5)
    with pytest.raises(InvalidArgument, match="together with causal, for 3 queries and 5 keys"):
        attention(query[:, :3], key, value, AttentionMetadata(MASK))


def test_shapes_that_disagree_are_refused() -> None:
    query, key, value = operands(4, 4, 5)
    for wrong in ((query[0], key, value), (query[:2], key, value), (query, key, value[:, :4])):
        with pytest.raises(InvalidArgument, match=r"query, key, value are .*, expected \[B, S, H, D\]"):
            Attention(4, 8)(*wrong)


@pytest.mark.parametrize("field", ["joint_query", "joint_attn_mask"])
def test_joint_sequences_are_refused_by_name(field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"{field} is .*: not yet: concatenate"):
        AttentionMetadata(**{field: torch.zeros(1)})
