"""How far a worker is with the weights of its model."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from omni_grpc.checkpoint import sizes
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.os_errors import plain
from omni_grpc.worker.base import RunnerContext

logger = logging.getLogger(__name__)


class Progress:
    """Tells how far loading is: as each component begins, the bytes of those before it."""

    def __init__(self, setting: RunnerContext) -> None:
        self._tell = setting.tell
        try:
            found: Sequence[sizes.ComponentSize] = sizes.parts(
                setting.checkpoint, sizes.headers(setting.checkpoint.path)
            )
        except (CheckpointError, OSError) as error:
            # whoever reads the weights says what is wrong with them, if anything is
            logger.info("how many bytes there are to load is not known: %s", plain(error))
            found = ()
        self._sizes = {part.name: part.stored_bytes for part in found}
        self._begun: list[str] = []

    def begin(self, component: str) -> None:
        done = sum(self._sizes.get(name, 0) for name in self._begun)
        self._begun.append(component)
        self._tell(Loading(component=component, done_bytes=done, total_bytes=sum(self._sizes.values())))
