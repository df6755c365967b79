"""What a server is asked for through OpenAI's endpoints and has not begun, the next one does in the same way."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx2
import openai
import pytest

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.scheduler import Lane
from omni_grpc.store.open import open_storage
from tests.server.service import Service, served, until
from tests.server.studio import StudioExecutor, png, studio

from .conftest import client_of
from .test_edits import columns, mask_png

pytestmark = [pytest.mark.service, pytest.mark.filterwarnings("ignore:The Sora API")]


@contextlib.asynccontextmanager
async def lasting(folder: str, **changes: float) -> AsyncIterator[Service]:
    settings = {"model": "toy", "port": 0, "http_port": 0, "state_dir": folder, "max_num_seqs": 1}
    config = EngineConfig.from_settings(**(settings | changes))
    executor = StudioExecutor()
    executor.gates[Lane.STEP].close()
    engine = Engine(config, studio(), executor, open_storage(config))
    async with served(config, engine, executor) as service:
        yield service


async def test_a_mask_that_is_transparent_is_read_again_as_one(tmp_path):
    key = {"Idempotency-Key": "edit-1"}

    async def edit(client: openai.AsyncOpenAI):
        return await client.images.edit(image=png(), mask=mask_png((8, 24)), prompt="x", extra_headers=key)

    async with lasting(str(tmp_path)) as first, client_of(first) as client:
        await client.videos.create(prompt="x", size="32x16")
        await until(lambda: bool(first.executor.plans))
        asking = asyncio.create_task(edit(client))
        await until(lambda: len(first.engine.jobs.newest()) == 2)
        edited = first.engine.jobs.newest()[0]
        await until(lambda: edited.watchers == 1)
    with pytest.raises(openai.APIError):
        await asking
    async with lasting(str(tmp_path)) as second, client_of(second) as client:
        second.executor.gates[Lane.STEP].open()
        answer = await edit(client)
        assert answer.job_id == edited.id
        assert columns(second.executor.request.inputs.mask) == [0] * 8 + [255] * 16 + [0] * 8
        async with httpx2.AsyncClient(base_url=second.http, trust_env=False) as http:
            (video,) = (await http.get("/v1/videos")).json()["data"]
        assert (video["status"], video["error"]["code"]) == ("failed", "server_stopped")


async def test_a_call_without_a_key_leaves_no_job_for_the_next_server(tmp_path):
    """Its client asks again, and nobody would fetch what the first one made."""
    async with lasting(str(tmp_path)) as first, client_of(first) as client:
        await client.videos.create(prompt="x", size="32x16")
        await until(lambda: bool(first.executor.plans))
        asking = asyncio.create_task(client.images.generate(prompt="x", size="32x16"))
        await until(lambda: len(first.engine.jobs.newest()) == 2)
        left = first.engine.jobs.newest()[0]
        await until(lambda: left.watchers == 1)
    with pytest.raises(openai.APIError):
        await asking
    async with lasting(str(tmp_path), disconnect_grace=0.2) as second:
        await until(lambda: second.engine.jobs.get(left.id).state.terminal)
        assert second.engine.jobs.get(left.id).state == "CANCELLED"
