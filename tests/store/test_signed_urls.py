"""Outputs in a bucket, by addresses that anybody can get them at."""

import urllib.request

import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.server import Server
from omni_grpc.store.open import open_storage
from omni_grpc.v1 import event_pb2
from tests.server.fake_executor import FakeExecutor
from tests.server.service import CHECKPOINT, Service, image, kinds

pytestmark = pytest.mark.service


@pytest.fixture
async def service(s3, tmp_path):
    settings = {"state_dir": str(tmp_path / "state"), "artifact_url": s3.url(s3.bucket())}
    config = EngineConfig.from_settings(model="toy", port=0, **settings)
    executor = FakeExecutor()
    engine = Engine(config, CHECKPOINT, executor, open_storage(config))
    server = Server(Gate(Fleet.of(engine)), config)
    await server.start()
    service = Service(engine, server, executor)
    yield service
    await service.channel.close()
    await server.stop()


def got(url):
    with urllib.request.urlopen(url) as answer:
        return answer.read(), answer.headers["content-type"]


async def test_a_watcher_that_asks_for_addresses_gets_them(service):
    job = await service.finished()
    data = await service.engine.artifacts.data(job.artifacts[0].artifact_id)
    events = await service.watch(job.job_id, delivery="ARTIFACT_DELIVERY_SIGNED_URL")
    ready = events[kinds(events).index("artifact_ready")].artifact_ready.artifact
    (done,) = events[-1].completed.artifacts
    for artifact in (ready, done):
        assert got(artifact.download_uri) == (data, artifact.mime_type)
    assert "artifact_chunk" not in kinds(events)


async def test_nobody_else_gets_an_address(service):
    job = await service.finished()
    assert job.artifacts[0].download_uri == ""
    for delivery in ("ARTIFACT_DELIVERY_REFERENCE", "ARTIFACT_DELIVERY_INLINE_CHUNKS"):
        events = await service.watch(job.job_id, delivery=delivery)
        assert events[-1].completed.artifacts[0].download_uri == ""


async def test_a_generation_can_end_with_addresses(service):
    options = {"delivery": "ARTIFACT_DELIVERY_SIGNED_URL"}
    events = [message.event async for message in service.generation.GenerateImage(image(options=options))]
    assert isinstance(events[-1], event_pb2.JobEvent)
    (done,) = events[-1].completed.artifacts
    assert len(got(done.download_uri)[0]) == done.size_bytes
