"""The main function of a worker process: plans come in through a pipe, reports go out through it."""

from __future__ import annotations

import logging
import threading
import time
from multiprocessing.connection import Connection

from omni_grpc.config import EngineConfig
from omni_grpc.types.library_logs import quiet_libraries
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Beat, Died, Plan, Report
from omni_grpc.types.spec import Checkpoint
from omni_grpc.worker.failure import failure
from omni_grpc.worker.vitals import Looker
from omni_grpc.worker.worker import Worker

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str) -> None:
    """Runs until the engine sends None or is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s worker: %(message)s")
    quiet_libraries()
    lock = threading.Lock()

    def send(report: Report | Beat) -> None:
        # the lanes report from threads of their own
        with lock:
            connection.send(report)

    worker = Worker(config, checkpoint, send, prefix)
    worker.start()
    looker = Looker(worker.vitals)
    looker.start()
    beat = 0.0
    try:
        while True:
            # this thread does no work of its own: while the process lives and the interpreter runs, it beats
            if time.monotonic() >= beat:
                send(Beat(looker.newest))
                beat = time.monotonic() + BEAT_SECONDS
            if not connection.poll(BEAT_SECONDS):
                continue
            if (plan := connection.recv()) is None:
                break
            if isinstance(plan, Plan):
                worker.submit(plan)
            else:
                worker.order(plan)
    except (EOFError, OSError) as error:
        # an end of file, also in the middle of a message, or nobody who reads
        logger.info("the engine is gone, ending: %s", "end of file" if isinstance(error, EOFError) else plain(error))
        looker.stop()
        worker.abandon()
        return
    except Exception as error:  # noqa: BLE001 - without this thread the worker is of no use, and the engine is told why
        send(Died(failure=failure(error, "reading a plan")))
    looker.stop()
    worker.close()
