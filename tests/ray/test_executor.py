"""What crosses between an engine and an actor: bytes inside of messages, and no setting that a worker does not read."""

import asyncio
import dataclasses
import hashlib
import os
import random
import time

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.config.sections import BUNDLED
from omni_grpc.engine.assignment import BUNDLED_MODEL, Assignment
from omni_grpc.engine.ray_executor import RayExecutor
from omni_grpc.types import shared_memory as shared
from omni_grpc.types.errors import Unavailable
from omni_grpc.types.media import ImageInput, Inputs
from omni_grpc.types.plan import Broken, Decoded, Plan, Prepared, Ready, Sleep, Slept, Wake, Woken
from tests.engine.test_executor import request
from tests.toy import toy_checkpoint

DRIVER = "tests.ray.echo:serve"
BYTES = 5 << 20
"""More than Ray puts into a call or an answer itself."""


async def started(cluster, driver=DRIVER):
    config = EngineConfig.from_settings(
        distributed_executor_backend="ray", ray_address=cluster.address, device="cpu", state_dir="elsewhere"
    )
    checkpoint = dataclasses.replace(toy_checkpoint(limits=str, defaults=str), name="toy")
    executor = RayExecutor(config, checkpoint, None, driver=driver)
    reports: asyncio.Queue = asyncio.Queue()
    with pytest.raises(Unavailable):
        executor.submit(Plan(step=("job_1",)))
    executor.start(reports.put_nowait)
    return executor, reports


async def test_inputs_and_outputs_cross_without_shared_memory_and_in_order(cluster):
    executor, reports = await started(cluster)
    ready = await reports.get()
    assert isinstance(ready, Ready)
    assert ready.pid not in (os.getpid(), executor.pid)
    data, name = random.Random(7).randbytes(BYTES), f"omni-test-{os.getpid()}"
    shared.store(data, name)
    image = ImageInput(width=1, height=1, channels=3, data=b"", block=name)
    wanted = dataclasses.replace(request(), inputs=Inputs(images=(image,)))
    plans = [Plan(admit=(wanted,)), *[Plan(step=(f"job_{number}",)) for number in range(50)], Plan(decode=("job_1",))]
    for plan in plans:
        executor.submit(plan)
    first = await reports.get()
    assert first == Prepared(id="job_1", elapsed=0.0, prompt_tokens=BYTES), "the actor has got all of its bytes"
    told = [(await reports.get()).id for _ in range(50)]
    assert told == [f"job_{number}" for number in range(50)]
    decoded = await reports.get()
    assert isinstance(decoded, Decoded)
    (media,) = decoded.media
    assert media.data.data is None, "through the pipe it goes as a block of this machine"
    assert hashlib.sha256(shared.take(media.data)).hexdigest() == hashlib.sha256(data).hexdigest()
    shared.discard(name)
    executor.submit(Plan(admit=(wanted,)))
    broken = await reports.get()
    assert isinstance(broken, Broken)
    assert (broken.id, broken.phase, broken.failure.reason) == ("job_1", "prepare", "WORKER_ERROR")
    assert "an input of job_1 is gone" in broken.failure.message
    executor.order(Sleep())
    executor.order(Wake())
    assert [await reports.get(), await reports.get()] == [Slept(freed_bytes=7, elapsed=0.0), Woken(elapsed=0.0)]
    await executor.close()
    assert reports.empty()


async def test_what_an_actor_prints_goes_to_the_log_and_not_to_stdout(cluster, capfd):
    executor, reports = await started(cluster)
    await reports.get()
    out, err, until = "", "", time.monotonic() + 20
    while "printed in an actor" not in out + err and time.monotonic() < until:
        await asyncio.sleep(0.2)
        more = capfd.readouterr()
        out, err = out + more.out, err + more.err
    assert "printed in an actor" in err
    assert out == ""
    await executor.close()


def test_what_a_worker_does_not_read_stays_with_the_server(tmp_path):
    config = EngineConfig.from_settings(
        state_url="postgresql://user:hunter2@db/omni",  # pragma: allowlist secret
        artifact_url=str(tmp_path),
        distributed_executor_backend="ray",
        max_steps=12,
    )
    sent = Assignment.of(config, device="cpu")
    assert "hunter2" not in repr(sent)
    assert (sent.config.limits.max_steps, sent.config.model.device) == (12, "cpu")
    assert (config.model.model, sent.model) == (str(BUNDLED), BUNDLED_MODEL), "it is elsewhere on another node"
