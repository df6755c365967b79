"""Models and adapters: what the form offers follows the model, and two models are compared."""

from __future__ import annotations

import json

import grpc
import pytest
import safetensors.torch
import torch

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import admin_pb2, admin_pb2_grpc
from tests.web_page.studio import ROOT, http_served

DEMO = ROOT / "omni_grpc" / "demo"
LAYER = "transformer.transformer_blocks.0.attn.to_q"


@pytest.fixture(scope="module")
def studio(tmp_path_factory):
    """The bundled model as it is, with an adapter, and the same with weights in FP8."""
    config = json.loads((DEMO / "transformer" / "config.json").read_text())
    width = config["num_attention_heads"] * config["attention_head_dim"]
    adapter = tmp_path_factory.mktemp("loras") / "style.safetensors"
    halves = {"lora_A": torch.ones(2, width) / width, "lora_B": torch.ones(width, 2) / 4}
    safetensors.torch.save_file({f"{LAYER}.{name}.weight": half for name, half in halves.items()}, adapter)
    with http_served(DEMO, "--lora", f"style={adapter}", "--model-roots", str(DEMO.parent)) as server:
        with grpc.insecure_channel(server.grpc.address, options=DIRECT) as channel:
            wanted = admin_pb2.LoadModelRequest(model="eight")
            wanted.engine_options.update({"model": str(DEMO), "quantization": "fp8", "lora": {}})
            assert list(admin_pb2_grpc.AdminServiceStub(channel).LoadModel(wanted))[-1].model.name == "eight"
        yield server


def test_the_form_follows_the_model(studio, open_tab):
    tab = open_tab(studio)
    adapters = tab.page.get_by_role("group", name="LoRA adapters")
    adapters.get_by_role("button", name="Add an adapter").click()
    tab.field("Model").select_option("eight")
    tab.page.get_by_text("layers fp8").wait_for()
    assert adapters.count() == 0
    # what was chosen of the other model is left out
    job = tab.generate(steps=2)
    tab.wait(job)


def test_an_adapter_with_its_scale(studio, open_tab):
    tab = open_tab(studio)
    adapters = tab.page.get_by_role("group", name="LoRA adapters")
    adapters.get_by_role("button", name="Add an adapter").click()
    adapters.get_by_label("Scale").fill("0.5")
    job = tab.generate(steps=2)
    tab.wait(job)
    tab.card(job).get_by_role("heading").get_by_role("link").click()
    assert "LoRA\tstyle x 0.5" in tab.page.get_by_role("table", name="What was done").inner_text()


def test_one_seed_by_two_models(studio, open_tab):
    tab = open_tab(studio)
    tab.page.get_by_text("Compare two settings").click()
    tab.page.get_by_label("Make a second one").check()
    tab.page.get_by_role("group", name="The second has otherwise").get_by_label("Model").select_option("eight")
    tab.fill(steps=8, seed=3)
    tab.button("Generate both").click()
    tab.page.locator(".psnr").filter(has_text="dB").wait_for()
    differ = tab.page.get_by_role("table", name="What differs").inner_text()
    assert "model\tdemo\teight" in differ
    assert "fp8 (" in differ
