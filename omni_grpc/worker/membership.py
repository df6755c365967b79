"""Membership: the place of a worker process among the ranks of its model, and how it meets the others."""

from __future__ import annotations

import datetime
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from omni_grpc.config import EngineConfig
from omni_grpc.nn.mesh import Mesh, join
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.ranks import LISTENER, RANK, RENDEZVOUS, TCP, ParallelSizes

AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Variable of torchrun: whether it has the store of its processes itself."""


class Membership:
    """One rank of `sizes`. All ranks of a group make the same calls in the same order, one at a time."""

    def __init__(
        self, rank: int, sizes: ParallelSizes, rendezvous: str, timeout: float, *, hosts: bool, listener: int | None
    ) -> None:
        """`rendezvous` is a file or an address that none but these ranks use, see types/ranks.py; `timeout` in seconds,
        of each collective. hosts: whether this rank has the store at the address, with `listener` as its socket; None:
        it opens one.
        """
        self.rank, self.sizes = rank, sizes
        self._rendezvous, self._hosts, self._listener = rendezvous, hosts, listener
        self._timeout = datetime.timedelta(seconds=timeout)
        self._mesh: Mesh | None = None

    @classmethod
    def of(cls, config: EngineConfig, environ: Mapping[str, str] = os.environ) -> Membership | None:
        """That of this process; None where the model is in one. The engine ends ranks that are late or silent much
        earlier than a collective gives up (`rank_timeout`, `worker_timeout`), except while they load, at their own
        pace.
        """
        sizes = config.parallel.sizes
        if sizes.world == 1:
            return None
        # more than a phase may take, so that a group is always ended as a whole and never left with a broken collective
        timeout = 2 * config.worker.phase_timeout
        rank, listener = int(environ.get(RANK, "0")), environ.get(LISTENER)
        return cls(
            rank,
            sizes,
            environ.get(RENDEZVOUS, ""),
            timeout,
            # as torch itself does with env://
            hosts=rank == 0 and (listener is not None or environ.get(AGENT_STORE) != "True"),
            listener=None if listener is None else int(listener),
        )

    @property
    def decodes(self) -> bool:
        """Whether this rank decodes: rank 0 does, and those that share its decodes."""
        return self.rank < self.sizes.vae_patch_parallel_size

    @property
    def shares_decodes(self) -> bool:
        return self.sizes.vae_patch_parallel_size > 1

    def join(self, device: torch.device) -> Mesh:
        """Meets the other ranks, once in the life of the process. Raises ConfigError where nobody started others, and
        where some of them have no GPU.
        """
        if self._mesh is None:
            self._mesh = self._join(device)
        return self._mesh

    def leave(self) -> NoReturn:
        """Ends the process at once, when nobody reads what it says any more. It may be in a collective which others
        have left, that could not be ended otherwise.
        """
        if self._rendezvous and not self._rendezvous.startswith(TCP):
            shutil.rmtree(Path(self._rendezvous).parent, ignore_errors=True)
        os._exit(1)

    def _join(self, device: torch.device) -> Mesh:
        world = self.sizes.world
        if not self._rendezvous:
            raise _refused(
                f"make {world} ranks, which a server starts (python -m omni_grpc.serve); here is one process"
            )
        store = self._store()
        store.set(f"device/{self.rank}", device.type)
        kinds = [store.get(f"device/{rank}").decode() for rank in range(world)]
        if len(set(kinds)) > 1:
            lacking = ", ".join(str(rank) for rank, kind in enumerate(kinds) if kind != "cuda")
            raise _refused(
                f"make {world} ranks, and there is no GPU for rank {lacking}; ask for fewer, or --device cpu"
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=self.rank,
            world_size=world,
            timeout=self._timeout,
        )
        return join(self.sizes)

    def _store(self) -> Any:
        """Where ranks leave what the others have to know."""
        if not self._rendezvous.startswith(TCP):
            store = dist.FileStore(self._rendezvous, self.sizes.world)  # type: ignore[attr-defined]
            store.set_timeout(self._timeout)
            return store
        address, _, name = self._rendezvous.removeprefix(TCP).partition("/")
        host, _, port = address.rpartition(":")
        # rank 0 goes on at once: the others may come later, and the model takes longer to load
        shared = dist.TCPStore(  # type: ignore[attr-defined]
            host.strip("[]"),
            int(port),
            is_master=self._hosts,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=self._listener if self._hosts else None,
        )
        return dist.PrefixStore(name, shared)  # type: ignore[attr-defined]


def _refused(rule: str) -> ConfigError:
    return ConfigError(f"the parallel sizes {rule}", violations=(Violation("parallel", rule),))
