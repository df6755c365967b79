"""Attention: the seam that attention backends, sequence parallel and Ulysses replace or wrap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from omni_grpc.config.backends import AUTO, Use
from omni_grpc.nn.coming import Begun, there
from omni_grpc.nn.rows import JOINT, Rows, Stream
from omni_grpc.ops.attention import candidate_kernels, use_of, varlen_attention
from omni_grpc.ops.attention_choice import taken
from omni_grpc.ops.attention_kernels import Offsets
from omni_grpc.ops.attention_parts import AttentionPart, attend_part


class Attention(nn.Module):
    """Softmax attention of packed rows. It has no weights: it is a module so that a feature can find it by name.

    `num_kv_heads` below `num_heads` is grouped-query attention; `softmax_scale` defaults to head_size ** -0.5; `causal`
    is defined in `ops.attention`. `role`, `role_category` and `skip_sequence_parallel` change nothing here: they say
    what the attention is for ("self", "cross", ...), and are what a feature matches on when it chooses a backend for
    some of a model's attentions and not for others. `backend` is that choice, a name of `config.backends`, with or
    without a form.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        num_kv_heads: int | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        role: str = "self",
        role_category: str | None = None,
        skip_sequence_parallel: bool = False,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.softmax_scale = head_size**-0.5 if softmax_scale is None else softmax_scale
        self.causal = causal
        self.role = role
        self.role_category = role if role_category is None else role_category
        self.skip_sequence_parallel = skip_sequence_parallel
        self.backend = AUTO
        if num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """Self attention over stream `over`, or with `kv` cross attention from `over` to that stream.

        q: [T, num_heads, head_size]; k, v: [T_kv, num_kv_heads, head_size]. Returns the shape of q.
        """
        return self.attend(q, k, v, rows.stream(over), rows.stream(kv or over))

    def begin(
        self, q: Tensor, k: Tensor, v: Tensor | Begun, rows: Rows, over: str = JOINT, kv: str | None = None
    ) -> Begun:
        """Begins `forward`, and returns what gives its result. Where that takes waiting, other work can be done before
        it is called; here, nothing is waited for, and it is computed at once. v may be what `begin_values` returned.
        """
        return there(self(q, k, v if isinstance(v, Tensor) else v(), rows, over, kv))

    def begin_values(self, v: Begun, rows: Rows, over: str = JOINT) -> Begun | None:
        """Begins what self attention of stream `over` does with its values alone, which v gives [T, num_kv_heads,
        head_size], for `begin` to go on with. None: there is nothing to begin, and v was not called.
        """
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, queries: Stream, keys: Stream) -> Tensor:
        """`forward`, given how the rows of q [T, num_heads, head_size] are packed (`queries`) and those of k and v
        [T_kv, num_kv_heads, head_size] (`keys`).
        """
        return varlen_attention(
            q,
            k,
            v,
            queries.cu,
            keys.cu,
            queries.longest,
            keys.longest,
            self.softmax_scale,
            self.causal,
            self.backend,
            queries.host,
            keys.host,
        )

    def attend_part(self, q: Tensor, k: Tensor, v: Tensor, queries: Stream, keys: Stream) -> AttentionPart:
        """What q [T, num_heads, head_size] gets of a part of its keys, k and v [T_kv, num_kv_heads, head_size], to be
        merged with the others; not causal. Raises ConfigError for a backend that computes no parts.
        """
        offsets = Offsets(
            cu_q=queries.cu,
            cu_k=keys.cu,
            longest_q=queries.longest,
            longest_k=keys.longest,
            host_q=queries.host,
            host_k=keys.host,
        )
        return attend_part(q, k, v, offsets, self.softmax_scale, self.backend, self.uses(q.device, q.dtype))

    def computed_by(self, rows: Rows) -> Attention | None:
        """The attention that receives the heads of all these rows unchanged; None where a wrapper casts them, splits
        the rows or moves tokens between ranks.
        """
        return self

    def candidates(self, device: torch.device, dtype: torch.dtype) -> tuple[str, ...]:
        """The kernels that can compute it on this device for heads of this dtype, the preferred one first."""
        grouped = self.num_heads != self.num_kv_heads
        return candidate_kernels(self.backend, device, dtype, self.head_size, self.causal, grouped)

    def uses(self, device: torch.device, dtype: torch.dtype) -> Use:
        """What it requires of a backend on this device, for heads of this dtype."""
        grouped = self.num_heads != self.num_kv_heads
        return use_of(device, dtype, self.head_size, causal=self.causal, grouped=grouped)

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        """The backends that it runs on, on this device and for heads of this dtype."""
        heads = f"{self.num_heads}x{self.num_kv_heads}x{self.head_size}"
        named = self.candidates(device, dtype)
        return taken(named, device, str(dtype).removeprefix("torch."), heads, self.causal)

    def extra_repr(self) -> str:
        return f"{self.num_heads} x {self.head_size}, kv {self.num_kv_heads}, role={self.role}"


class AttentionWrapper(Attention):
    """Around another attention, `inner`, with its shape and its role: what wrappers inherit passes everything on."""

    def __init__(self, inner: Attention) -> None:
        super().__init__(
            inner.num_heads,
            inner.head_size,
            inner.num_kv_heads,
            inner.softmax_scale,
            inner.causal,
            inner.role,
            inner.role_category,
            inner.skip_sequence_parallel,
        )
        self.inner = inner

    def forward(self, q: Tensor, k: Tensor, v: Tensor, rows: Rows, over: str = JOINT, kv: str | None = None) -> Tensor:
        """Calls `inner`: q [T, num_heads, head_size], k and v [T_kv, num_kv_heads, head_size] -> the shape of q."""
        out: Tensor = self.inner(q, k, v, rows, over, kv)
        return out

    def computed_by(self, rows: Rows) -> Attention | None:
        return self.inner.computed_by(rows)

    def runs_on(self, device: torch.device, dtype: torch.dtype) -> list[str]:
        return self.inner.runs_on(device, dtype)


def leaves(module: nn.Module) -> list[tuple[str, Attention]]:
    """The innermost attentions of a module by name: those that wrap no other one."""
    found = [(name, part) for name, part in module.named_modules() if isinstance(part, Attention)]
    return [(name, part) for name, part in found if not any(isinstance(child, Attention) for child in part.children())]


def outermost(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Attention]]:
    """The attentions of a module by name that no other one wraps."""
    for name, child in module.named_children():
        if isinstance(child, Attention):
            yield prefix + name, child
        else:
            yield from outermost(child, f"{prefix}{name}.")


def in_use(module: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, dict[str, None]]:
    """The backends that the attentions of a module run on, for inputs of that dtype: role -> backends, each once."""
    found: dict[str, dict[str, None]] = {}
    for _, attention in outermost(module):
        found.setdefault(attention.role, {}).update(dict.fromkeys(attention.runs_on(device, dtype)))
    return found


def described(found: Mapping[str, Iterable[str]]) -> str:
    """As text: one name where all roles have the same backends, else role by role."""
    each = {role: " + ".join(backends) for role, backends in sorted(found.items())}
    alike = set(each.values())
    return alike.pop() if len(alike) == 1 else ", ".join(f"{role}: {names}" for role, names in each.items())
