"""What torchrun tells each process that it starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from omni_grpc.types.ranks import RANK, RENDEZVOUS, WORLD_SIZE

VARIABLES = (RANK, WORLD_SIZE, "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One process of a launch: its number, of how many, its number on its host, and where rank 0 is."""

    rank: int
    world: int
    local_rank: int
    host: str
    port: int

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Launch | None:
        """That of this process; None where it was started without torchrun, by itself, or by a server as its worker."""
        if RENDEZVOUS in environ or not all(environ.get(name) for name in VARIABLES):
            return None
        rank, world, local_rank, host, port = (environ[name] for name in VARIABLES)
        launch = cls(rank=int(rank), world=int(world), local_rank=int(local_rank), host=host, port=int(port))
        return launch if launch.world > 1 else None
