import random

import pytest
import torch

from omni_grpc.loading.loader import Loader
from omni_grpc.plan import CostModel
from omni_grpc.registry import open_checkpoint
from omni_grpc.worker.warm_up import fit, warm_up

SHAPES = [(16,), (64,), (64, 64), (256,), (1024,), (1024, 1024), (4096,)]


def samples(cost, noise=0.0, seed=0):
    rng = random.Random(seed)
    return [(rows, cost.step_ms(rows) * (1 + noise * rng.uniform(-1, 1))) for rows in SHAPES]


@pytest.mark.parametrize(
    "truth",
    [
        CostModel(fixed=3.0, token=0.01, pair=2e-6),
        CostModel(fixed=0.0, token=0.02, pair=0.0),
        CostModel(fixed=5.0, token=0.0, pair=1e-6),
    ],
)
def test_the_fit_finds_the_model_that_made_the_times(truth):
    found = fit(samples(truth))
    for rows in [*SHAPES, (100, 300), (2048,)]:
        assert found.step_ms(rows) == pytest.approx(truth.step_ms(rows), rel=1e-6)


def test_a_noisy_fit_is_close_and_never_negative():
    truth = CostModel(fixed=3.0, token=0.01, pair=2e-6)
    for seed in range(20):
        found = fit(samples(truth, noise=0.2, seed=seed))
        assert min(found.fixed, found.token, found.pair) >= 0
        for rows in SHAPES:
            assert found.step_ms(rows) == pytest.approx(truth.step_ms(rows), rel=0.5)


def test_times_that_fall_with_size_do_not_break_the_fit():
    assert fit([((16,), 10.0), ((64,), 8.0), ((256,), 5.0)]).step_ms((16,)) > 0
    assert fit([((16,), 10.0)]).step_ms((16,)) == pytest.approx(10.0)


def test_without_time_nothing_is_measured():
    assert fit([]) == CostModel()


def test_a_warm_up_predicts_growing_steps(tiny_qwen_image):
    from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline

    checkpoint = open_checkpoint(tiny_qwen_image, name="tiny")
    device = torch.device("cpu")
    pipeline = QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=device, dtype=torch.float32))
    cost = warm_up(pipeline, checkpoint, device, seconds=60)
    assert 0 < cost.step_ms((20,)) < cost.step_ms((4096,))
    assert warm_up(pipeline, checkpoint, device, seconds=0) == CostModel()
