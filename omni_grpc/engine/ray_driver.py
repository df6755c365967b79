"""The process between the engine and a worker of Ray: a driver of the cluster, with one placement group and one actor,
or one for each rank of its model. Ranks answer through it as one, once they agree, and end with the first that ends.

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
from pathlib import Path
from typing import Any

from omni_grpc.checkpoint.adapter_file import CONFIG
from omni_grpc.config import EngineConfig, start_logging
from omni_grpc.engine.agreement import LAST_WORDS_SECONDS, Agreement, is_lost_adapter, is_lost_decode, name_of, of_rank
from omni_grpc.engine.assignment import Assignment, Seat
from omni_grpc.engine.executor import LOCAL_WORKER
from omni_grpc.engine.ray_actor import Arrival, RayWorker
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.os_errors import plain
from omni_grpc.types.plan import Beat, Broken, Decoded, Died, LoadAdapter, Order, Plan, Ready, Report, UnloadAdapter
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
    start_logging(config.logs, "ray")
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


@dataclasses.dataclass(eq=False, slots=True)
class _Rank:
    """One actor, and what waits to be handed to it. who: how messages call it."""

    number: int
    who: str
    actor: Any
    where: str = "its node"
    messages: queue.SimpleQueue[Plan | Order] = dataclasses.field(default_factory=queue.SimpleQueue)

    @property
    def place(self) -> str:
        return f"{self.who} on {self.where}"


class _Replica:
    """One life of a worker: a placement group, an actor in it for each rank, and two threads that call the methods of
    each.
    """

    def __init__(self, config: EngineConfig, worker: str, prefix: str, send: Callable[[Report], None]) -> None:
        self._config = config
        self._worker = worker
        self._send = send
        self._names = (f"{prefix}{number}" for number in count())
        self._lock = threading.Lock()
        self._over = False
        """Whether it is closing, or its end has been told."""
        self._connected = False
        self._world = config.parallel.sizes.world
        self._ranks: list[_Rank] = []
        self._hearing = threading.Lock()
        self._last_words: Died | None = None
        self._agreement = Agreement(
            self._world,
            decoding=config.parallel.vae_patch_parallel_size,
            timeout=config.ranks.rank_timeout,
            later=self._later,
            agreed=self._on_agreed,
            # one that has said why it ends is late after that with all that the others do
            end=lambda failure: self._end(self._last_words or Died(failure=failure)),
        )

    def start(self) -> None:
        threading.Thread(target=self._live, name="omni_grpc-ray", daemon=True).start()

    def feed(self, message: Plan | Order) -> None:
        """To every rank, in order. The bytes of inputs are read here: their blocks are of this machine alone."""
        self._hand_out(self._filled(message) if isinstance(message, Plan) else message)

    def close(self) -> None:
        """Lets running work end, for CLOSE_SECONDS at most, and leaves the cluster, which ends the actors."""
        with self._lock:
            self._over = True
        if not self._connected:
            return
        import ray

        for rank in self._ranks[:1]:
            # when the first one is done, nobody needs the others
            try:
                ray.get(rank.actor.close.remote(), timeout=CLOSE_SECONDS)
            except ray.exceptions.RayError as error:
                logger.warning("%s did not close: %s", rank.place, _told(error))
        ray.shutdown()

    def _live(self) -> None:
        """Body of a thread: it ends when each rank has two of its own."""
        with self._ends():
            self._connect()
            self._ranks, assignments = self._placed()
            for rank, assignment in zip(self._ranks, assignments, strict=True):
                arrival: Arrival = self._call(rank, rank.actor.start, assignment)
                rank.where = where = f"node {arrival.node} (process {arrival.pid})"
                if arrival.version != __version__:
                    message = f"{where} has omni_grpc {arrival.version}, this server {__version__}; install the same"
                    raise Ended(_unusable(reason="RAY_VERSION_MISMATCH", message=message))
                logger.info("%s is process %d of node %s", rank.who, arrival.pid, arrival.node)
                for body, name in ((self._feed, "feed"), (self._fetch, "fetch")):
                    threading.Thread(target=body, args=(rank,), name=f"omni_grpc-{name}", daemon=True).start()

    def _feed(self, rank: _Rank) -> None:
        """Body of the thread that hands plans over. The next one goes when the last has been taken: in order."""
        with self._ends():
            while True:
                message = rank.messages.get()
                if isinstance(message, LoadAdapter):
                    message = self._with_file(rank, message)
                self._call(rank, rank.actor.feed, message)

    def _with_file(self, rank: _Rank, order: LoadAdapter) -> LoadAdapter:
        """The order with a path of the actor's machine, to which the file goes where it is not there."""
        if self._call(rank, rank.actor.has_file, order.path, order.sha256):
            return order
        path = Path(order.path)
        try:
            files = {one.name: one.read_bytes() for one in (path, path.parent / CONFIG) if one == path or one.is_file()}
        except OSError as error:
            # the worker says the same of its own machine
            logger.warning("the file of adapter %s cannot be sent: %s", order.id, plain(error))
            return order
        logger.info("sending adapter %s to %s: %d bytes", order.id, rank.place, sum(map(len, files.values())))
        kept: str = self._call(rank, rank.actor.keep_file, order.uid, path.name, files)
        return dataclasses.replace(order, path=kept)

    def _fetch(self, rank: _Rank) -> None:
        """Body of the thread that fetches reports."""
        timeout = None
        with self._ends():
            while True:
                for report in self._call(rank, rank.actor.reports, BEAT_SECONDS, timeout=timeout):
                    if isinstance(report, Ready):
                        # until then it imports and loads, and cannot give signs of life
                        timeout = self._config.worker.worker_timeout
                    if isinstance(report, Died):
                        self._on_died(rank, report)
                    else:
                        with self._hearing:
                            self._agreement.hear(rank.number, report)

    def _on_died(self, rank: _Rank, report: Died) -> None:
        """A rank that gives up may do so because another one is gone, whose end Ray tells a moment later."""
        if self._world == 1:
            self._end(report)
            return
        told = dataclasses.replace(report, failure=of_rank(rank.number, self._world, report.failure))
        self._last_words = self._last_words or told
        threading.Timer(LAST_WORDS_SECONDS, self._end, (told,)).start()

    def _on_agreed(self, report: Report) -> None:
        if self._world > 1 and is_lost_decode(report):
            self._hand_out(Plan(drop=(report.id,)))
        if self._world > 1 and is_lost_adapter(report):
            self._hand_out(UnloadAdapter(uid=report.uid))
        self._send(self._here(report))

    def _hand_out(self, message: Plan | Order) -> None:
        for rank in self._ranks:
            rank.messages.put(message)

    def _later(self, seconds: float, call: Callable[[], None]) -> threading.Timer:
        """Has something called as `Agreement` wants it: never beside one of its other calls."""

        def alone() -> None:
            with self._hearing:
                call()

        timer = threading.Timer(seconds, alone)
        timer.daemon = True
        timer.start()
        return timer

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
            return _unusable(reason="RAY_NOT_REACHED", message=message)

        # Ray itself tries for minutes: what it is at does not end with this, but this process does
        late = failure(f"there was no answer for {CONNECT_SECONDS:g} s")
        watch = threading.Timer(CONNECT_SECONDS, self._end, (Died(failure=late),))
        watch.daemon = True
        watch.start()
        try:
            if ":" in address:
                host, _, port = address.rpartition(":")
                socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
            # it warns that signals are handled elsewhere, as they are
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(address=address, logging_level=logging.ERROR, log_to_driver=True)
        except (ray.exceptions.RayError, OSError, RuntimeError, ValueError) as error:
            raise Ended(failure(_told(error))) from error
        finally:
            watch.cancel()
        self._connected = True

    def _placed(self) -> tuple[list[_Rank], list[Assignment]]:
        """The actors where there was room, and what they are to be. Raises Ended."""
        import ray

        try:
            return self._place()
        except ray.exceptions.RayError as error:
            message = f"the Ray cluster stopped answering while it was asked for a place: {_told(error)}"
            raise Ended(_unusable(reason="RAY_NOT_REACHED", message=message)) from error

    def _place(self) -> tuple[list[_Rank], list[Assignment]]:
        """Waits for a place, and makes the actors there: ranks on one node where that has room for all of them, else on
        as few as Ray finds.
        """
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle()
        seconds = self._config.worker.ray_placement_timeout
        group = placement_group([bundle] * self._world, strategy="PACK")
        if not group.wait(seconds):
            each = f"for each of {self._world} ranks " if self._world > 1 else ""
            message = (
                f"the Ray cluster had no place for a replica within {seconds:g} s (--ray-placement-timeout): it needs "
                f"{each}{_resources(bundle)} on one node; {_cluster()}; add a node, lower --data-parallel-size or "
                "--cpu-threads, or wait longer"
            )
            raise Ended(_unusable(reason="RAY_NO_PLACE", message=message))
        # dead is dead: the engine restarts it, and knows what was lost. An answer that was lost is not asked for again
        options = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": CALLS}
        remote: Any = ray.remote(RayWorker)
        bundles, host = _by_node(group)
        ranks = []
        for number, index in enumerate(bundles):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            actor = remote.options(
                num_cpus=bundle["CPU"], num_gpus=bundle.get("GPU", 0), scheduling_strategy=strategy, **options
            ).remote()
            who = "the worker" if self._world == 1 else name_of(number, self._world)
            ranks.append(_Rank(number, who, actor))
        if self._world == 1:
            return ranks, [self._assignment]
        port = self._call(ranks[0], ranks[0].actor.listen, host)
        seats = [Seat(rank=rank.number, world=self._world, host=host, port=port) for rank in ranks]
        return ranks, [dataclasses.replace(self._assignment, seat=seat) for seat in seats]

    def _bundle(self) -> dict[str, float]:
        """What a replica, or a rank of it, takes of a node."""
        import ray

        model = self._config.model
        gpu = model.device == "cuda" or (model.device == "auto" and ray.cluster_resources().get("GPU", 0) > 0)
        device = "cuda" if gpu else "cpu"
        self._assignment = Assignment.of(self._config, device=device, worker=self._worker)
        return {"CPU": float(model.cpu_threads or 1)} | ({"GPU": 1.0} if gpu else {})

    def _call(self, rank: _Rank, method: Any, *arguments: object, timeout: float | None = None) -> Any:
        """Calls a method of an actor. Raises Ended where it or its node is gone, or it does not answer in time."""
        import ray

        try:
            answer = method.remote(*arguments)
            # the answer first, then its bytes: those of a video may take longer than a worker may be silent
            if timeout is not None and not ray.wait([answer], timeout=timeout, fetch_local=False)[0]:
                message = f"{rank.place} stopped responding for {timeout:g} s and was killed"
                raise Ended(Failure(code=Code.UNAVAILABLE, reason="WORKER_HUNG", message=message))
            return ray.get(answer)
        except ray.exceptions.RayError as error:
            if NOT_IMPORTED in str(error):
                why = re.findall(r"(?:ModuleNotFound|Import|Attribute)Error: .*", str(error))[-1:]
                message = f"a node lacks omni_grpc {__version__} ({' '.join(why)}); install the same on each node"
                raise Ended(_unusable(reason="RAY_VERSION_MISMATCH", message=message)) from error
            message = f"{rank.place} died: {_told(error)}; the log of that node says more"
            raise Ended(Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message=message)) from error

    # --- plans and reports --------------------------------------------------------------------------------------------

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
        """The plan with the bytes of inputs inside."""
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


def _unusable(*, reason: str, message: str) -> Failure:
    return Failure(code=Code.UNAVAILABLE, reason=reason, message=message)


def _resources(found: dict[str, float]) -> str:
    return " and ".join(f"{found.get(name, 0):g} {name}" for name in ("CPU", "GPU"))


def _cluster() -> str:
    """What the cluster has, in words."""
    import ray

    nodes = [node for node in ray.nodes() if node["Alive"]]
    each = ", ".join(f"{node['NodeManagerAddress']} with {_resources(node['Resources'])}" for node in nodes)
    return f"the cluster has {len(nodes)} node(s): {each}; {_resources(ray.available_resources())} are free"


def _by_node(group: Any) -> tuple[list[int], str]:
    """The bundles of a placement group in the order of ranks, those of one node together since neighbors talk most; and
    the address of the node of the first one.
    """
    import ray
    from ray.util.placement_group import placement_group_table

    nodes: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
    first = {node: min(bundle for bundle in nodes if nodes[bundle] == node) for node in nodes.values()}
    bundles = sorted(nodes, key=lambda bundle: (first[nodes[bundle]], bundle))
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return bundles, addresses[nodes[bundles[0]]]


def _told(error: BaseException) -> str:
    """What an error of Ray says, on one line: of a dead actor the cause alone, without ids and guesses."""
    text = " ".join(plain(error).split())
    if cause := re.search(r"The actor (?:is dead|died) because (.+?)(?:\. |\.?$)", text):
        kind = re.search(r"Worker exit type: (\w+)", text)
        return cause[1] + (f" ({kind[1]})" if kind else "")
    if cause := re.search(r"is temporarily unavailable: (?:RpcError: )?(.+?)(?: rpc_code|$)", text):
        return f"its node cannot be reached ({cause[1]})"
    return text[:400].rstrip(".") or type(error).__name__
