"""Several models in one server: who does which job, what is loaded, and who has the memory."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from omni_grpc.engine.items import Lane
from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.plan import Sleep, SleepLevel
from omni_grpc.v1 import admin_pb2, event_pb2, job_pb2, model_pb2
from tests.server.service import image, refusal, until

from .several import SIZE, serving_several

STATES = model_pb2.ModelState


async def models(service):
    found = (await service.models.ListModels(model_pb2.ListModelsRequest())).models
    return {one.name: STATES.Name(one.state).removeprefix("MODEL_STATE_") for one in found}


async def health(service, name):
    stub = health_pb2_grpc.HealthStub(service.channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


async def stats(service):
    return (await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest())).stats


def load(service, model, **options):
    request = admin_pb2.LoadModelRequest(model=model)
    request.engine_options.update(options)
    return service.admin.LoadModel(request)


# --- routing ----------------------------------------------------------------------------------------------------------


async def test_a_job_goes_to_the_model_that_it_names():
    async with serving_several("a", "b") as service:
        for name in ("a", "b"):
            job = await service.finished(model=name)
            assert job.state == event_pb2.JOB_STATE_SUCCEEDED
            assert job.model == name
        assert [len(service.workers[name][0].plans) > 0 for name in ("a", "b")] == [True, True]
        assert await models(service) == {"a": "READY", "b": "READY"}


async def test_where_there_are_several_a_request_has_to_name_one():
    async with serving_several("a", "b") as service:
        missing = await refusal(service.generation.GenerateImage(image(model="")))
        assert (missing.code, missing.reason, missing.fields) == ("INVALID_ARGUMENT", "MODEL_REQUIRED", ["model"])
        assert "this server has several models: a, b" in missing.message
        unknown = await refusal(service.generation.GenerateImage(image(model="c")))
        assert (unknown.code, unknown.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND")
        assert "this server has a, b" in unknown.message


async def test_one_request_id_makes_one_job_whatever_the_model():
    async with serving_several("a", "b") as service:
        first, again = [await service.create(model="a", options={"request_id": "r"}) for _ in range(2)]
        assert again.job_id == first.job_id
        other = await refusal(service.generation.GenerateImage(image(model="b", options={"request_id": "r"})))
        assert other.reason == "REQUEST_ID_REUSED"


async def test_jobs_of_all_models_are_listed_watched_and_cancelled_alike():
    async with serving_several("a", "b", max_num_seqs=1) as service:
        for name in ("a", "b"):
            service.workers[name][0].gates[Lane.STEP].close()
        made = [await service.create(model=name, options={"labels": {"x": "1"}}) for name in ("a", "b", "b")]
        listed = (await service.jobs.ListJobs(job_pb2.ListJobsRequest())).jobs
        assert {job.job_id for job in listed} == {job.job_id for job in made}
        watch = service.jobs.WatchJobs(job_pb2.WatchJobsRequest(job_ids=[job.job_id for job in made]))
        for job in made:
            await service.jobs.CancelJob(job_pb2.CancelJobRequest(job_id=job.job_id))
        async with asyncio.timeout(10):
            [_ async for _ in watch]
        for job in made:
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_CANCELLED


async def test_a_dead_worker_of_one_model_harms_no_job_of_another():
    async with serving_several("a", "b") as service:
        for name in ("a", "b"):
            service.workers[name][0].gates[Lane.STEP].close()
        one, two = [await service.create(model=name) for name in ("a", "b")]
        await until(lambda: all(found[0].plans for found in service.workers.values()))
        await asyncio.sleep(0.05)
        await service.workers["a"][0].die()
        service.workers["b"][0].gates[Lane.STEP].open()
        await service.watch(two.job_id)
        assert (await service.get(two.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED
        await service.watch(one.job_id)
        assert (await service.get(one.job_id)).state == event_pb2.JOB_STATE_FAILED
        assert await health(service, "") == "SERVING"


# --- load and unload --------------------------------------------------------------------------------------------------


async def test_a_model_that_is_known_is_loaded_when_that_is_asked_for():
    async with serving_several("a", "b", b={"load_later": True}) as service:
        assert await models(service) == {"a": "READY", "b": "AVAILABLE"}
        assert (await health(service, "model:a"), await health(service, "model:b")) == ("SERVING", "NOT_SERVING")
        early = await refusal(service.generation.GenerateImage(image(model="b")))
        assert (early.code, early.reason) == ("FAILED_PRECONDITION", "MODEL_NOT_LOADED")
        *_, last = [message async for message in load(service, "b")]
        assert (last.phase, last.model.name) == (admin_pb2.LOAD_PHASE_READY, "b")
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED
        await until_health(service, "model:b", "SERVING")
        freed = await service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b"))
        assert freed.freed_bytes == SIZE.device_bytes
        assert await models(service) == {"a": "READY", "b": "AVAILABLE"}
        await until_health(service, "model:b", "NOT_SERVING")
        # and again
        [_ async for _ in load(service, "b")]
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED


async def until_health(service, name, wanted):
    for _ in range(500):
        if await health(service, name) == wanted:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{name} is not {wanted}")


async def test_a_model_with_jobs_is_unloaded_only_by_force_and_then_they_fail_as_retryable():
    async with serving_several("a", "b") as service:
        service.workers["b"][0].gates[Lane.STEP].close()
        job = await service.create(model="b")
        busy = await refusal(service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b")))
        assert (busy.code, busy.reason) == ("FAILED_PRECONDITION", "MODEL_BUSY")
        await service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b", force=True))
        failed = (await service.watch(job.job_id))[-1].failed.status
        assert failed.code == 14
        # what is over can still be asked for, and the other goes on
        assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_FAILED
        assert (await service.finished(model="a")).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_loading_goes_on_when_the_caller_leaves_and_others_can_follow_it():
    async with serving_several("a", "b", b={"load_later": True}) as service:
        first = load(service, "b")
        await first.read()
        service.workers["b"][0].loading.close() if service.workers["b"] else None
        first.cancel()
        *_, last = [message async for message in load(service, "b")]
        assert last.phase == admin_pb2.LOAD_PHASE_READY


async def test_other_settings_for_a_model_that_is_loaded_are_refused():
    async with serving_several("a", "b") as service:
        error = await refusal(load(service, "a", max_num_seqs=2))
        assert (error.code, error.reason) == ("FAILED_PRECONDITION", "MODEL_LOADED")


async def test_a_model_that_loads_can_be_unloaded_and_loaded_again():
    async with serving_several("a", "b", b={"load_later": True}, gpu_memory_budget=30) as service:
        make = service.fleet._make

        def slow(config, checkpoint):
            engine = make(config, checkpoint)
            service.workers["b"][0].loading.close()
            return engine

        service.fleet._make = slow
        following = load(service, "b")
        await following.read()
        await service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="b"))
        ended = await refusal(following_end(following))
        assert ended.reason == "MODEL_NOT_LOADED"
        service.fleet._make = make
        *_, last = [message async for message in load(service, "b")]
        assert last.phase == admin_pb2.LOAD_PHASE_READY
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED


async def following_end(call):
    while await call.read():
        pass


async def test_a_model_that_wakes_can_be_unloaded_and_the_others_go_on():
    async with serving_several("a", "b", gpu_memory_budget=10, model_turn=0) as service:
        service.workers["a"][0].moving.close()
        await service.create(model="a")
        await until(lambda: len(service.workers["a"][0].orders) == 2)
        await service.admin.UnloadModel(admin_pb2.UnloadModelRequest(model="a", force=True))
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_a_server_whose_only_model_sleeps_is_not_ready():
    async with serving_several("a") as service:
        await service.admin.Sleep(admin_pb2.SleepRequest(model="a"))
        await until_health(service, "", "NOT_SERVING")
        await service.admin.Wake(admin_pb2.WakeRequest(model="a"))
        await until_health(service, "", "SERVING")


# --- sleep and wake ---------------------------------------------------------------------------------------------------


async def test_a_model_that_is_put_to_sleep_takes_no_jobs_until_it_is_woken():
    async with serving_several("a", "b") as service:
        slept = await service.admin.Sleep(admin_pb2.SleepRequest(model="b", level=admin_pb2.SLEEP_LEVEL_DROP_WEIGHTS))
        assert slept.freed_bytes == SIZE.device_bytes
        assert service.workers["b"][0].orders == [Sleep(level=SleepLevel.DROP_WEIGHTS)]
        assert await models(service) == {"a": "READY", "b": "SLEEPING"}
        await until_health(service, "model:b", "NOT_SERVING")
        asleep = await refusal(service.generation.GenerateImage(image(model="b")))
        assert (asleep.code, asleep.reason) == ("UNAVAILABLE", "MODEL_ASLEEP")
        woken = await service.admin.Wake(admin_pb2.WakeRequest(model="b"))
        assert woken.elapsed.nanos > 0
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED
        # twice is once
        await service.admin.Wake(admin_pb2.WakeRequest(model="b"))


async def test_a_model_with_jobs_is_not_put_to_sleep_and_a_name_is_required():
    async with serving_several("a", "b") as service:
        service.workers["b"][0].gates[Lane.STEP].close()
        await service.create(model="b")
        busy = await refusal(service.admin.Sleep(admin_pb2.SleepRequest(model="b")))
        assert (busy.code, busy.reason) == ("FAILED_PRECONDITION", "MODEL_BUSY")
        for call in (
            service.admin.Sleep(admin_pb2.SleepRequest()),
            service.admin.Wake(admin_pb2.WakeRequest()),
            service.admin.UnloadModel(admin_pb2.UnloadModelRequest()),
        ):
            assert (await refusal(call)).fields == ["model"]


# --- a budget ---------------------------------------------------------------------------------------------------------


async def test_of_three_models_two_are_awake_and_a_job_wakes_the_third():
    async with serving_several("a", "b", "c", gpu_memory_budget=20, model_turn=0) as service:
        # the third needed the room of the first
        assert service.awake == ["b", "c"]
        assert await models(service) == {"a": "SLEEPING", "b": "READY", "c": "READY"}
        assert await health(service, "model:a") == "SERVING"
        assert (await service.finished(model="a")).state == event_pb2.JOB_STATE_SUCCEEDED
        assert service.awake == ["a", "c"]
        assert (await service.finished(model="c")).state == event_pb2.JOB_STATE_SUCCEEDED
        assert service.awake == ["a", "c"]


async def test_before_a_model_is_loaded_its_files_say_how_much_room_it_needs(tiny_qwen_image):
    async with serving_several("a", "b", path=tiny_qwen_image, gpu_memory_budget=0.0001, model_turn=0) as service:
        assert service.awake == ["b"]
        # it was asleep before the other began to load
        assert service.workers["a"][0].orders == [Sleep(level=SleepLevel.KEEP_WEIGHTS)]


async def test_many_jobs_of_three_models_under_a_budget_for_two_all_succeed():
    async with serving_several("a", "b", "c", gpu_memory_budget=20, model_turn=0.05) as service:
        most = 0

        async def look():
            nonlocal most
            while True:
                most = max(most, len(service.awake))
                await asyncio.sleep(0)

        looking = asyncio.create_task(look())
        made = [await service.create(model=name) for _ in range(12) for name in ("a", "b", "c")]
        for job in made:
            await service.watch(job.job_id)
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED
        looking.cancel()
        assert most == 2
        swaps = sum(len(found[0].orders) for found in service.workers.values())
        assert swaps > 4


async def test_a_model_whose_turn_is_over_ends_what_runs_and_gives_way():
    async with serving_several("a", "b", gpu_memory_budget=10, model_turn=0.05, max_num_seqs=1) as service:
        assert service.awake == ["b"]
        step = service.workers["b"][0].gates[Lane.STEP]
        step.close()
        first, second = [await service.create(model="b") for _ in range(2)]
        other = await service.create(model="a")
        await asyncio.sleep(0.15)
        assert service.awake == ["b"], "what runs is not cut short"
        step.open()
        for job in (first, other, second):
            await service.watch(job.job_id)
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_jobs_of_a_model_that_cannot_be_woken_fail_and_the_next_one_is_another_try():
    async with serving_several("a", "b", gpu_memory_budget=10, model_turn=0) as service:
        service.workers["a"][0].stuck = Failure(code=Code.RESOURCE_EXHAUSTED, reason="X", message="no memory")
        job = await service.create(model="a")
        failed = (await service.watch(job.job_id))[-1].failed.status
        assert "no memory" in failed.message
        assert (await service.finished(model="a")).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_a_model_whose_weights_the_host_cannot_keep_drops_them():
    async with serving_several("a", "b", gpu_memory_budget=10, model_turn=0) as service:
        service.workers["b"][0].stuck = Failure(code=Code.RESOURCE_EXHAUSTED, reason="HOST_MEMORY", message="no room")
        assert (await service.finished(model="a")).state == event_pb2.JOB_STATE_SUCCEEDED
        assert service.workers["b"][0].orders[-1] == Sleep(level=SleepLevel.DROP_WEIGHTS)
        assert (await service.finished(model="b")).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_models_on_gpus_of_their_own_do_not_share_a_budget():
    async with serving_several(
        "a", "b", a={"devices": "0"}, b={"devices": "1"}, gpu_memory_budget=10, model_turn=0
    ) as service:
        assert service.awake == ["a", "b"]


async def test_a_drain_ends_the_jobs_of_sleeping_models_too():
    async with serving_several("a", "b", gpu_memory_budget=10, model_turn=0) as service:
        step = service.workers["b"][0].gates[Lane.STEP]
        step.close()
        made = [await service.create(model=name) for name in ("b", "a")]
        answer = await service.admin.Drain(admin_pb2.DrainRequest())
        assert answer.running + answer.queued == 2
        refused = await refusal(service.generation.GenerateImage(image(model="a")))
        assert (refused.code, refused.reason) == ("UNAVAILABLE", "ENGINE_DRAINING")
        assert (await stats(service)).draining
        await until_health(service, "", "NOT_SERVING")
        step.open()
        for job in made:
            await service.watch(job.job_id)
            # the process stays for whoever fetches outputs
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED


# --- tenants and figures ----------------------------------------------------------------------------------------------


async def test_a_limit_of_running_jobs_holds_over_all_models(tmp_path):
    limits = tmp_path / "tenants.yaml"
    limits.write_text("default: {max_running: 1}\n")
    async with serving_several("a", "b", tenant_limits=str(limits)) as service:
        step = service.workers["a"][0].gates[Lane.STEP]
        step.close()
        one, two = [await service.create(model=name) for name in ("a", "b")]
        await asyncio.sleep(0.05)
        assert (await service.get(two.job_id)).state == event_pb2.JOB_STATE_QUEUED
        step.open()
        for job in (one, two):
            await service.watch(job.job_id)
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED


async def test_the_load_is_told_by_model_and_replica():
    async with serving_several("a", "b", a={"data_parallel_size": 2}, max_num_seqs=1) as service:
        for worker in service.workers["a"]:
            worker.gates[Lane.STEP].close()
        made = [await service.create(model="a", sampling={"steps": 10}) for _ in range(3)]
        await until(lambda: all(worker.plans and worker.plans[-1].step for worker in service.workers["a"]))
        found = {one.model: one for one in (await stats(service)).models}
        assert (found["a"].queued, found["a"].running, found["b"].running) == (1, 2, 0)
        assert [(one.replica, one.state, one.running) for one in found["a"].replicas] == [
            (0, "READY", 1),
            (1, "READY", 1),
        ]
        assert found["a"].HasField("est_queue_delay")
        assert found["a"].predicted_work.ToTimedelta().total_seconds() > 0
        for worker in service.workers["a"]:
            worker.gates[Lane.STEP].open()
        for job in made:
            await service.watch(job.job_id)


async def test_replicas_are_started_anew_one_after_the_other_and_no_job_is_refused_or_fails():
    async with serving_several("a", "b", a={"data_parallel_size": 2}) as service:
        made, stop = [], asyncio.Event()

        async def ask():
            while not stop.is_set():
                made.append(await service.create(model="a"))
                await asyncio.sleep(0.002)

        asking = asyncio.create_task(ask())
        for turn in range(2, 8):
            for number in (0, 1):
                await service.admin.Drain(admin_pb2.DrainRequest(model="a", replica=number))
                await until(lambda number=number, turn=turn: service.workers["a"][number].starts == turn)
                await until(lambda number=number: service.engine_of("a").replicas[number].state == "READY")
        stop.set()
        await asking
        for job in made:
            await service.watch(job.job_id)
            assert (await service.get(job.job_id)).state == event_pb2.JOB_STATE_SUCCEEDED
        assert len(made) > 5


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (admin_pb2.DrainRequest(model="a"), "INVALID_ARGUMENT"),
        (admin_pb2.DrainRequest(model="a", replica=7), "REPLICA_NOT_FOUND"),
        (admin_pb2.DrainRequest(model="c", replica=0), "MODEL_NOT_FOUND"),
    ],
)
async def test_a_drain_that_means_nothing_is_refused(request_, reason):
    async with serving_several("a", "b") as service:
        assert (await refusal(service.admin.Drain(request_))).reason == reason
