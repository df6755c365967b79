"""`models` without a server: the registry, and what can be turned on for each model in it."""

import json

import pytest

from omni_grpc.checkpoint.registry import specs
from omni_grpc.cli import listing
from omni_grpc.config import DIFFUSERS_CACHES
from tests.house.test_imports import HEAVY, loaded_by


async def test_the_registry_is_listed(run):
    head, *rows = (await run("models")).out.splitlines()
    assert head.split() == ["PIPELINE", "FAMILY", "TASKS", "README"]
    assert [row.split()[0] for row in rows] == sorted(specs())
    (kontext,) = (row.split(maxsplit=2) for row in rows if row.startswith("FluxKontext"))
    assert kontext[:2] == ["FluxKontextPipeline", "flux"]
    assert kontext[2].startswith("TEXT_TO_IMAGE, IMAGE_EDIT  ")
    assert kontext[2].endswith("models/flux/README.md")
    records = json.loads((await run("models", "--json")).out)
    assert [record["pipeline"] for record in records] == sorted(specs())
    assert records[0].keys() == {"pipeline", "family", "tasks", "readme"}


async def test_features_are_those_that_a_server_would_start_with(run):
    records = {r["pipeline"]: r["features"] for r in json.loads((await run("models", "--features", "--json")).out)}
    assert records["FluxPipeline"] == {
        "step_cache": ["auto", "tea_cache", "first_block", "cache_dit", "sea_cache"],
        "quantization": ["fp8", "int8", "gguf"],
        "lora": True,
        "layerwise_offload": True,
        "component_offload": True,
        "tensor_parallel": True,
        "guidance": "by checkpoint",
        "schedulers": ["FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"],
    }
    assert (records["HeliosPipeline"]["tensor_parallel"], records["HeliosPipeline"]["guidance"]) == (
        True,
        ["TRUE_CFG"],
    )
    other = records["any other"]
    assert other["step_cache"] == list(DIFFUSERS_CACHES)
    assert (other["quantization"], other["lora"], other["component_offload"]) == ([], True, True)
    table = (await run("models", "--features")).out.splitlines()
    (qwen,) = (row.split() for row in table if row.startswith("QwenImage"))
    assert qwen == [
        "QwenImagePipeline",
        *("auto,", "tea_cache,", "first_block,", "cache_dit,", "sea_cache"),
        "fp8,",
        "int8,",
        "gguf",
        "yes",
        "yes",
        "yes",
        "yes",
        "TRUE_CFG",
        "-",
    ]
    assert table[0].startswith("PIPELINE ")
    assert "LAYERWISE OFFLOAD" in table[0]


async def test_features_are_not_asked_of_a_server(run, server):
    done = await run("models", "--features", *server)
    assert (done.code, "not allowed with argument" in done.err) == (2, True)


@pytest.mark.parametrize("arguments", [["models"], ["models", "--features"]])
def test_it_loads_no_torch(arguments):
    assert not loaded_by(f"from omni_grpc.cli.main import main\nmain({arguments})") & HEAVY


def test_a_model_without_a_page_has_a_dash():
    record = {"pipeline": "P", "family": "f", "tasks": ["TEXT_TO_IMAGE"], "readme": None}
    assert listing.models_table([record])[1] == ("P", "f", "TEXT_TO_IMAGE", "-")
