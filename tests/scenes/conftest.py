"""A state as tools.train_demo.run writes it, untrained, and the checkpoint that is made of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from diffusers import AutoencoderKLQwenImage
    from safetensors.torch import save_file

    from tools.train_demo import autoencoder
    from tools.train_demo.loop import Model
    from tools.train_demo.words import tokenizer

    folder = tmp_path_factory.mktemp("train-demo") / "state"
    folder.mkdir()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, vae = Model(len(tokenizer())), AutoencoderKLQwenImage(**autoencoder.CONFIG)
        for parameter in model.parameters():
            if not parameter.any():
                torch.nn.init.normal_(parameter, std=0.05)
    save_file({name: x.bfloat16() for name, x in model.state_dict().items()}, folder / "average.safetensors")
    save_file(dict(vae.state_dict()), folder / "vae.safetensors")
    log = {
        "data": 1,
        "seed": 1,
        "card": "no card",
        "scaling": {"mean": [0.1 * i - 0.7 for i in range(16)], "std": [0.5 + 0.1 * i for i in range(16)]},
        "vae": [{"step": 500, "l1": 0.01, "psnr": 40.25, "kl": 3.0}],
        "denoiser": [{"step": 1000, "loss": 0.123456}],
        "step": 1000,
        "accuracy": {"one": 0.96, "relation": 0.915, "ground": 1.0},
    }
    (folder / "log.json").write_text(json.dumps(log))
    return folder


@pytest.fixture(scope="session")
def exported(state: Path) -> Path:
    from tools.train_demo.export import export

    return export(state, state.parent / "shapes")
