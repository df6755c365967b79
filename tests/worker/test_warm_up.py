import random

import pytest
import torch

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.loading.loader import Loader
from omni_grpc.ops import tuning
from omni_grpc.ops.tuning import Choices, Shape
from omni_grpc.types.plan import CostModel
from omni_grpc.worker import warm_up as warm_up_module
from omni_grpc.worker.warm_up import fit, warm_up
from tools.tiny_checkpoints import build_wan_i2v

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


def test_the_step_of_the_usual_size_is_run_where_there_is_time_for_it(tiny_qwen_image, monkeypatch):
    from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline

    checkpoint = open_checkpoint(tiny_qwen_image, name="tiny")
    device = torch.device("cpu")
    pipeline = QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=device, dtype=torch.float32))
    kept, predict = Choices({}), pipeline.predict

    def asking(rows):
        latent = checkpoint.defaults.width // 16 * (checkpoint.defaults.height // 16)
        (row,) = rows.layout.rows
        assert latent < sum(row.lengths) < 2 * latent
        kept.of(Shape("product", (), 4), frozenset({"one"}), lambda shape, device: {})
        return predict(rows)

    monkeypatch.setattr(pipeline, "predict", asking)
    with kept.recorded() as wanted:
        warm_up_module.step_of_usual_size(pipeline, checkpoint, device, CostModel(token=1.0), seconds=0.5)
        assert not wanted, "it would take too long"
        warm_up_module.step_of_usual_size(pipeline, checkpoint, device, CostModel(token=1.0), seconds=60)
    assert list(wanted) == [Shape("product", (), 4)]


def test_on_a_gpu_kernels_are_chosen_for_what_the_steps_asked_for_the_last_first(monkeypatch):
    asked, kept, allowed = [], Choices({}), frozenset({"one", "other"})

    def ways(shape, device):
        asked.append(shape.size)
        return {"one": lambda: 2.0, "other": lambda: 1.0}

    def steps(*_):
        for size in (1, 10, 100):
            kept.of(Shape("product", (), size), allowed, ways)
        return CostModel(token=1.0)

    monkeypatch.setattr(warm_up_module, "choices", lambda device: kept)
    monkeypatch.setattr(warm_up_module, "fit_steps", steps)
    monkeypatch.setattr(
        warm_up_module, "step_of_usual_size", lambda *_: kept.of(Shape("product", (), 1000), allowed, ways)
    )
    monkeypatch.setattr(tuning, "cuda_clock", lambda call, calls: call())
    assert warm_up(None, None, torch.device("cuda"), seconds=60) == CostModel(token=1.0)
    assert asked == [1000, 100, 10, 1]
    assert kept.of(Shape("product", (), 10), allowed) == "other"


def test_a_warm_up_of_a_video_model_goes_on_to_more_frames(tmp_path, monkeypatch):
    checkpoint = open_checkpoint(build_wan_i2v(tmp_path / "wan"), name="tiny")
    seen = []
    monkeypatch.setattr(
        warm_up_module, "_measure", lambda pipeline, request, device: (seen.append(request), (1, 1.0))[1]
    )
    monkeypatch.setattr(warm_up_module, "fit", lambda samples: CostModel())
    warm_up(None, checkpoint, torch.device("cpu"), seconds=60)
    sizes = [(it.width, it.num_frames, it.num_outputs) for it in seen]
    assert sizes == [
        (16, 5, 1), (16, 5, 2), (32, 5, 1), (32, 5, 2), (64, 5, 1), (64, 5, 2), (128, 5, 1), (128, 5, 2), (256, 5, 1),
        (256, 9, 1), (256, 21, 1), (256, 41, 1), (256, 81, 1),
    ]  # fmt: skip
    assert all(it.inputs.first_frame.width == it.width for it in seen), "what the task needs is there"
