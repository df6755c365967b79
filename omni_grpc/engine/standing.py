"""What an engine holds, and what can be asked of it: nothing here changes anything."""

from __future__ import annotations

import time
from collections.abc import Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine.adapters import Adapters
from omni_grpc.engine.admission import check_loaded, check_open
from omni_grpc.engine.books import Books
from omni_grpc.engine.executor import Executor
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.items import Item
from omni_grpc.engine.replica import Replica
from omni_grpc.engine.status import EngineState, EngineStats, TenantStats
from omni_grpc.engine.submission import Submission
from omni_grpc.resolve.request import check_draft, check_model, check_task
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.resolve.settings import facts_of
from omni_grpc.store.job import Job
from omni_grpc.store.storage import Storage
from omni_grpc.types.errors import Failure
from omni_grpc.types.load_progress import Loading
from omni_grpc.types.plan import Ready
from omni_grpc.types.request import Task
from omni_grpc.types.results import RequestWarning
from omni_grpc.types.spec import Checkpoint


class Standing:
    """The state of one engine. `Engine` is what moves it."""

    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        executors: Sequence[Executor],
        storage: Storage | None = None,
        inputs: InputStore | None = None,
    ) -> None:
        self.config = config
        self.checkpoint = checkpoint
        self.storage = Storage(config) if storage is None else storage
        self.forgotten = self.storage.forgotten
        self.jobs = self.storage.jobs
        self.artifacts = self.storage.artifacts
        self.assets = self.storage.assets
        self.inputs = InputStore(config.limits.input_budget) if inputs is None else inputs
        self.state = EngineState.STARTING
        self.parked = False
        """Whether it sleeps, and no job wakes it."""
        self.last_used = time.monotonic()
        """When it was last given a job, or ended one."""
        self._books = Books(config.scheduler.max_queue, policy=config.scheduler.policy)
        self._replicas = [Replica(number, executor, self._books, config) for number, executor in enumerate(executors)]
        self.adapters = Adapters(self._replicas, config.worker.phase_timeout)

    @property
    def replicas(self) -> Sequence[Replica]:
        return self._replicas

    @property
    def ready(self) -> Ready | None:
        """What the first replica that is ready has told; where none is, what one had told before it was lost."""
        known = [replica for replica in self._replicas if replica.ready is not None]
        return next((replica.ready for replica in known if replica.open), known[0].ready if known else None)

    @property
    def failure(self) -> Failure | None:
        """Why there is no worker at the moment; None while there is one."""
        failures = [replica.failure for replica in self._replicas]
        return None if None in failures else failures[0]

    @property
    def loading(self) -> Loading:
        """Progress of loading, until a worker is ready: that of the first."""
        return self._replicas[0].loading

    @property
    def start_failure(self) -> Failure | None:
        """The failure that kept the first worker from loading."""
        return self.failure if self.ready is None else None

    @property
    def facts(self) -> ServingFacts:
        """The facts by which requests are checked and completed."""
        book, ready = self.adapters.book, self.ready
        usable = None if ready is None else book.usable(ready.found)
        return facts_of(self.config, self.checkpoint, ready, found=usable, faults=book.faults)

    @property
    def ready_warnings(self) -> tuple[RequestWarning, ...]:
        """The worker's warnings, which belong to every reply."""
        return self.ready.warnings if self.ready is not None else ()

    def check(self, model: str, task: Task) -> None:
        """Raises NotFound for a model that is not served (an empty name is), FailedPrecondition (TASK_NOT_SUPPORTED)
        for a task that it is known not to support, and Unavailable (MODEL_LOADING) before it is first loaded.
        """
        check_model(model, self.checkpoint)
        if self.checkpoint.described:
            check_task(model, task, self.checkpoint)
        check_loaded(self.state, self.checkpoint.name, self.loading)

    def check_submission(self, submission: Submission) -> Job | None:
        """Every refusal of `submit` that needs nothing of what is in the media: `draft.inputs` may be placeholders.
        Returns the job that `request_id` had made before, for the same tenant.
        """
        earlier = self.jobs.earlier(submission.request_id, submission.fingerprint, submission.tenant)
        if earlier is None:
            self.check(submission.draft.model, submission.draft.task)
            check_open(self.state, self.failure, parked=self.parked)
            self.storage.journal.check()
            check_draft(submission.draft, self.facts)
            self._books.check_room()
        return earlier

    def held(self, job_id: str) -> Item | None:
        """What is known of a job that waits or runs; None where it has ended."""
        return self._books.items.get(job_id)

    @property
    def running_rows(self) -> int:
        """Rows of the jobs that share steps."""
        return sum(len(item.rows) for item in self._books.active.values() if item.inside)

    def queue_position(self, job: Job) -> int:
        """The number of jobs ahead of this one in the queue; 0 once it has left the queue."""
        return self._books.position(job.id)

    def expected_wait(self, tenant: str) -> float:
        """Seconds until the next waiting job of a tenant leaves the queue, or where none waits, until one that runs
        ends; 0 without either. An upper bound as long as no other job comes and the worker lives, by the cost model and
        what was measured lately.
        """
        first = self._replicas[0]
        # the scheduler counts in predicted milliseconds
        return first.scheduler.expected_wait(tenant, **first.expected_lanes()) * first.scale / 1000

    def stats(self) -> EngineStats:
        return EngineStats(
            queued=self._books.waiting,
            running=len(self._books.active),
            max_queue=self.config.scheduler.max_queue,
            jobs=len(self.jobs),
            artifact_bytes=self.artifacts.size_bytes,
            cost=self._books.cost,
            cost_error=self._replicas[0].meter.cost_error,
            worker_restarts=sum(replica.restarts for replica in self._replicas),
            queue_delay=self._queue_delay(),
            work=self._seconds(self._books.waiting_ms + sum(one.scheduler.work_ms for one in self._replicas)),
            replicas=[replica.stats for replica in self._replicas],
            tenants={tenant: self.tenant_stats(tenant) for tenant in self._books.tenants},
        )

    def _queue_delay(self) -> float | None:
        """Seconds that a job made now would wait, if none comes before it and the predictions hold; None before steps
        were measured.
        """
        if not any(replica.scheduler.is_fitted or replica.meter.step.ms for replica in self._replicas):
            return None
        able = [replica for replica in self._replicas if replica.open and not replica.scheduler.closed]
        if self._books.waiting == 0 and any(replica.scheduler.has_place for replica in able):
            return 0.0
        # all that goes before it, shared among those that work; the last jobs of a replica are behind, not before it
        inside = sum(replica.scheduler.work_before_ms for replica in self._replicas)
        alone = self._seconds(inside + self._books.waiting_ms) / max(1, len(able))
        first = self._replicas[0].scheduler
        return alone if first.exclusive else alone * self._books.sharing(first.max_num_seqs)

    def _seconds(self, predicted_ms: float) -> float:
        return predicted_ms * self._replicas[0].scale / 1000

    def tenant_stats(self, tenant: str) -> TenantStats:
        """What one tenant has here; zeros for one that has nothing."""
        return TenantStats(
            queued=self._books.queue.count(tenant),
            running=self._books.running_of(tenant),
            artifact_bytes=self.artifacts.artifact_bytes(tenant),
            asset_bytes=self.assets.asset_bytes(tenant),
            input_bytes=self.inputs.input_bytes(tenant),
        )
