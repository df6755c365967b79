"""An executor whose worker is the test: it records plans and delivers the reports it is told to."""

import io

import PIL.Image

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, Submission
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Code, Failure, Unavailable
from omni_grpc.types.plan import Broken, Decoded, Died, Media, Order, Plan, Prepared, Ready, RequestStep, Stepped
from omni_grpc.types.request import Draft
from tests.toy import toy_checkpoint

READY = Ready(pid=1, device="cpu", dtype="float32", load_seconds=0.1, weight_bytes=10)


class ManualExecutor:
    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.orders: list[Order] = []
        self.closed = False
        self.starts = 0
        self.kills = 0
        self.gone = False

    def start(self, deliver) -> None:
        self.deliver = deliver
        self.starts += 1
        self.gone = False

    def kill(self) -> None:
        self.kills += 1

    def submit(self, plan: Plan) -> None:
        if self.gone:
            raise Unavailable("the worker is gone", reason="WORKER_DIED")
        self.plans.append(plan)

    def order(self, order: Order) -> None:
        if self.gone:
            raise Unavailable("the worker is gone", reason="WORKER_DIED")
        self.orders.append(order)

    async def close(self) -> None:
        self.closed = True

    @property
    def last(self) -> Plan:
        return self.plans[-1]

    def prepared(self, job_id: str, **values: object) -> None:
        self.deliver(Prepared(**({"id": job_id, "elapsed": 0.1, "prompt_tokens": 5, "rows": (10,)} | values)))

    def stepped(self, steps: dict[str, int], total: int = 2, broken: tuple[Broken, ...] = (), previews=()) -> None:
        progress = tuple(
            RequestStep(
                id=job_id,
                step=step,
                total=total,
                sigma=1 / step,
                timestep=1000 / step,
                rows=1,
                finished=step == total,
                previews=previews,
            )
            for job_id, step in steps.items()
        )
        self.deliver(Stepped(elapsed=0.5, progress=progress, broken=broken))

    def decoded(self, job_id: str, outputs: int = 1, seed: int = 7) -> None:
        media = tuple(
            Media(
                index=i,
                data=shared.put(png(), f"omni-test-{job_id}-{i}"),
                mime_type="image/png",
                width=2,
                height=3,
                seed=seed + i,
                sha256="0" * 64,
            )
            for i in range(outputs)
        )
        self.deliver(Decoded(id=job_id, elapsed=0.2, media=media, peak_memory_bytes=1000))

    def broken(self, job_id: str, phase: str) -> None:
        self.deliver(Broken(id=job_id, phase=phase, failure=Failure(code=Code.INTERNAL, reason="X", message="broke")))

    def died(self) -> None:
        self.deliver(Died(failure=Failure(code=Code.UNAVAILABLE, reason="WORKER_DIED", message="gone")))


def png() -> bytes:
    buffer = io.BytesIO()
    PIL.Image.new("RGB", (2, 3), (255, 0, 0)).save(buffer, "PNG")
    return buffer.getvalue()


async def started_engine(**settings: object) -> tuple[Engine, ManualExecutor]:
    """An engine whose worker has said Ready."""
    import asyncio

    executor = ManualExecutor()
    engine = Engine(EngineConfig.from_settings(model="toy", **settings), toy_checkpoint(), executor)
    starting = asyncio.ensure_future(engine.start())
    await asyncio.sleep(0)
    executor.deliver(READY)
    await starting
    return engine, executor


def ask(engine, **changes):
    options = {key: changes.pop(key) for key in list(changes) if key in Submission.__slots__}
    values = {"model": "toy", "prompt": "a star", "steps": 2} | changes
    return engine.submit(Submission(draft=Draft(**values), **options))[0]


def run_through(worker, job):
    worker.prepared(job.id)
    worker.stepped({job.id: 1}, total=1)
    worker.decoded(job.id)


def names(job):
    return [type(entry.event).__name__ for entry in job.entries]
