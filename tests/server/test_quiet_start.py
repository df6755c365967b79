"""What a start says: one line on stdout that is true of the model, and on stderr nothing that is for developers."""

import dataclasses
import logging
import os
import re
import subprocess
import sys

import pytest

from omni_grpc.cli.serve import _announce
from omni_grpc.ops.tuning import measure
from omni_grpc.types.findings import WorkerFindings

from .fake_executor import READY
from .process import ROOT, served
from .service import serving


@pytest.mark.parametrize(
    ("layers", "dtype", "said"),
    [
        ({}, "bfloat16", "cpu bfloat16"),
        ({"fp8": 40}, "bfloat16", "cpu fp8 weights, bfloat16 activations"),
        ({"int8": 40}, "float32", "cpu int8 weights, float32 activations"),
        ({"gguf Q8_0": 3, "gguf Q4_K": 9}, "bfloat16", "cpu gguf Q4_K and gguf Q8_0 weights, bfloat16 activations"),
    ],
)
async def test_the_ready_line_says_what_is_computed_in(layers, dtype, said, capsys):
    found = WorkerFindings(quantized_layers=layers)
    async with serving(dataclasses.replace(READY, dtype=dtype, found=found)) as service:
        _announce(service.fleet, service.server)
        port = service.server.port
    line = capsys.readouterr().out
    assert line.endswith(f"listening on 127.0.0.1:{port} (model toy, {said})\n")


async def test_the_ready_line_tells_of_all_interfaces_at_an_address_to_dial(capsys):
    async with serving(host="[::]", insecure=True) as service:
        _announce(service.fleet, service.server)
        port = service.server.port
    assert f"listening on [::1]:{port} (model toy, cpu float32, all interfaces)\n" in capsys.readouterr().out


@pytest.mark.service
def test_a_model_through_diffusers_starts_without_a_word_of_the_libraries(tmp_path):
    from tools.tiny.images import build_stable_diffusion  # here, so that the other tests do not load torch

    folder = build_stable_diffusion(tmp_path / "sd")
    with served(folder, tmp_path, "--warm-up-seconds", "0", "--state-dir", str(tmp_path / "jobs")) as server:
        server.generate(steps=2)
        assert server.stop() == (0, "")
        log = server.log.read_text()
    ours = re.compile(r"\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING) (omni_grpc[\w.]*|worker|decoder): ")
    assert [line for line in log.splitlines() if not ours.match(line)] == []
    assert "pipe has ended" not in log


def test_a_kernel_that_does_not_run_here_is_not_told(caplog):
    def fails():
        raise RuntimeError("no kernel image")

    with caplog.at_level(logging.INFO):
        assert measure({"a": fails}, lambda call, calls: call()) == {}
    assert caplog.records == []


def test_warnings_of_libraries_are_left_out_and_ours_are_not():
    script = (
        "import logging, warnings; from omni_grpc.types.library_logs import quiet_libraries; quiet_libraries()\n"
        "for name in ('torch.nn.utils', 'torchao', 'omni_grpc.ops.library'):\n"
        "    warnings.warn_explicit(f'from {name}', UserWarning, 'file.py', 1, module=name)\n"
        "logging.getLogger('torchao').warning('skipping import of cpp extensions')\n"
        "logging.getLogger('diffusers').error('an error')\n"
    )
    environment = {name: value for name, value in os.environ.items() if "VERBOSITY" not in name}

    def said(**more: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment | more, capture_output=True, text=True, check=True
        ).stderr

    quiet = said()
    assert "from omni_grpc.ops.library" in quiet
    assert "an error" in quiet
    for words in ("from torch", "cpp extensions"):
        assert words not in quiet
    assert "from torch.nn" in said(PYTHONWARNINGS="default")
