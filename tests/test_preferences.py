"""What a checkpoint says of itself: its defaults, its colours of latents, and the words that it knows."""

import json
import pickle
import shutil

import pytest

from omni_grpc import Omni
from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.client import AsyncClient
from omni_grpc.config import EngineConfig, LimitsConfig
from omni_grpc.engine import Engine, LocalExecutor
from omni_grpc.fleet import Fleet
from omni_grpc.gate import Gate
from omni_grpc.resolve.request import resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.server import Server
from omni_grpc.types.errors import CheckpointError
from omni_grpc.types.events import Started, StepProgress
from omni_grpc.types.media import ImageFormat, Preview
from omni_grpc.types.request import Draft, GuidanceNorm
from omni_grpc.types.spec import LatentRgb

RED = [[0.0, 0.0, 0.0]] * 16
SAID = {
    "defaults": {"width": 48, "height": 32, "steps": 2, "negative_prompt": "", "guidance": {"true_cfg_scale": 3.0}},
    "latent_rgb": {"factors": RED, "bias": [1.0, -1.0, -1.0]},
}
WORDS = ["2", "a", "circle", "disc-like", "left", "of", "plus", "red", "sign"]


@pytest.fixture(scope="module")
def said(tiny_qwen_image, tmp_path_factory):
    """A tiny checkpoint with preferences, whose tokenizer lists its words."""
    folder = shutil.copytree(tiny_qwen_image, tmp_path_factory.mktemp("preferences") / "said")
    (folder / "omni_grpc.json").write_text(json.dumps(SAID))
    file = folder / "tokenizer" / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"known_words": WORDS}))
    return folder


@pytest.fixture(scope="module")
def omni(said):
    with Omni(str(said), device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
        yield omni


def resolved(folder, prompt="a red circle", **changes):
    facts = ServingFacts(open_checkpoint(folder, name="m"), LimitsConfig())
    return resolve_request(Draft(model="m", prompt=prompt, **changes), facts, id="job")


def unknown(folder, prompt, **changes):
    return {w.field: w.requested for w in resolved(folder, prompt, **changes).warnings if w.code == "UNKNOWN_WORDS"}


def test_defaults_of_a_checkpoint_win_over_those_of_its_family(said, tiny_qwen_image):
    own, usual = resolved(said), resolved(tiny_qwen_image)
    assert (usual.request.width, usual.request.steps, usual.request.negative_prompt) == (1024, 50, None)
    request = own.request
    assert (request.width, request.height, request.steps, request.negative_prompt) == (48, 32, 2, "")
    assert (request.guidance.true_cfg_scale, request.guidance.norm) == (3.0, GuidanceNorm.RENORM)
    assert own.defaults_used.items() >= {"width": "48", "sampling.steps": "2", "negative_prompt": ""}.items()
    assert resolved(said, width=64, steps=5).request.width == 64
    # the server sends it to its worker
    assert pickle.loads(pickle.dumps(open_checkpoint(said))).latent_rgb == LatentRgb(
        factors=tuple(map(tuple, RED)), bias=(1.0, -1.0, -1.0)
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"default": {}}, "has an unknown entry 'default'; known entries: defaults, latent_rgb"),
        (
            {"defaults": {"size": 3}},
            r"unknown entry 'defaults\.size'; known entries: width, height, steps, negative_prompt",
        ),
        ({"defaults": {"steps": 0}}, r"defaults\.steps has an invalid value: 0"),
        ({"defaults": {"steps": True}}, r"defaults\.steps has an invalid value: True"),
        ({"defaults": {"guidance": {"norm": "NORM"}}}, r"defaults\.guidance\.norm has an invalid value: 'NORM'"),
        ({"defaults": {"guidance": {"interval_end": 2}}}, r"defaults\.guidance\.interval_end has an invalid value: 2"),
        ({"defaults": {"width": 100}}, r"defaults\.width is 100, expected a multiple of 16 from 16 to 4096"),
        ({"latent_rgb": {"factors": [[1, 2]]}}, r"latent_rgb\.factors has an invalid value"),
        ({"latent_rgb": {"bias": [1, 2, 3]}}, "latent_rgb has no factors"),
        ([], "contains a JSON list"),
    ],
)
def test_preferences_that_cannot_be_are_refused_with_the_file(tiny_qwen_image, tmp_path, content, message):
    folder = shutil.copytree(tiny_qwen_image, tmp_path / "tiny")
    (folder / "omni_grpc.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(folder)
    assert "omni_grpc.json" in str(caught.value)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("A red circle, left of 2 circle.", None),
        ("a red zebra", "zebra"),
        ("a zebra (ZEBRA) under 'red' skies!", "zebra ZEBRA under skies"),
        ("a red-circle plus-sign disc-like", None),
        ("a red-hot circle", "red-hot"),
        ("\u4e00\u53ea\u732b a red circle \u2764", "\u4e00\u53ea\u732b"),
        ("? !", None),
        (" ".join(f"x{i}" for i in range(14)), " ".join(f"x{i}" for i in range(10))),
    ],
)
def test_words_that_the_model_never_saw_are_named(said, prompt, words):
    assert unknown(said, prompt).get("prompt") == words


def test_words_of_a_negative_prompt_count_where_it_is_used(said, tiny_qwen_image):
    assert unknown(said, "a zebra", negative_prompt="blurry") == {"prompt": "zebra", "negative_prompt": "blurry"}
    assert unknown(tiny_qwen_image, "a zebra", negative_prompt="blurry") == {}


def test_the_engine_warns_at_the_start_and_at_the_end(omni):
    events = []
    made = omni.generate("a red zebra", negative_prompt="blurry", seed=1, on_event=events.append)
    assert [(w.code, w.field, w.requested) for w in made.warnings] == [
        ("UNKNOWN_WORDS", "prompt", "zebra"),
        ("UNKNOWN_WORDS", "negative_prompt", "blurry"),
    ]
    assert made.warnings[0].message.startswith("'zebra': the model was not trained on this word")
    (started,) = (event for event in events if isinstance(event, Started))
    assert started.warnings == made.warnings
    assert (made.effective.width, made.effective.height, made.effective.steps, made.effective.evals) == (48, 32, 2, 2)
    assert omni.generate("a red circle", seed=1).warnings == ()


def test_previews_have_the_colours_that_the_checkpoint_says(omni):
    draft = Draft(model="said", prompt="a red circle", seeds=(1,), preview=Preview(format=ImageFormat.RAW_RGB8))
    events = list(omni.stream(draft))
    assert sum(isinstance(event, StepProgress) for event in events) == 2
    job = omni._engine.jobs.newest()[0]
    assert {tuple(preview.data[:3]) for preview in job.previews} == {(255, 0, 0)}


async def test_the_server_warns_too_and_tells_the_defaults(said):
    config = EngineConfig.from_settings(model=str(said), port=0, device="cpu", cpu_threads=1, warm_up_seconds=0)
    checkpoint = open_checkpoint(said)
    server = Server(Gate(Fleet.of(engine := Engine(config, checkpoint, LocalExecutor(config, checkpoint)))), config)
    assert engine.checkpoint.name == "said"
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{server.port}") as client:
            (model,) = await client.list_models()
            made = await client.generate_image("a red zebra", seed=1)
    finally:
        await server.stop()
    assert (model.limits.default_width, model.limits.default_height, model.defaults.steps) == (48, 32, 2)
    assert [(w.code, w.field, w.requested) for w in made.warnings] == [("UNKNOWN_WORDS", "prompt", "zebra")]
    assert made.images[0].size == (48, 32)
