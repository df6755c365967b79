"""A Ray of this machine alone, for a server that has no cluster: started before its first worker, ended with its last.

A process of its own starts it and holds it, so that a replica whose driver is killed does not take the others along.
It listens on the loopback interface alone, wants a token that only this server's processes know, has no dashboard, and
reports nothing to anybody (Ray's usage statistics are on unless RAY_USAGE_STATS_ENABLED says otherwise).
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import secrets
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import CLOSE_SECONDS, run_body
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.os_errors import plain
from omni_grpc.types.spec import Checkpoint

logger = logging.getLogger(__name__)

KEEPER = "omni_grpc.engine.ray_local:serve"
START_SECONDS = 90.0
ANSWER_SECONDS = 5.0
"""How long the GCS of this machine gets to answer. One that has ended does not come back, as that of a cluster may."""
OBJECT_STORE_BYTES = 256 << 20
"""Shared memory for what is under way between processes. What does not fit goes to the folder of the session."""
USAGE = "RAY_USAGE_STATS_ENABLED"
NICENESS = "RAY_worker_niceness"


class LocalRay:
    """The Ray that `holders` executors share. Its methods block, and may be called from any thread."""

    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, holders: int) -> None:
        self._arguments = (config, checkpoint)
        self._holders = holders
        self._lock = threading.Lock()
        self._process: multiprocessing.process.BaseProcess | None = None
        self._folder = ""
        self._environment: Mapping[str, str] = {}

    @property
    def pid(self) -> int | None:
        """Process id of what holds it; None while there is none."""
        return self._process.pid if self._process is not None else None

    def environment(self) -> Mapping[str, str]:
        """What a driver has to know, as variables. Starts Ray where it does not run, which takes some seconds. Raises
        Unavailable (RAY_NOT_STARTED).
        """
        with self._lock:
            if self._process is None or not self._process.is_alive() or not self._answers():
                self._clear()
                try:
                    self._boot()
                except (OSError, RuntimeError, EOFError) as error:
                    self._clear()
                    message = f"Ray could not be started on this machine: {plain(error)}; see its log"
                    raise Unavailable(message, reason="RAY_NOT_STARTED") from error
            return self._environment

    def hold(self) -> None:
        """Called by an executor that begins again after it has closed."""
        with self._lock:
            self._holders += 1

    def release(self) -> None:
        """Called by each executor as it closes: the last one ends Ray, and returns when it is gone."""
        with self._lock:
            self._holders -= 1
            if self._holders == 0:
                self._clear()

    def _answers(self) -> bool:
        """Whether its GCS is there: what holds Ray notices only after a while that it is not."""
        host, _, port = self._environment["RAY_ADDRESS"].rpartition(":")
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except OSError as error:
            logger.warning("Ray on this machine, at %s:%s, is gone: %s", host, port, plain(error))
            return False
        return True

    def _boot(self) -> None:
        environment = {
            USAGE: os.environ.get(USAGE, "0"),
            # Ray's own default of 15 would let anything else that this machine does starve the workers
            NICENESS: os.environ.get(NICENESS, "0"),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_gcs_rpc_server_reconnect_timeout_s": f"{ANSWER_SECONDS:g}",
            # what Ray calls so is whether nodes have an address that others reach: 0 is the loopback interface
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        }
        # a short one: Ray makes sockets in it, whose paths have at most 107 bytes
        self._folder = tempfile.mkdtemp(prefix="omni-ray-")
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=run_body,
            args=(KEEPER, theirs, *self._arguments, self._folder, environment),
            name="omni_grpc-ray",
            daemon=True,
        )
        self._process.start()
        theirs.close()
        if not self._connection.poll(START_SECONDS):
            raise TimeoutError(f"it was not there after {START_SECONDS:g} s")
        try:
            told: Mapping[str, str] = self._connection.recv()
        except EOFError:
            raise RuntimeError("its process has ended") from None
        if why := told.get("error"):
            raise RuntimeError(why)
        self._environment = {**environment, "RAY_ADDRESS": told["address"]}
        logger.info("started Ray on this machine, at %s, with its files in %s", told["address"], self._folder)

    def _clear(self) -> None:
        if self._process is not None:
            # the end of its pipe is its sign to end
            self._connection.close()
            self._process.join(CLOSE_SECONDS)
            if self._process.is_alive():
                logger.warning("Ray (process %s) did not end within %g s, killing it", self.pid, CLOSE_SECONDS)
                self._process.kill()
                self._process.join()
            self._process = None
        if self._folder:
            _remove(self._folder)
            self._folder = ""


def _remove(folder: str) -> None:
    """Removes the files of a session. What has just been killed may still write its last line."""
    until = time.monotonic() + CLOSE_SECONDS
    while Path(folder).exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.05)
    if Path(folder).exists():
        logger.warning("the files of Ray in %s could not be removed", folder)


def serve(connection: Connection, config: EngineConfig, checkpoint: Checkpoint, folder: str) -> None:
    """Body of the process that holds Ray: sends its address, or why there is none. Ends with its pipe."""
    import ray

    # not of the group that a terminal or a service manager signals: Ray ends when the server says so, after its drain
    os.setsid()
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)  # what Ray starts inherits an ignored signal, and is ended by them
    each = config.model.cpu_threads or 1
    try:
        context = ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            # they share the cores, as worker processes do
            num_cpus=max(os.cpu_count() or 1, config.processes * each),
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=folder,
        )
    except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
        connection.send({"error": f"{type(error).__name__}: {plain(error)}"})
        return
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    connection.send({"address": context.address_info["address"]})
    try:
        with contextlib.suppress(EOFError, OSError):
            connection.recv()
    finally:
        ray.shutdown()
        _remove(folder)
