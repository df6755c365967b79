"""The nodes of clients/comfyui, loaded as ComfyUI loads them, against a server. What they use of ComfyUI, a bar and a
question whether to stop, stands here in its place.
"""

import asyncio
import importlib.util
import sys
import types
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from omni_grpc.engine.scheduler import Lane
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.v1.event_pb2 import JOB_STATE_CANCELLED
from tests.server.service import until
from tests.server.studio import serving_studio

FOLDER = Path(__file__).resolve().parents[2] / "clients" / "comfyui"


class InterruptProcessingException(Exception):
    """What ComfyUI raises where its Cancel was pressed."""


class Comfy:
    """Its part that nodes see."""

    def __init__(self) -> None:
        self.updates: list[tuple[int, int, object]] = []
        self.cancelled = False

    def bar(self, total: int):
        updates = self.updates

        class ProgressBar:
            def update_absolute(self, value, total=None, preview=None):
                updates.append((value, total, preview))

        return ProgressBar()

    def interrupted(self) -> bool:
        return self.cancelled

    def stop(self) -> None:
        if self.cancelled:
            raise InterruptProcessingException


@pytest.fixture
def comfy(monkeypatch):
    found = Comfy()
    utils, management = types.ModuleType("comfy.utils"), types.ModuleType("comfy.model_management")
    utils.ProgressBar = found.bar
    management.throw_exception_if_processing_interrupted = found.stop
    management.processing_interrupted = found.interrupted
    package = types.ModuleType("comfy")
    package.utils, package.model_management = utils, management
    for module in (package, utils, management):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


@pytest.fixture
def nodes(comfy):
    """Its nodes by name: a folder, imported under a name of no importance, each time with the ComfyUI of the test."""
    spec = importlib.util.spec_from_file_location(
        "custom_node", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)]
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules["custom_node"] = module
    spec.loader.exec_module(module)
    assert module.NODE_CLASS_MAPPINGS.keys() == module.NODE_DISPLAY_NAME_MAPPINGS.keys()
    yield module.NODE_CLASS_MAPPINGS
    for name in ("custom_node", "custom_node.nodes"):
        del sys.modules[name]


@pytest_asyncio.fixture
async def studio():
    async with serving_studio() as service:
        yield service


def connected(nodes, studio):
    node = nodes["OmniGrpcServer"]
    return getattr(node(), node.FUNCTION)(address=f"127.0.0.1:{studio.server.port}")[0]


async def executed(node, **inputs):
    """What a node answers that is run as ComfyUI runs it: its function, with inputs that it has declared."""
    declared = node.INPUT_TYPES()
    assert inputs.keys() <= declared["required"].keys() | declared["optional"].keys()
    assert declared["required"].keys() <= inputs.keys()
    answer = await asyncio.to_thread(lambda: getattr(node(), node.FUNCTION)(**inputs))
    assert len(answer) == len(node.RETURN_TYPES)
    return answer


async def test_images_come_as_comfyui_has_them(nodes, comfy, studio):
    server = connected(nodes, studio)
    images, effective = await executed(
        nodes["OmniGrpcGenerate"],
        server=server,
        prompt="x",
        seed=7,
        width=64,
        height=32,
        steps=3,
        batch_size=2,
        guidance_scale=0,
    )
    assert (images.shape, images.dtype) == ((2, 32, 64, 3), torch.float32)
    assert 0 <= images.min() <= images.max() <= 1
    assert "7" in effective
    assert comfy.updates[-1][:2] == (3, 3)
    (job,) = studio.engine.jobs.newest()
    assert job.state == "SUCCEEDED"


async def test_images_and_a_mask_go_to_the_server(nodes, comfy, studio):
    server = connected(nodes, studio)
    images, _ = await executed(
        nodes["OmniGrpcEdit"],
        server=server,
        images=torch.rand(1, 32, 32, 3),
        mask=torch.ones(1, 32, 32),
        prompt="x",
        seed=7,
        width=32,
        height=32,
        use_negative_prompt=True,
        negative_prompt="",
    )
    assert images.shape == (1, 32, 32, 3)


async def test_cancel_cancels_the_job(nodes, comfy, studio):
    """Also while no event comes, since a step takes long."""
    gate = studio.executor.gates[Lane.STEP]
    gate.close()
    server = connected(nodes, studio)
    run = asyncio.create_task(executed(nodes["OmniGrpcGenerate"], server=server, prompt="x", seed=7, steps=50))
    await until(lambda: [job.state for job in studio.engine.jobs.newest()] == ["RUNNING"])
    comfy.cancelled = True
    while not run.done():
        await asyncio.sleep(0.3)
        gate.let(1)
    with pytest.raises(InterruptProcessingException):
        await run
    (job,) = studio.engine.jobs.newest()
    assert (await studio.get(job.id)).state == JOB_STATE_CANCELLED


async def test_what_the_server_refuses_is_an_error_with_its_field(nodes, comfy, studio):
    with pytest.raises(InvalidArgument) as caught:
        await executed(
            nodes["OmniGrpcGenerate"], server=connected(nodes, studio), prompt="x", seed=7, width=7, height=8
        )
    assert [violation.field for violation in caught.value.violations] == ["width", "height"]


def test_a_token_is_not_saved_with_a_workflow(nodes, monkeypatch):
    monkeypatch.setenv("OMNI_GRPC_TOKEN", "secret")
    node = nodes["OmniGrpcServer"]
    assert "token" not in str(node.INPUT_TYPES())
    assert node().connect("localhost:50051")[0]["token"] == "secret"
