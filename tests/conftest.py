"""What every test may share."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path

import pytest

# a shell starts its background jobs with SIGINT ignored, which every process below inherits: a test of Ctrl-C would
# wait for ever for what it has started
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup does the same with SIGHUP
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


# kernels that no GPU has run yet are there to be tested (omni_grpc/ops/lora.py)
os.environ.setdefault("OMNI_UNPROVEN_KERNELS", "1")


@pytest.fixture(scope="session")
def tiny_qwen_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen-Image checkpoint with random weights, in the diffusers layout. Copy it before changing it."""
    from tools.tiny_checkpoints import build_qwen_image  # here, so that tests without a model do not load torch

    return build_qwen_image(tmp_path_factory.mktemp("checkpoints") / "tiny-qwen-image")


def pytest_collection_finish() -> None:
    """What the imports of all test files made lives as long as the run. Left out of garbage collections, it does not
    cost those that tests ask for a quarter of a second each.
    """
    gc.collect()
    gc.freeze()
