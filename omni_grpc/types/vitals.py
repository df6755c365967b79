"""How a worker process is, as it says itself."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterMemory:
    """What LoRA adapters have of one memory: `host`, `device`, or `merged`, weights with adapters merged into them.
    `limit_bytes`: the most that they may have; `evictions`: how many went so that others fit, since the model was
    loaded.
    """

    name: str
    used_bytes: int
    limit_bytes: int
    evictions: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """Memory in bytes. `resident_bytes`: the process's in the host. `device`: what it computes on, such as "cuda:0";
    "" until that is known. `device_used_bytes` of `device_total_bytes` are taken on it, by whichever process; for a CPU
    these are the host's, or those of its container. `graph_captures`, `graph_replays`: CUDA graphs that were captured
    and launched since the model was loaded. `kernels`: pairs of an op and a kernel that was chosen for it, for ops that
    have several. `adapters`: what LoRA adapters have of each memory that is bounded for them.
    """

    resident_bytes: int
    device: str = ""
    device_used_bytes: int = 0
    device_total_bytes: int = 0
    graph_captures: int = 0
    graph_replays: int = 0
    kernels: tuple[tuple[str, str], ...] = ()
    adapters: tuple[AdapterMemory, ...] = ()
