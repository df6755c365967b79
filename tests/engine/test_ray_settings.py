"""What the settings of Ray refuse, before anything is started; see tests/ray for what they do."""

import subprocess
import sys

import pytest

from omni_grpc import Omni
from omni_grpc.config import EngineConfig
from omni_grpc.engine.executor import ProcessExecutor
from omni_grpc.engine.workers import executors
from omni_grpc.types.errors import ConfigError
from tests.toy import toy_checkpoint

RAY = {"distributed_executor_backend": "ray"}


def refusal(**settings):
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_settings(model="toy", **settings)
    return error.value


def test_without_the_extra_the_command_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'omni-grpc\[ray\]'") as error:
        executors(EngineConfig.from_settings(model="toy", **RAY), toy_checkpoint())
    assert error.value.reason == "EXTRA_NOT_INSTALLED"
    assert [violation.field for violation in error.value.violations] == ["distributed_executor_backend"]


@pytest.mark.parametrize("given", [{"ray_address": "auto"}, {"ray_placement_timeout": 5}], ids=lambda given: str(given))
def test_settings_of_ray_need_it(given):
    error = refusal(**given)
    assert error.reason == "SETTING_WITHOUT_EFFECT"
    assert [violation.field for violation in error.violations] == list(given)
    assert "without --distributed-executor-backend ray" in str(error)
    EngineConfig.from_settings(model="toy", **RAY, **given)


@pytest.mark.parametrize("address", ["ray://head:10001", "head", "http://head:8265", "head:port"])
def test_an_address_is_that_of_a_head(address):
    error = refusal(**RAY, ray_address=address)
    assert "must be HOST:PORT of the head of the cluster" in str(error)


def test_another_backend_is_none():
    assert "expected one of process, ray" in str(refusal(distributed_executor_backend="mp"))


def test_offline_they_have_no_effect():
    with pytest.raises(ConfigError, match="distributed_executor_backend: no effect without a server"):
        Omni("toy", **RAY)


def test_by_default_workers_are_processes_and_ray_is_not_imported():
    (executor,) = executors(EngineConfig.from_settings(model="toy"), toy_checkpoint())
    assert isinstance(executor, ProcessExecutor)
    code = "import sys, omni_grpc.cli.serve, omni_grpc.engine.workers; print([m for m in sys.modules if 'ray' in m])"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "ray_" not in said
    assert "'ray'" not in said
