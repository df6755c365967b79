"""vLLM-Omni's attention of [B, S, H, D] tensors, over ours of packed rows."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from omni_grpc.compat.fields import check, only
from omni_grpc.nn.attention import Attention as PackedAttention
from omni_grpc.nn.rows import LayoutCache, Row, Rows
from omni_grpc.types.errors import InvalidArgument, Violation

JOINED = "not yet: concatenate the two sequences, and their masks"


@dataclasses.dataclass
class AttentionMetadata:
    """What attention is told besides its tensors. `attn_mask`: [B, S_k] or [B, 1, 1, S_k], bool or 0 and 1, where True
    keeps a key. Raises InvalidArgument for what cannot be done, by name.
    """

    attn_mask: Tensor | None = None
    joint_attn_mask: Tensor | None = only(None, JOINED)
    joint_query: Tensor | None = only(None, JOINED)
    joint_key: Tensor | None = only(None, JOINED)
    joint_value: Tensor | None = only(None, JOINED)
    joint_strategy: str = only("front", JOINED)

    def __post_init__(self) -> None:
        check(self, InvalidArgument)


class Attention(nn.Module):
    """Softmax attention of a batch. What the mask leaves out of the keys is not computed: rows are packed by it.

    Inside is one `omni_grpc.nn.attention.Attention`, which features find and replace by name and role as they do in any
    model.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        causal: bool = False,
        softmax_scale: float | None = None,
        num_kv_heads: int | None = None,
        role: str = "self",
        role_category: str | None = None,
        skip_sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.role = role
        self.role_category = role if role_category is None else role_category
        self.causal = causal
        self.packed = PackedAttention(
            num_heads, head_size, num_kv_heads, softmax_scale, causal, role, role_category, skip_sequence_parallel
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attn_metadata: AttentionMetadata | None = None
    ) -> Tensor:
        """query: [B, S_q, num_heads, head_size]; key, value: [B, S_k, num_kv_heads, head_size]. The shape of query.

        Every query gets its output, padding too; where the mask leaves a row no key, zeros. A mask is read on the host,
        which synchronises a CUDA device. With `causal`, the last query sees all keys, see `ops.attention`; with a mask
        besides, queries are the tokens that keys are, and one that the mask leaves out gives zeros. Raises
        InvalidArgument for other shapes, and for a mask that is not of keys.
        """
        if query.dim() != 4 or key.dim() != 4 or key.shape != value.shape or key.shape[0] != query.shape[0]:
            shapes = ", ".join(str(list(x.shape)) for x in (query, key, value))
            raise _refused(
                "query, key, value",
                f"are {shapes}, expected [B, S, H, D] with the same B, and the same shape for key and value",
            )
        batch, queries = query.shape[:2]
        mask = None if attn_metadata is None else attn_metadata.attn_mask
        if mask is None:
            q, k, v = (x.flatten(0, 1) for x in (query, key, value))
            return self._attend(q, k, v, [queries] * batch, [key.shape[1]] * batch).reshape(query.shape)
        keep = self._keep(mask, batch, key.shape[1], queries)
        counts: list[int] = keep.sum(1).tolist()
        if not self.causal:
            out = self._attend(query.flatten(0, 1), key[keep], value[keep], [queries] * batch, counts)
            return out.reshape(query.shape)
        # the order among those that are kept is the order that causal means
        spread = torch.zeros_like(query)
        spread[keep] = self._attend(query[keep], key[keep], value[keep], counts, counts)
        return spread

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, queries: list[int], keys: list[int]) -> Tensor:
        """Packed, with so many queries and keys in each row."""
        rows = Rows(
            [(None, "cond")] * len(keys),
            [Row.of(query=n, key=m) for n, m in zip(queries, keys, strict=True)],
            LayoutCache(q.device, capacity=1),
        )
        out: Tensor = self.packed(q, k, v, rows, over="query", kv="key")
        return out

    def _keep(self, mask: Tensor, batch: int, keys: int, queries: int) -> Tensor:
        """The mask as bool [B, S_k]."""
        if self.causal and queries != keys:
            raise _refused(
                "attn_mask",
                f"is set together with causal, for {queries} queries and {keys} keys: their numbers must be equal",
            )
        if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
            mask = mask[:, 0, 0]
        if mask.dim() != 2 or mask.shape[0] not in (1, batch) or mask.shape[1] != keys:
            raise _refused(
                "attn_mask",
                f"has shape {list(mask.shape)}, expected [{batch}, {keys}] or [{batch}, 1, 1, {keys}]; a mask per "
                "query or head is not yet served",
            )
        if mask.is_floating_point():
            raise _refused("attn_mask", f"is {mask.dtype}, which is not yet served; use bool, True where a key is kept")
        return mask.to(torch.bool).expand(batch, keys)


def _refused(field: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {why}", reason="NOT_SUPPORTED", violations=(Violation(field, why),))
