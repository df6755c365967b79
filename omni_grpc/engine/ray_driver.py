"""The process between the engine and a worker of Ray: a driver of the cluster, with one placement group and one actor.

It is a process of its own, with the pipe and the signs of life of a local worker, for three reasons:
- Ray ends a driver that has lost the GCS of its cluster, or the Ray node of its machine: that must not be the server.
- When a driver ends, however it does, Ray ends its actors and removes its placement groups. So whatever goes wrong
  with a replica, ending this process cleans up after it, also where nothing answers any more.
- ray, with its threads and its own gRPC, stays out of the server.

Reports are fetched by calls of one method, one call at a time, which answers with all that wait (long polling), and not
by a generator or a queue: an answer is a sign of life too, order needs no numbers, nothing is kept of calls that are
over, and there is no actor in between. Calls go from process to process. What is larger than 100 kB, such as media,
goes through the object stores of the two nodes; nothing goes through the GCS but the request for a place.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from multiprocessing.connection import Connection
from typing import Any

from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import LOCAL_WORKER
from omni_grpc.engine.ray_actor import Arrival, Assignment, RayWorker
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Beat, Broken, Decoded, Died, Order, Plan, Ready, Report
from omni_grpc.types.request import Request
from omni_grpc.types.shared_inputs import read_inputs
from omni_grpc.types.spec import Checkpoint
from omni_grpc.types.version import __version__

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
CLOSE_SECONDS = 6.0
"""How long running work gets to end. After that the actor is killed by Ray, or this process by its executor."""
CONNECT_SECONDS = 30.0
"""How long a cluster gets to answer at all."""
NOT_IMPORTED = "failed to import on the worker"
"""How Ray says that it cannot make an actor on a node, since its class is not there."""
CALLS = 3
"""Most calls at a time: of `feed`, `reports` and `close`, one each."""


def serve(
    connection: Connection, config: EngineConfig, checkpoint: Checkpoint, prefix: str, *, worker: str = LOCAL_WORKER
) -> None:
    """Body of the process. Runs until the engine sends None or is gone."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s ray: %(message)s")
    # Ray prints here what actors print; the server's stdout is for whoever started it
    os.dup2(2, 1)
    # a call after the cluster was left would enter it again
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    lock = threading.Lock()

    def send(report: Report | Beat) -> None:
        with lock:
            connection.send(report)

    replica = _Replica(config, worker, prefix, send)
    replica.start()
    beat = 0.0
    try:
        while True:
            if time.monotonic() >= beat:
                send(Beat())
                beat = time.monotonic() + BEAT_SECONDS
            if not connection.poll(BEAT_SECONDS):
                continue
            if (message := connection.recv()) is None:
                break
            replica.feed(message)
    except (EOFError, OSError) as error:
        logger.info("the engine is gone, ending: %s", "end of file" if isinstance(error, EOFError) else plain(error))
    replica.close()
    logging.shutdown()
    # a thread may wait for a cluster that does not answer, and the interpreter would wait for it
    os._exit(0)


class Ended(Exception):
    """The worker is of no more use."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Replica:
    """One life of a worker: a placement group, an actor in it, and two threads that call its methods."""

    def __init__(self, config: EngineConfig, worker: str, prefix: str, send: Callable[[Report], None]) -> None:
        self._config = config
        self._worker = worker
        self._send = send
        self._names = (f"{prefix}{number}" for number in count())
        self._messages: queue.SimpleQueue[Plan | Order] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._over = False
        """Whether it is closing, or its end has been told."""
        self._connected = False
        self._actor: Any = None
        self._where = "its node"

    def start(self) -> None:
        threading.Thread(target=self._live, name="omni_grpc-ray", daemon=True).start()

    def feed(self, message: Plan | Order) -> None:
        self._messages.put(message)

    def close(self) -> None:
        """Lets running work end, for CLOSE_SECONDS at most, and leaves the cluster, which ends the actor."""
        with self._lock:
            self._over = True
        if not self._connected:
            return
        import ray

        if self._actor is not None:
            try:
                ray.get(self._actor.close.remote(), timeout=CLOSE_SECONDS)
            except ray.exceptions.RayError as error:
                logger.warning("the worker on %s did not close: %s", self._where, _told(error))
        ray.shutdown()

    def _live(self) -> None:
        """Body of the thread that fetches reports."""
        with self._ends():
            self._connect()
            self._actor = self._place()
            arrival: Arrival = self._call(self._actor.start, self._assignment)
            self._where = f"node {arrival.node} (process {arrival.pid})"
            if arrival.version != __version__:
                message = f"{self._where} has omni_grpc {arrival.version}, this server {__version__}; install the same"
                raise Ended(_unusable("RAY_VERSION_MISMATCH", message))
            logger.info("the worker is process %d of node %s", arrival.pid, arrival.node)
            threading.Thread(target=self._feed, name="omni_grpc-feed", daemon=True).start()
            self._fetch()

    def _feed(self) -> None:
        """Body of the thread that hands plans over. The next one goes when the last has been taken: in order."""
        with self._ends():
            while True:
                message = self._messages.get()
                self._call(self._actor.feed, self._filled(message) if isinstance(message, Plan) else message)

    @contextmanager
    def _ends(self) -> Iterator[None]:
        """Tells how a thread ended, once: the executor ends this process then, and Ray the rest."""
        try:
            yield
        except Ended as ended:
            failure = ended.failure
        except OSError as error:
            # of the pipe: those of Ray are told by who calls it
            logger.info("the engine is gone: %s", plain(error))
            return
        except Exception as error:
            logger.exception("the worker of Ray cannot be reached")
            failure = Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=f"Ray: {_told(error)}")
        else:
            return
        self._end(Died(failure=failure))

    def _end(self, died: Died) -> None:
        with self._lock:
            if self._over:
                return
            self._over = True
        try:
            self._send(died)
        except OSError:
            logger.info("the engine is gone, the end of the worker was not told")

    # --- the cluster --------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        import ray

        address = self._config.worker.ray_address or os.environ["RAY_ADDRESS"]

        def failure(why: str) -> Failure:
            message = (
                f"no Ray cluster at {address!r} can be used from this machine: {why}; start a node here with "
                "`ray start`, or check --ray-address"
            )
            return _unusable("RAY_NOT_REACHED", message)

        # Ray itself tries for minutes: what it is at does not end with this, but this process does
        late = failure(f"there was no answer for {CONNECT_SECONDS:g} s")
        watch = threading.Timer(CONNECT_SECONDS, self._end, (Died(failure=late),))
        watch.daemon = True
        watch.start()
        try:
            if ":" in address:
                host, _, port = address.rpartition(":")
                socket.create_connection((host, int(port)), timeout=CONNECT_SECONDS).close()
            # it warns that signals are handled elsewhere, as they are
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            raise Ended(failure(_told(error))) from error
        finally:
            watch.cancel()
        self._connected = True

    def _place(self) -> Any:
        """Waits for a place, and makes an actor there."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        seconds = self._config.worker.ray_placement_timeout
        group = placement_group([bundle])
        if not group.wait(seconds):
            message = (
                f"the Ray cluster had no place for a replica within {seconds:g} s (--ray-placement-timeout): it needs "
                f"{_resources(bundle)} on one node; {_cluster()}; add a node, lower --data-parallel-size or "
                "--cpu-threads, or wait longer"
            )
            raise Ended(_unusable("RAY_NO_PLACE", message))
        # dead is dead: the engine restarts it, and knows what was lost. An answer that was lost is not asked for again
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS}
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
        remote: Any = ray.remote(RayWorker)
        return remote.options(
            num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, **options
        ).remote()

    def _bundle(self) -> dict[str, float]:
        """What a replica takes of a node."""
        import ray

        model = self._config.model
        gpu = model.device == "cuda" or (model.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        device = "cuda" if gpu else "cpu"
        self._assignment = Assignment.of(self._config, device=device, worker=self._worker)
        return {"CPU": float(model.cpu_threads or 1)} | ({"GPU": 1.0} if gpu else {})

    def _call(self, method: Any, *arguments: object, timeout: float | None = None) -> Any:
        """Calls a method of the actor. Raises Ended where it or its node is gone, or it does not answer in time."""
        import ray

        try:
            answer = method.remote(*arguments)
            # the answer first, then its bytes: those of a video may take longer than a worker may be silent
            if timeout is not None and not ray.wait([answer], timeout=timeout, fetch_local=False)[0]:
                message = f"the worker on {self._where} stopped responding for {timeout:g} s and was killed"
                raise Ended(Failure(code=Code.UNAVAILABLE, reason="WORKER_HUNG", message=message))
            return ray.get(answer)
        except ray.exceptions.RayError as error:
            if NOT_IMPORTED in str(error):
                why = re.findall(r"(?:ModuleNotFound|Import|Attribute)Error: .*", str(error))[-1:]
                message = f"a node lacks omni_grpc {__version__} ({' '.join(why)}); install the same on each node"
                raise Ended(_unusable("RAY_VERSION_MISMATCH", message)) from error
            message = f"the worker on {self._where} died: {_told(error)}; the log of that node says more"
            raise Ended(Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message)) from error

    # --- plans and reports --------------------------------------------------------------------------------------------

    def _fetch(self) -> None:
        timeout = None
        while True:
            for report in self._call(self._actor.reports, BEAT_SECONDS, timeout=timeout):
                if isinstance(report, Ready):
                    # until then it imports and loads, and cannot give signs of life
                    timeout = self._config.worker.worker_timeout
                if isinstance(report, Died):
                    self._end(report)
                else:
                    self._send(self._here(report))

    def _here(self, report: Report) -> Report:
        """The report with the bytes of media in blocks of this machine, as a worker here would have put them."""
        if not isinstance(report, Decoded):
            return report
        media = []
        for one in report.media:
            assert one.data.data is not None
            media.append(dataclasses.replace(one, data=shared.put(one.data.data, next(self._names))))
        return dataclasses.replace(report, media=tuple(media))

    def _filled(self, plan: Plan) -> Plan:
        """The plan with the bytes of inputs inside: their blocks are of this machine alone."""
        return dataclasses.replace(plan, admit=tuple(filter(None, map(self._with_inputs, plan.admit))))

    def _with_inputs(self, request: Request) -> Request | None:
        try:
            return dataclasses.replace(request, inputs=read_inputs(request.inputs))
        except OSError as error:
            # its job has ended, or somebody clears the mount; the worker would have said the same
            message = f"an input of {request.id} is gone: {plain(error)}"
            failure = Failure(code=Code.INTERNAL, reason="WORKER_ERROR", message=message)
            self._send(Broken(id=request.id, phase="prepare", failure=failure))
            return None


def _unusable(reason: str, message: str) -> Failure:
    return Failure(code=Code.UNAVAILABLE, reason=reason, message=message)


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _cluster() -> str:
    """What the cluster has, in words."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = ", ".join(f"{node['NodeManagerAddress']} with {_resources(node['Resources'])}" for node in nodes)
    return f"the cluster has {len(nodes)} node(s): {each}; {_resources(ray.available_resources())} are free"


def _told(error: BaseException) -> str:
    """What an error of Ray says, on one line: of a dead actor the cause alone, without ids and guesses."""
    text = " ".join(plain(error).split())
    if cause := re.search(r"The actor (?:is dead|died) because (.+?)(?:\. |\.?$)", text):
        kind = re.search(r"Worker exit type: (\w+)", text)
        return cause[1] + (f" ({kind[1]})" if kind else "")
    if cause := re.search(r"is temporarily unavailable: (?:RpcError: )?(.+?)(?: rpc_code|$)", text):
        return f"its node cannot be reached ({cause[1]})"
    return text[:400].rstrip(".") or type(error).__name__
