"""Many requests at once, memory that runs out, workers that die, servers that stop."""

import asyncio
import multiprocessing.context
import os
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc import ResourceExhausted
from omni_grpc.cli import serve
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, EngineState, ProcessExecutor, Submission
from omni_grpc.engine.scheduler import Lane
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.request import Draft
from tests.server.fake_executor import FakeExecutor
from tests.server.service import CHECKPOINT, Service, image, kinds, refusal, serving, to_error, until
from tests.toy import toy_checkpoint

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
OOM = Failure(code=Code.RESOURCE_EXHAUSTED, reason="OUT_OF_MEMORY", message="out of memory")


async def health(service: Service, name: str = "") -> int:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def becomes(service: Service, status: int) -> None:
    call = health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest())
    async with asyncio.timeout(60):
        while (await call.read()).status != status:
            pass
    call.cancel()


async def complete(service: Service) -> None:
    assert kinds([message.event async for message in service.generation.GenerateImage(image())])[-1] == "completed"


def small(omni, **changes):
    return omni.generate(**({"prompt": "a red circle", "width": 32, "height": 32, "steps": 2, "seed": 7} | changes))


# --- concurrency ------------------------------------------------------------------------------------------------------


# report B115
def test_prompts_of_every_length_can_be_encoded_while_others_run(omni):
    prompts = ["word " * length for length in (1, 700, 3, 50, 20, 9, 600, 30, 2, 40) * 2]
    with ThreadPoolExecutor(len(prompts)) as pool:
        results = list(pool.map(lambda prompt: small(omni, prompt=prompt), prompts))
    cut = [bool(result.effective.dropped_tokens) for result in results]
    assert cut == [len(prompt.split()) >= 600 for prompt in prompts]


# report B116
async def test_after_a_burst_every_job_that_was_accepted_has_ended():
    async with serving(max_num_seqs=2, max_queue=10, disconnect_grace=0.05) as service:
        service.executor.gates[Lane.STEP].close()

        async def ask(number: int) -> str:
            # every fifth client gives up before the server can answer
            timeout = 0.2 if number % 5 == 0 else 60
            call = service.generation.GenerateImage(image(options={"request_id": f"r{number}"}), timeout=timeout)
            try:
                return kinds([message.event async for message in call])[-1] or ""
            except grpc.aio.AioRpcError as error:
                return error.code().name

        asking = [asyncio.create_task(ask(number)) for number in range(50)]
        # 12 fit: two run and ten wait
        await until(lambda: Counter(task.done() for task in asking)[True] >= 50 - 12)
        service.executor.gates[Lane.STEP].open()
        outcomes = Counter(await asyncio.gather(*asking))
        assert outcomes.keys() <= {"completed", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"}
        assert outcomes["RESOURCE_EXHAUSTED"] >= 50 - 12 - 10, "the queue is bounded, and the surplus is told at once"
        assert outcomes["completed"] >= 5
        await until(lambda: all(job.state.terminal for job in service.engine.jobs.newest()))
        assert (service.engine.stats().queued, service.engine.stats().running) == (0, 0)
        await complete(service)


def out_of_memory(monkeypatch, pipeline, method: str, width: int | None = None) -> None:
    """Makes a method of the pipeline run out of memory, always or where a request of this width takes part."""
    working = getattr(pipeline, method)

    def failing(*arguments):
        owners = getattr(arguments[0], "owners", None)
        widths = {state.request.width for state, _ in owners} if owners is not None else {None}
        if width is None or width in widths:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return working(*arguments)

    monkeypatch.setattr(pipeline, method, failing)


# report B117
def test_after_memory_has_run_out_the_same_request_succeeds(omni, pipeline, monkeypatch):
    before = small(omni)
    with monkeypatch.context() as patch:
        out_of_memory(patch, pipeline, "predict")
        with pytest.raises(ResourceExhausted, match="ask for fewer outputs or a smaller size"):
            small(omni)
    assert omni._engine.replicas[0].executor._worker._runner._held == {}
    assert small(omni).files == before.files


# report B118
async def test_a_job_that_does_not_fit_fails_alone_and_health_stays_green(service):
    service.executor.failures[Lane.DECODE] = OOM
    _, error = await to_error(service.generation.GenerateImage(image()))
    assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "OUT_OF_MEMORY")
    assert (await health(service), service.executor.starts) == (SERVING, 1)
    await complete(service)


# report B118
def test_of_a_big_and_a_small_job_that_share_steps_only_the_big_one_fails(omni, pipeline, monkeypatch):
    alone = small(omni, steps=10)
    out_of_memory(monkeypatch, pipeline, "predict", width=64)
    with ThreadPoolExecutor(2) as pool:
        big, little = pool.submit(small, omni, width=64, steps=10), pool.submit(small, omni, steps=10)
        assert isinstance(big.exception(), ResourceExhausted)
        assert little.result().files == alone.files


# report B119
@pytest.mark.parametrize("method", ["prepare", "predict", "decode"])
def test_memory_that_runs_out_midway_is_never_a_picture(omni, pipeline, monkeypatch, method):
    out_of_memory(monkeypatch, pipeline, method)
    with pytest.raises(ResourceExhausted) as caught:
        small(omni)
    assert caught.value.reason == "OUT_OF_MEMORY"


# --- robustness -------------------------------------------------------------------------------------------------------


# report B120
async def test_health_knows_of_a_dead_worker_and_of_the_next_one(service):
    service.executor.gates[Lane.STEP].close()
    call = asyncio.create_task(to_error(service.generation.GenerateImage(image())))
    await until(lambda: service.engine.stats().running == 1)
    service.executor.loading.close()
    await service.executor.die()
    await becomes(service, NOT_SERVING)
    assert (await call)[1].code == "UNAVAILABLE"
    service.executor.loading.open()
    service.executor.gates[Lane.STEP].open()
    await becomes(service, SERVING)
    await complete(service)


# report B121
async def test_a_server_under_load_is_gone_within_the_time_it_was_given(capsys):
    executor = FakeExecutor()
    engine = Engine(EngineConfig.from_settings(model="toy", port=0, drain_timeout=0.2), CHECKPOINT, executor)
    executor.gates[Lane.STEP].close()
    running = asyncio.create_task(serve.serve(Fleet.of(engine)))
    await until(lambda: engine.state is EngineState.READY)
    jobs = [engine.submit(Submission(draft=Draft(model="toy", prompt="x")))[0] for _ in range(20)]
    os.kill(os.getpid(), signal.SIGTERM)
    assert await asyncio.wait_for(running, 10) == 0
    assert {job.failure.reason for job in jobs if job.failure} == {"SERVER_STOPPED"}
    assert all(job.state.terminal for job in jobs)


# report B123
async def test_while_the_start_hangs_health_answers_and_says_no():
    executor = FakeExecutor()
    executor.loading.close()
    engine = Engine(EngineConfig.from_settings(model="toy", port=0), CHECKPOINT, executor)
    server = Server(Gate(Fleet.of(engine)), engine.config)
    starting = asyncio.create_task(server.start())
    await until(lambda: server.port != 0)
    service = Service(engine, server, executor)
    assert (await health(service), await health(service, "liveness")) == (NOT_SERVING, SERVING)
    error = await refusal(service.generation.GenerateImage(image()))
    assert (error.code, error.reason) == ("UNAVAILABLE", "MODEL_LOADING")
    executor.loading.open()
    await starting
    await service.channel.close()
    await server.stop()


# report B124
async def test_a_server_that_stops_takes_no_calls_and_ends_those_it_has():
    async with serving() as service:
        service.executor.gates[Lane.STEP].close()
        call = aiter(service.generation.GenerateImage(image()))
        events = [(await anext(call)).event]
        stopping = asyncio.create_task(service.server.stop(drain=60))
        await becomes(service, NOT_SERVING)
        error = await refusal(service.generation.GenerateImage(image()))
        assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_DRAINING")
        service.executor.gates[Lane.STEP].open()
        events += [message.event async for message in call]
        assert kinds(events)[-1] == "completed"
        await stopping


# report B125
async def test_no_stream_is_silent_for_long():
    async with serving(heartbeat_interval=0.05) as service:
        service.executor.gates[Lane.STEP].close()
        call = aiter(service.generation.GenerateImage(image()))
        events = [(await anext(call)).event for _ in range(6)]
        assert kinds(events) == ["queued", "started", "encode_done", "heartbeat", "heartbeat", "heartbeat"]
        service.executor.gates[Lane.STEP].open()
        assert [message.event async for message in call][-1].HasField("completed")


# report B126
async def test_a_worker_is_spawned_and_works_though_grpc_has_threads(service):
    await complete(service)
    executor = ProcessExecutor(
        EngineConfig.from_settings(model="toy"),
        # functions do not pickle by value, and this worker asks for none
        toy_checkpoint(limits=str, defaults=str),
        worker="tests.engine.toy_worker:serve",
    )
    reports: asyncio.Queue = asyncio.Queue()
    executor.start(reports.put_nowait)
    assert (await asyncio.wait_for(reports.get(), 60)).pid == executor.pid
    assert isinstance(executor._process._process, multiprocessing.context.SpawnProcess)
    await executor.close()
