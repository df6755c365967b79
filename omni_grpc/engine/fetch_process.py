"""The body of the process that fetches a model of the hub before a worker loads it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

from omni_grpc.checkpoint.download_progress import ProgressLog, Transfer
from omni_grpc.checkpoint.hub import discard_unfinished
from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig, start_logging
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.types.errors import OmniError
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.plan import Died, Fetched
from omni_grpc.types.spec import Checkpoint


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Reports Loading, then Fetched, or Died with the reason. Ends at once when the engine sends None or is gone."""
    start_logging(config.logs, "download")
    for name in ("httpx", "httpx2"):  # the client of huggingface_hub: a line for each request
        logging.getLogger(name).setLevel(logging.WARNING)
    threading.Thread(target=_obey, args=(connection,), daemon=True).start()

    try:
        found = open_told(config, connection.send)
    except OmniError as error:
        connection.send(Died(failure=error.failure))
    else:
        connection.send(Fetched(checkpoint=found))


def open_told(config: EngineConfig, tell: Callable[[Loading], None]) -> Checkpoint:
    """The checkpoint of a model of the hub, which is downloaded first; `tell` gets the progress. Raises OmniError."""
    log = ProgressLog()

    def apply(found: Checkpoint) -> Checkpoint:
        return apply_settings(config, found)

    def progress(it: Transfer) -> None:
        log(it)
        tell(
            Loading(
                phase=LoadPhase.DOWNLOADING,
                component=it.component,
                file=it.file,
                done_bytes=it.all_done,
                total_bytes=it.all_total,
            )
        )

    return open_model(config.model, apply=apply, progress=progress)


def _obey(connection: Connection) -> None:
    """Ends the process, whatever its threads are waiting for, when something comes or nothing can come any more."""
    try:
        # an end of file shows as EOFError or, in the middle of a message, as OSError
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
    finally:
        discard_unfinished()
        os._exit(0)
