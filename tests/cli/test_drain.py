"""`omni-grpc drain`: a server ends what it has, or one replica is started anew."""

import asyncio

from omni_grpc.engine import EngineState
from omni_grpc.engine.scheduler import Lane
from tests.server.service import until


async def test_a_replica_is_started_anew_and_the_command_waits_for_it(run, service, server):
    service.executor.gates[Lane.STEP].close()
    job = await service.create()
    draining = asyncio.create_task(run("drain", *server, "--replica", "0", "--wait"))
    await until(lambda: service.engine.replicas[0].state == "DRAINING")
    assert not draining.done()
    service.executor.gates[Lane.STEP].open()
    done = await draining
    assert (done.code, done.out.splitlines()) == (0, ["1 jobs run, 0 wait", "done"])
    assert (service.executor.starts, service.engine.replicas[0].restarts) == (2, 1)
    assert (await service.get(job.job_id)).step == 3


async def test_a_server_ends_what_it_has_and_takes_no_more(run, service, server):
    service.executor.gates[Lane.STEP].close()
    await service.create()
    draining = asyncio.create_task(run("drain", *server, "--wait"))
    await until(lambda: service.engine.state is EngineState.DRAINING)
    service.executor.gates[Lane.STEP].open()
    done = await draining
    assert (done.code, done.out.splitlines()) == (0, ["1 jobs run, 0 wait", "done"])


async def test_a_wait_that_is_too_long_is_given_up(run, service, server):
    service.executor.gates[Lane.STEP].close()
    await service.create()
    done = await run("drain", *server, "--wait", "--timeout", "0")
    assert (done.code, "NOT_DRAINED" in done.err) == (1, True)
    service.executor.gates[Lane.STEP].open()


async def test_a_replica_that_is_not_there_is_refused(run, server):
    done = await run("drain", *server, "--replica", "7")
    assert (done.code, "REPLICA_NOT_FOUND" in done.err) == (1, True)
