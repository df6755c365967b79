"""What `doctor --advise` reads of a model of the hub: configs, and the beginnings of the weights."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
from safetensors.numpy import save

from .conftest import NEEDED

LOOK = """
import json, sys
from omni_grpc.checkpoint import hub
folder, found = hub.headers("tiny-org/tiny")
files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
print(json.dumps([found, files]))
"""


def test_no_weight_is_downloaded(hub, environment):
    weights = {path: save({"blocks.0.w": np.zeros((4, 3), np.float16)}) for path in NEEDED if path.endswith("tensors")}
    hub.add("tiny-org/tiny", NEEDED | weights)
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True, check=True)
    found, files = json.loads(done.stdout)
    tensors = {"blocks.0.w": ["F16", [4, 3]]}
    assert found == {"text_encoder": [tensors], "transformer": [tensors] * 2, "vae": [tensors]}
    assert not [file for file in files if file.endswith(".safetensors")]
    assert sorted(hub.ranges) == sorted(f"{path} 0" for path in weights)
