"""The official client against the bundled model, whose picture is looked at."""

from __future__ import annotations

import asyncio
import base64
import io

import numpy as np
import openai
import PIL.Image
import pytest

from omni_grpc.checkpoint.registry import open_model
from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.resolve.settings import apply_settings
from omni_grpc.scenes.judge import judge
from omni_grpc.scenes.wish import Noun, Wish
from tests.server.service import served

from .conftest import ANYTHING

pytestmark = pytest.mark.service
PROMPT = "a red circle left of a blue square"
WISH = Wish((Noun(colour="red", shape="circle"), Noun(colour="blue", shape="square")), "left of")


def pixels(data: str) -> np.ndarray:
    return np.asarray(PIL.Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB"))


def asked(base_url: str) -> None:
    """What a user writes, with the client that waits."""
    with openai.OpenAI(base_url=base_url, api_key=ANYTHING) as client:
        (model,) = client.models.list()
        *partial, last = client.images.generate(
            model=model.id, prompt=PROMPT, size="128x128", stream=True, partial_images=2, extra_body={"seed": 3}
        )
        assert judge(WISH, pixels(last.b64_json)).right
        assert [event.partial_image_index for event in partial] == [0, 1]
        late, final = (pixels(event.b64_json) for event in (partial[-1], last))
        small = np.asarray(PIL.Image.fromarray(final).resize(late.shape[1::-1], PIL.Image.Resampling.BOX))
        assert np.corrcoef(late.ravel(), small.ravel())[0, 1] > 0.6, "a partial image is like the image"
        few = {"seed": 3, "num_inference_steps": 2}
        one, other = (client.images.generate(prompt=PROMPT, size="64x64", extra_body=few) for _ in range(2))
        assert one.data[0].b64_json == other.data[0].b64_json, "the same seed"
        assert one.job_id != other.job_id
        with pytest.raises(openai.BadRequestError, match="nearest valid value: 128") as caught:
            client.images.generate(prompt=PROMPT, size="130x128")
        assert caught.value.param == "size"


async def test_the_bundled_model_through_the_official_client():
    settings = {"model": "demo", "port": 0, "http_port": 0, "device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
    config = EngineConfig.from_settings(**settings)
    checkpoint = open_model(config.model, apply=lambda found: apply_settings(config, found))
    executor = LocalExecutor(config, checkpoint)
    async with served(config, Engine(config, checkpoint, executor), executor) as service:
        await asyncio.to_thread(asked, service.http + "/v1")
