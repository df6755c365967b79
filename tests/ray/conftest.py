"""One small Ray of this machine for all tests here, and what tests see of it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine.ray_local import LocalRay
from tests.toy import toy_checkpoint

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = "TESTS_REQUIRE_RAY"


@dataclasses.dataclass(frozen=True)
class Cluster:
    """A Ray of this machine: what drivers are told of it, and its processes."""

    environment: Mapping[str, str]
    folder: str

    @property
    def address(self) -> str:
        return self.environment["RAY_ADDRESS"]

    def state(self) -> dict[str, int]:
        """How many actors live in it, and how many placement groups it has."""
        environment = {**os.environ, **self.environment}
        with tempfile.NamedTemporaryFile("r") as found:
            command = [sys.executable, "-m", "tests.ray.state", found.name]
            said = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
            assert said.returncode == 0, said.stderr
            return dict(json.load(found))

    def empties(self) -> dict[str, int]:
        """Its state, once what ends has ended."""
        until = time.monotonic() + 15
        while any(found := self.state().values()) and time.monotonic() < until:
            time.sleep(0.2)
        return {"actors": 0, "groups": 0} if not any(found) else self.state()


@pytest.fixture(scope="session", autouse=True)
def has_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        if os.environ.get(REQUIRED) == "1":
            pytest.fail(f"{REQUIRED}=1, and ray is not installed: make ray-setup")
        pytest.skip("ray is not installed: make ray-setup")


@pytest.fixture(scope="session")
def cluster(has_ray: None) -> Iterator[Cluster]:
    # four places, whatever the machine has
    config = EngineConfig.from_settings(model="toy", distributed_executor_backend="ray", data_parallel_size=4)
    local = LocalRay(config, dataclasses.replace(toy_checkpoint(limits=str, defaults=str)), 1)
    found = Cluster(local.environment(), local._folder)
    before = {name: os.environ.get(name) for name in found.environment}
    os.environ.update(found.environment)
    yield found
    local.release()
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    assert of(found.folder) == [], "processes of Ray are left"
    assert not Path(found.folder).exists()


def named(folder: str) -> list[psutil.Process]:
    """The processes of the Ray that has its files in a folder, now."""
    found = []
    for process in psutil.process_iter():
        # any process of the machine may end while they are looked through
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and any(folder in word for word in process.cmdline()):
                found.append(process)
    return found


def of(folder: str) -> list[psutil.Process]:
    """The processes of the Ray that has its files in a folder, once those that end have ended."""
    until = time.monotonic() + 15
    while (left := named(folder)) and time.monotonic() < until:
        time.sleep(0.1)
    return left


def gone(pid: int, seconds: float = 15) -> bool:
    """Whether a process ends in time."""
    return within(seconds, lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


def within(seconds: float, condition: Callable[[], bool]) -> bool:
    """Whether it is so in time."""
    until = time.monotonic() + seconds
    while not (met := condition()) and time.monotonic() < until:
        time.sleep(0.05)
    return met
