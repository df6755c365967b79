"""What the warm-up measures of memory is what the device was asked for, whatever law it follows."""

import dataclasses
import gc
import math
import random
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from omni_grpc.checkpoint.registry import open_checkpoint
from omni_grpc.config import EngineConfig
from omni_grpc.loading.loader import Loader
from omni_grpc.models.qwen_image.pipeline_text_to_image import QwenImagePipeline
from omni_grpc.omni import Omni
from omni_grpc.resolve.request import placeholder
from omni_grpc.types.errors import ResourceExhausted
from omni_grpc.types.memory_model import MARGIN, MemoryModel, StepLaw
from omni_grpc.types.plan import CostModel
from omni_grpc.worker import measure
from omni_grpc.worker.fitting import upper
from omni_grpc.worker.measure import GRAPHS, Sample, _sample, fit_memory, measured, memory_budget, with_capacity
from omni_grpc.worker.warm_up import fit_steps, step_of_usual_size

CPU = torch.device("cpu")


class FakeMeter:
    """A device that work takes bytes from, and gives some of them back to."""

    def __init__(self, there=1 << 40, weights=1 << 30):
        self.there, self.taken, self.most = there, weights, weights

    def take(self, peak, keep=0):
        self.most = max(self.most, self.taken + peak)
        self.taken += keep

    def allocated(self):
        return int(self.taken)

    def peak(self, work):
        self.most = self.taken
        return work(), int(self.most)

    def available(self):
        return self.there


class Law:
    """Bytes of each phase of one request, with coefficients drawn at random."""

    def __init__(self, seed):
        rng = random.Random(seed)
        draw = lambda most: rng.choice([0.0, rng.uniform(0, most)])  # noqa: E731
        self.fixed, self.token, self.longest = draw(1e7), rng.uniform(1e3, 1e5), draw(1e5)
        self.decode_fixed, self.pixel = draw(1e7), rng.uniform(10, 1e4)
        self.prepare_fixed, self.encoder, self.a_step = draw(1e9), draw(100), draw(1e6)
        self.row, self.held = draw(1e6), rng.uniform(10, 1e4)

    def step(self, rows):
        return self.fixed + self.token * sum(rows) + self.longest * max(rows)

    def decode(self, area):
        return self.decode_fixed + self.pixel * area

    def kept(self, rows, steps):
        return self.row * len(rows) + self.held * sum(rows) + self.a_step * steps

    def prepare(self, area):
        return self.prepare_fixed + self.encoder * area


@pytest.fixture(scope="module")
def pipeline(tiny_qwen_image):
    checkpoint = open_checkpoint(tiny_qwen_image, name="tiny")
    return QwenImagePipeline.load(Loader(checkpoint=checkpoint, device=CPU, dtype=torch.float32))


@pytest.fixture
def metered(pipeline, monkeypatch):
    """The pipeline on a device that takes by a law: `metered(law)` is the meter of it."""

    def start(law):
        meter = FakeMeter()
        prepare, predict, decode = pipeline.prepare, pipeline.predict, pipeline.decode

        def taking_prepare(request):
            states = prepare(request)
            rows = [sum(cond.row.lengths) for state in states for cond in state.cond.values()]
            kept = law.kept(rows, request.steps)
            meter.take(kept + law.prepare(request.width * request.height), kept)
            return states

        def taking_predict(batch):
            meter.take(law.step([sum(row.lengths) for row in batch.layout.rows]))
            return predict(batch)

        def taking_decode(state, latents):
            meter.take(law.decode(state.request.width * state.request.height))
            return decode(state, latents)

        monkeypatch.setattr(pipeline, "prepare", taking_prepare)
        monkeypatch.setattr(pipeline, "predict", taking_predict)
        monkeypatch.setattr(pipeline, "decode", taking_decode)
        return meter

    return start


@pytest.fixture
def few(monkeypatch):
    """Sizes that a CPU has time for."""
    edges = [(32, 1), (32, 2), (64, 1), (64, 2), (128, 1), (128, 2)]
    monkeypatch.setattr(measure, "sizes", lambda checkpoint: [(edge, 0, outputs) for edge, outputs in edges])


@pytest.mark.parametrize("seed", range(2))
def test_the_model_finds_the_law_that_the_device_follows(pipeline, metered, few, seed):
    law = Law(seed)
    config = EngineConfig.from_settings(model="tiny", warm_up_seconds=600)
    model, left = measured(pipeline, pipeline.checkpoint, CPU, config, metered(law))
    assert 300 <= left < 600
    model = dataclasses.replace(model, capacity=1e15)
    for size, outputs in [(32, 1), (64, 2), (256, 1), (512, 3), (1024, 1)]:
        request = placeholder(pipeline.checkpoint, size=size, outputs=outputs)
        request = dataclasses.replace(request, steps=30, negative_prompt="blurry")
        need = model.need(request)
        longest = pipeline.checkpoint.limits.max_prompt_tokens
        assert need.rows == (need.rows[0],) * 2 * outputs
        assert (size // 16) ** 2 < need.rows[0] <= (size // 16) ** 2 + longest
        assert need.step == pytest.approx(law.step(need.rows), rel=1e-3)
        assert need.decode == pytest.approx(law.decode(size * size), rel=1e-3)
        assert need.held == pytest.approx(law.kept(need.rows, 60), rel=1e-3, abs=1e3)
        assert need.prepare == pytest.approx(law.prepare(size * size), rel=1e-3, abs=1e5)


def test_a_device_that_is_too_small_for_the_usual_size_is_measured_with_smaller_ones(pipeline, few, monkeypatch):
    """Nor does the cost model need the larger ones: what does not fit is left out there."""
    meter, predict, tried = Storages(), pipeline.predict, []

    def too_small(batch):
        tried.append(sum(sum(row.lengths) for row in batch.layout.rows))
        if tried[-1] > 1100:
            raise torch.OutOfMemoryError("the device is full")
        return predict(batch)

    monkeypatch.setattr(pipeline, "predict", too_small)
    config = EngineConfig.from_settings(model="tiny", warm_up_seconds=600, cuda_graph_tokens=0)
    model, _ = measured(pipeline, pipeline.checkpoint, CPU, config, meter)
    assert tried[-1] > 1100
    model = dataclasses.replace(model, capacity=1e15)
    model = dataclasses.replace(model, capacity=model.need(placeholder(pipeline.checkpoint, size=64, outputs=1)).alone)
    tried.clear()
    cost = fit_steps(pipeline, pipeline.checkpoint, CPU, 600, fits=model.fits)
    assert cost != CostModel()
    assert max(tried) < 300
    before = len(tried)
    step_of_usual_size(pipeline, pipeline.checkpoint, CPU, cost, 600, fits=model.fits)
    assert len(tried) == before


class Storages(TorchDispatchMode):
    """Counts the bytes of all tensors that are made and alive, on a CPU."""

    def __init__(self):
        super().__init__()
        self.taken, self.most, self.known = 0, 0, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self.add(tensor.untyped_storage())
        return result

    def add(self, storage):
        if storage not in self.known:
            self.known.add(storage)
            self.taken += storage.nbytes()
            self.most = max(self.most, self.taken)
            weakref.finalize(storage, self.remove, storage.nbytes())

    def remove(self, size):
        self.taken -= size

    def allocated(self):
        gc.collect()
        return self.taken

    def peak(self, work):
        self.most = self.taken
        with self:
            return work(), self.most

    def available(self):
        return 1 << 40


@torch.inference_mode()
def test_what_was_measured_foretells_what_larger_requests_take(pipeline, few):
    """With a meter of what torch really allocates: a size that was not measured, and other numbers of outputs."""
    config = EngineConfig.from_settings(model="tiny", warm_up_seconds=600)
    meter = Storages()
    model, _ = measured(pipeline, pipeline.checkpoint, CPU, config, meter)
    model = dataclasses.replace(model, capacity=1e15)
    limits = pipeline.checkpoint.limits
    for size, outputs in [(256, 1), (384, 1), (192, 3)]:
        request = placeholder(pipeline.checkpoint, size=size, outputs=outputs)
        took = _sample(pipeline, request, CPU, meter, limits)
        need = model.need(request, took.rows)
        assert model.rows(request)[0] >= took.rows[0], "a prompt can be longer than this one"
        for phase in ("step", "decode"):
            assert 0.99 <= getattr(need, phase) / getattr(took, phase) < 1.5, (size, outputs, phase)
        assert need.held >= took.held
        assert need.alone >= took.held + max(took.prepare, took.step, took.decode)


def test_no_sample_took_more_than_is_predicted_of_it():
    """Also where the device follows no law: then the prediction is as much too high as that takes."""
    for seed in range(200):
        check_noisy(seed)


def check_noisy(seed):
    rng = random.Random(seed)
    law, samples = Law(seed), []
    for edge in (32, 64, 128, 256, 512):
        rows, steps = (edge * edge // 256 + 20,) * rng.choice([1, 2]), rng.choice([1, 9])
        wrong = [rng.uniform(0.7, 1.3) for _ in range(4)]
        samples.append(
            Sample(
                rows=rows, area=edge**2, volume=edge**2, steps=steps, held=int(wrong[0] * law.kept(rows, steps)),
                prepare=int(wrong[1] * law.prepare(edge**2)), step=int(wrong[2] * law.step(rows)),
                decode=int(wrong[3] * law.decode(edge**2)),
            )
        )  # fmt: skip
    model = fit_memory(samples, MemoryModel())
    for one in samples:
        assert model.step.of(one.rows) >= one.step * (1 - 1e-9)
        assert model.held.of(one.rows, one.steps) >= one.held * (1 - 1e-9)
        assert model.decode.of(one.area, one.volume) >= one.decode * (1 - 1e-9)
        assert model.prepare.of(one.area, one.volume) + model.prepare_step * one.steps >= one.prepare * (1 - 1e-9)
        assert model.row.of(one.area, one.volume) >= max(one.rows) * (1 - 1e-9)
    largest = samples[-1]
    assert model.step.of(largest.rows) < 2 * largest.step, "and it is not out of all proportion"
    assert model.decode.of(largest.area, largest.volume) < 2 * largest.decode


def test_an_upper_law_of_nothing_is_nothing():
    assert upper([(1.0, 2.0), (1.0, 4.0)], [0, 0]) == (0.0, 0.0)
    assert upper([], []) == ()


def test_on_a_cpu_and_without_a_warm_up_nothing_is_limited(pipeline):
    config = EngineConfig.from_settings(model="tiny", warm_up_seconds=60)
    model, left = measured(pipeline, pipeline.checkpoint, CPU, config)
    assert left == 60
    assert not with_capacity(model, CPU, config).limited
    off = EngineConfig.from_settings(model="tiny", warm_up_seconds=0)
    unmeasured, _ = measured(pipeline, pipeline.checkpoint, CPU, off, FakeMeter())
    assert not with_capacity(unmeasured, CPU, off, FakeMeter()).limited


def test_the_capacity_is_what_weights_and_graphs_leave_less_a_margin():
    config = EngineConfig.from_settings(model="tiny", warm_up_seconds=60, cuda_graph_tokens=0)
    model = MemoryModel(step=StepLaw(token=1.0))
    meter = FakeMeter(there=24 << 30, weights=10 << 30)
    assert with_capacity(model, CPU, config, meter).capacity == pytest.approx((1 - MARGIN) * (14 << 30))
    graphs = EngineConfig.from_settings(model="tiny", warm_up_seconds=60)
    capacity = with_capacity(model, CPU, graphs, meter).capacity
    assert capacity == pytest.approx((1 - MARGIN) * ((14 << 30) - GRAPHS))
    # what adapters may take later is nobody else's
    later = with_capacity(model, CPU, config, meter, coming=2 << 30).capacity
    assert later == pytest.approx((1 - MARGIN) * (12 << 30))
    full = FakeMeter(there=8 << 30, weights=10 << 30)
    assert with_capacity(model, CPU, config, full).capacity == 0


def test_a_budget_is_read_where_there_is_such_a_setting():
    assert memory_budget(EngineConfig.from_settings(model="toy")) == math.inf
    assert memory_budget(EngineConfig.from_settings(model="toy", gpu_memory_budget=1.5)) == 1.5 * 2**30


def test_an_engine_refuses_by_what_its_worker_has_measured_and_makes_what_it_names(tiny_qwen_image, few, monkeypatch):
    class Small(Storages):
        """A device of 24 MiB."""

        def available(self):
            return 24 << 20

    meter = Small()
    monkeypatch.setattr(measure, "meter_of", lambda device: meter)
    with Omni(str(tiny_qwen_image), device="cpu", cpu_threads=1, warm_up_seconds=1, cuda_graph_tokens=0) as omni:
        with pytest.raises(ResourceExhausted, match="is predicted to need") as caught:
            omni.generate("a star", width=1024, height=512, steps=1)
        assert caught.value.reason == "MEMORY_PREDICTED"
        named = {one.field: one.description for one in caught.value.violations}["width"]
        width, height = map(int, named.removeprefix("the same shape fits as ").split(" x "))
        assert width == 2 * height < 1024
        assert omni.generate("a star", width=width, height=height, steps=1).images[0].size == (width, height)


@pytest.mark.gpu
def test_on_a_gpu_a_request_takes_no_more_than_is_predicted_of_it(tiny_qwen_image):
    torch.cuda.empty_cache()
    with Omni(str(tiny_qwen_image), device="cuda", warm_up_seconds=5, cuda_graph_tokens=0) as omni:
        memory = omni._engine.replicas[0].scheduler.memory
        assert 0 < memory.capacity < torch.cuda.get_device_properties(0).total_memory
        request = placeholder(omni.checkpoint, size=1536, outputs=2)
        rest = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        omni.generate("a star", width=1536, height=1536, steps=2, num_outputs=2, true_cfg_scale=1.0, seed=1)
        took = torch.cuda.max_memory_allocated() - rest
        assert 0.8 < memory.need(request).alone / took < 4
