"""What the server says about its model, itself and its load; and that what it does not serve says so."""

import asyncio
from collections.abc import Set

import pytest

from omni_grpc.engine import EngineState
from omni_grpc.engine.scheduler import Lane
from omni_grpc.server.server import SERVICES, unserved_methods
from omni_grpc.types.version import __version__
from omni_grpc.v1 import admin_pb2, job_pb2, model_pb2, sampling_pb2

from .fake_executor import COST
from .service import image, refusal, serving, to_error, until

UNSERVED: Set[str] = set()
"""Of the API, what this version has not."""


async def model(service) -> model_pb2.Model:
    return (await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))).model


async def test_a_model_tells_what_it_is_and_what_may_be_asked_of_it():
    async with serving(max_pixels=1000_000, max_steps=50) as service:
        found = await model(service)
    assert (found.name, found.family, found.pipeline, found.dtype) == ("toy", "toy", "ToyPipeline", "float32")
    assert (found.state, found.weight_bytes) == (model_pb2.MODEL_STATE_READY, 1234)
    assert list(found.tasks) == [sampling_pb2.TASK_TEXT_TO_IMAGE]
    assert list(found.guidance_kinds) == [model_pb2.GUIDANCE_KIND_TRUE_CFG]
    limits = found.limits
    assert (limits.min_width, limits.max_width, limits.size_multiple) == (16, 4096, 16)
    assert limits.max_pixels == 1000_000, "the smaller of the checkpoint's and the operator's"
    assert (limits.max_steps, limits.max_outputs, limits.max_prompt_tokens) == (50, 8, 77)
    assert (limits.default_width, limits.default_height, found.defaults.steps) == (64, 32, 4)
    assert (limits.true_cfg_scale.max, limits.HasField("guidance_scale")) == (100, False)
    assert found.defaults.guidance.true_cfg_scale == 4
    assert len(found.image_formats) == 4
    assert list(found.schedulers) == ["ToyScheduler"]


async def test_the_limits_a_model_tells_are_the_ones_it_keeps(service):
    limits = (await model(service)).limits
    for changes in (
        {"width": limits.max_width + limits.size_multiple},
        {"height": limits.min_height - 1},
        {"width": 16 + limits.size_multiple // 2},
        {"sampling": {"steps": limits.max_steps + 1}},
        {"sampling": {"num_outputs": limits.max_outputs + 1}},
        {"sampling": {"guidance": {"true_cfg_scale": limits.true_cfg_scale.max + 1}}},
        {"prompt": "x" * (limits.max_prompt_chars + 1)},
    ):
        assert (await refusal(service.generation.GenerateImage(image(**changes)))).code == "INVALID_ARGUMENT"


async def test_what_a_model_refuses_is_listed(service):
    refusals = [entry.feature for entry in (await model(service)).refusals]
    assert {"sampling.loras", "sampling.cache", "sampling.sigmas"} <= set(refusals)
    assert "sampling.steps" not in refusals


async def test_models_are_listed_by_task(service):
    async def names(*tasks):
        response = await service.models.ListModels(model_pb2.ListModelsRequest(tasks=tasks))
        return [found.name for found in response.models]

    assert await names() == ["toy"]
    assert await names(sampling_pb2.TASK_TEXT_TO_IMAGE, sampling_pb2.TASK_IMAGE_EDIT) == ["toy"]
    assert await names(sampling_pb2.TASK_IMAGE_EDIT) == []
    for bad in (0, 99):
        error = await refusal(service.models.ListModels(model_pb2.ListModelsRequest(tasks=[bad])))
        assert error.fields == ["tasks"]


async def test_there_are_no_adapters(service):
    assert list((await service.models.ListLoras(model_pb2.ListLorasRequest(model="toy"))).loras) == []
    error = await refusal(service.models.ListLoras(model_pb2.ListLorasRequest(model="other")))
    assert error.reason == "MODEL_NOT_FOUND"


async def test_the_server_tells_its_version_and_its_settings():
    async with serving(max_queue=5, max_message_bytes=2 << 20) as service:
        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert (info.version, info.max_queue, info.max_message_bytes) == (__version__, 5, 2 << 20)
    assert (info.features["dtype"], info.features["max_queue"]) == ("float32", "5")
    assert "model" not in info.features, "a path of the server's machine"
    assert set(info.unserved_rpcs) == UNSERVED
    assert list(info.gpus) == []


async def test_the_load_is_what_it_is():
    async with serving(max_num_seqs=1, max_queue=7) as service:
        service.executor.gates[Lane.STEP].close()
        service.executor.gates[Lane.STEP].let(2)
        jobs = [await service.create() for _ in range(3)]
        watching = service.jobs.WatchJob(job_pb2.WatchJobRequest(job_id=jobs[0].job_id, after_seq=1))
        await watching.read()
        await until(lambda: service.engine.jobs.get(jobs[0].job_id).step == 2)
        stats = (await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest())).stats
        assert (stats.queued, stats.running, stats.max_queue) == (2, 1, 7)
        assert dict(stats.queued_by_model) == {"toy": 2}
        assert (stats.open_streams, stats.draining, stats.artifact_bytes) == (1, False, 0)
        assert stats.steps_per_second == pytest.approx(0.2), "two steps in the last ten seconds"
        service.executor.gates[Lane.STEP].open()
        for job in jobs:
            await service.watch(job.job_id)
        stats = (await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest())).stats
        assert (stats.queued, stats.running) == (0, 0)
        assert stats.artifact_bytes == service.engine.artifacts.size_bytes > 0


async def test_the_stats_tell_what_steps_cost_and_how_often_the_worker_came_back(service):
    async def stats():
        return (await service.admin.GetServerStats(admin_pb2.GetServerStatsRequest())).stats

    cost = (await stats()).step_cost
    assert (cost.fixed_ms, cost.token_ms, cost.pair_ms, cost.error) == (COST.fixed, COST.token, COST.pair, 1)
    await service.finished(prompt="four words of it", sampling={"steps": 1})
    # 2 patches and 4 words are one row of 6 tokens: 2 + 0.25 * 6 + 0.125 * 36 = 8 ms were predicted, 10 ms reported
    assert (await stats()).step_cost.error == pytest.approx(1 + 0.1 * (10 / 8 - 1))
    assert (await stats()).worker_restarts == 0
    for count in (1, 2):
        await service.executor.die()
        await until(lambda: service.engine.state is EngineState.READY)
        assert (await stats()).worker_restarts == count


async def test_the_load_is_pushed_until_the_server_stops():
    async with serving() as service:
        request = admin_pb2.WatchServerStatsRequest(interval={"nanos": 100_000_000})
        call = aiter(service.admin.WatchServerStats(request))
        assert [(await anext(call)).stats.max_queue for _ in range(3)] == [256] * 3
        ending = asyncio.create_task(to_error(call))
        await service.server.stop()
        messages, error = await ending
    assert (error.code, error.reason) == ("UNAVAILABLE", "SERVER_STOPPED")
    assert messages == [] or messages[-1].stats.draining


async def test_the_load_is_not_pushed_faster_than_it_makes_sense(service):
    request = admin_pb2.WatchServerStatsRequest(interval={"nanos": 99_000_000})
    error = await refusal(service.admin.WatchServerStats(request))
    assert error.fields == ["interval"]
    assert "nearest valid value: 0.1 s" in error.message


def test_every_rpc_is_served_or_known_not_to_be():
    assert {method.removeprefix("/omni_grpc.v1.") for method in unserved_methods()} == UNSERVED


@pytest.mark.parametrize("name", sorted(UNSERVED))
async def test_an_rpc_that_is_not_served_says_so(service, name):
    service_name, method_name = name.split("/")
    (descriptor,) = (found for found, _, _ in SERVICES if found.name == service_name)
    method = descriptor.methods_by_name[method_name]
    path, encode = f"/{descriptor.full_name}/{method_name}", method.input_type._concrete_class.SerializeToString
    if method.client_streaming:
        call = service.channel.stream_unary(path, request_serializer=encode)(iter([]))
    elif method.server_streaming:
        call = service.channel.unary_stream(path, request_serializer=encode)(method.input_type._concrete_class())
    else:
        call = service.channel.unary_unary(path, request_serializer=encode)(method.input_type._concrete_class())
    error = await refusal(call)
    assert (error.code, error.reason) == ("UNIMPLEMENTED", "NOT_YET_SERVED")
    assert error.metadata == {"method": name}
