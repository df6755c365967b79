"""A Ray of the server's own, and a model of the hub: the replica downloads it, where it is."""

import contextlib

import psutil

from omni_grpc.config.sections import BUNDLED
from omni_grpc.types.load_progress import LoadPhase
from tests.hub.fake_hub import FakeHub
from tests.ray.conftest import of
from tests.ray.test_replicas import ask, ended, running, stepping

REPO = "tiny-org/tiny"


async def test_a_replica_fetches_its_model_and_comes_back_after_the_end_of_all_of_ray(tmp_path, monkeypatch):
    with FakeHub() as hub:
        files = (path for path in BUNDLED.rglob("*") if path.is_file())
        hub.add(REPO, {str(path.relative_to(BUNDLED)): path.read_bytes() for path in files})
        for name, value in {
            "HF_ENDPOINT": hub.endpoint,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }.items():
            # of nodes: a Ray that is started now has them too
            monkeypatch.setenv(name, value)
        async with running(None, model=REPO, data_parallel_size=1) as engine:
            assert engine.checkpoint.path.is_relative_to(tmp_path / "home")
            assert engine._replicas[0].loading.phase is LoadPhase.LOADING
            assert hub.downloads()
            assert await ended(ask(engine)) == ["SUCCEEDED"]
            await outlives_ray(engine, engine._replicas[0].executor._local)


async def outlives_ray(engine, local):
    """The GCS and the Ray node of the machine go, and drivers end with them. The server starts others."""
    job, first, folder = ask(engine, steps=200), local.pid, local._folder
    await stepping(job)
    for process in psutil.Process(first).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    later = ask(engine)
    assert await ended(job) == ["WORKER_DIED"]
    assert await ended(later) == ["SUCCEEDED"]
    assert local.pid != first
    assert of(folder) == []
