"""vLLM-Omni's Python names: what they give, and what they refuse."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL.Image
import pytest

from omni_grpc import compat
from omni_grpc.engine import JobState
from omni_grpc.engine.replica import Replica
from omni_grpc.types.errors import Code, ConfigError, InvalidArgument, OmniError
from omni_grpc.types.events import Event
from omni_grpc.types.plan import Stepped
from omni_grpc.types.request import Task
from tests.features.suite import FIRST, Suite
from tests.models.cases import ENTRIES

LOCAL = {"device": "cpu", "cpu_threads": 1, "warm_up_seconds": 0}
SMALL = {"width": 32, "height": 32, "num_inference_steps": 2, "seed": 7}


def params(**changes: Any) -> compat.OmniDiffusionSamplingParams:
    return compat.OmniDiffusionSamplingParams(**(SMALL | changes))


@pytest.fixture(scope="module")
def omni(tiny_qwen_image: Path):
    with compat.Omni(str(tiny_qwen_image), **LOCAL) as omni:
        yield omni


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(ENTRIES["QwenImagePipeline"], tmp_path_factory.mktemp("qwen"))


def files(outputs: list[compat.DiffusionOutput]) -> list[tuple[bytes, ...]]:
    assert all(output.generation for output in outputs)
    return [output.generation.files for output in outputs if output.generation]


def levels_apart(one: compat.DiffusionOutput, other: compat.DiffusionOutput) -> int:
    """The largest difference of two pictures, in levels of 256."""
    first, second = (np.asarray(output.images[0], dtype=int) for output in (one, other))
    return int(np.abs(first - second).max())


# --- what is not there ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "error", "field"),
    [
        (lambda: compat.OmniDiffusionConfig(enable_sleep_mode=True), ConfigError, "enable_sleep_mode"),
        (lambda: compat.OmniDiffusionConfig(quantization="int8", quantization_config="int8"), ConfigError, None),
        (lambda: compat.OmniDiffusionConfig(max_num_seqs=0), ConfigError, "max_num_seqs"),
        (lambda: compat.Omni("m", quantization="nf4"), ConfigError, "quantization"),
        (lambda: compat.Omni("m", dtype="fp16"), ConfigError, "dtype"),
        (lambda: compat.Omni("m", stage_configs_path="x"), ConfigError, "stage_configs_path"),
        (lambda: compat.Omni("m", od_config=compat.OmniDiffusionConfig()), ConfigError, "model"),
        (
            lambda: compat.Omni("m", ring_degree=1, parallel_config=compat.DiffusionParallelConfig()),
            ConfigError,
            "ring_degree",
        ),
        (lambda: params(eta=0.5), InvalidArgument, "eta"),
        (lambda: params(latents=[[0.0]]), InvalidArgument, "latents"),
        (lambda: params(lora_request="x"), InvalidArgument, "lora_request"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(make: Any, error: type[OmniError], field: str | None) -> None:
    with pytest.raises(error) as refused:
        make()
    assert refused.value.code is Code.INVALID_ARGUMENT
    assert refused.value.violations[0].field == (field or "quantization_config")


def test_a_field_that_is_set_later_is_looked_at_too(omni: compat.Omni) -> None:
    changed = params()
    changed.quality = "high"
    with pytest.raises(InvalidArgument, match="quality is 'high': not yet"):
        omni.generate("x", changed)
    config = compat.OmniDiffusionConfig(model="m")
    config.parallel_config.ring_degree = 0
    with pytest.raises(ConfigError, match="ring_degree is 0, expected at least 1"):
        compat.Omni(od_config=config)


def test_settings_are_ours_under_our_names() -> None:
    cache = compat.DiffusionCacheConfig(rel_l1_thresh=0.3)
    config = compat.OmniDiffusionConfig(
        model="m", dtype="bf16", cache_backend="tea_cache", cache_config=cache, quantization_config="int8", flow_shift=3
    )
    assert {name: value for name, value in config.settings().items() if value is not False} == {
        "model": "m",
        "dtype": "bfloat16",
        "diffusion_load_format": "auto",
        "cache_backend": "tea_cache",
        "cache_config": {"rel_l1_thresh": 0.3},
        "quantization": "int8",
        "flow_shift": 3,
        "num_weight_load_threads": 4,
    }
    alone = compat.OmniDiffusionConfig(model="m", enable_multithread_weight_load=False).settings()
    assert alone["disable_multithread_weight_load"] is True


# --- generate ---------------------------------------------------------------------------------------------------------


def test_each_form_of_a_prompt_gives_what_our_own_call_gives(omni: compat.Omni) -> None:
    small = {"width": 32, "height": 32, "steps": 2, "seed": 7}
    star = omni.omni.generate("a star", **small).files
    moon = omni.omni.generate("a moon", negative_prompt="clouds", true_cfg_scale=3.0, **small).files
    assert star != moon
    assert files(omni.generate("a star", params())) == [star]
    assert files(omni.generate({"prompt": "a star"}, [params()])) == [star]
    against = {"prompt": "a moon", "negative_prompt": "clouds"}
    # the embedded guidance that Qwen-Image lacks leaves guidance_scale to classifier-free guidance
    for guided in (params(guidance_scale=3.0), params(true_cfg_scale=3.0)):
        assert files(omni.generate([against, against], guided)) == [moon, moon]
    request = compat.OmniDiffusionRequest(prompts=["a star", {"prompt": "a star"}], sampling_params=params())
    assert files(omni.generate(request)) == [star, star]


def test_an_output_has_pictures_times_and_the_id_of_its_request(omni: compat.Omni) -> None:
    request = compat.OmniDiffusionRequest(
        prompts=["a star"], sampling_params=params(num_outputs_per_prompt=2), request_id="r-1"
    )
    (output,) = omni.generate(request)
    assert [picture.size for picture in output.images] == [(32, 32)] * 2
    assert output.images == output.output
    assert output.request_id == "r-1"
    assert output.generation is not None
    assert output.generation.seeds == (7, 8)
    stats = output.generation.stats
    assert output.stage_durations == {
        "encode_prompt": stats.encode,
        "diffuse": stats.denoise,
        "vae.decode": stats.decode,
    }
    assert stats.denoise > 0
    assert output.peak_memory_mb == stats.peak_memory_bytes / 2**20


def test_steps_are_50_unless_they_are_left_to_the_model(omni: compat.Omni) -> None:
    def steps(sampling: compat.OmniDiffusionSamplingParams) -> int:
        (output,) = omni.generate("x", sampling)
        assert output.generation is not None
        return output.generation.effective.steps

    tiny = {"width": 16, "height": 16}
    assert steps(compat.OmniDiffusionSamplingParams(**tiny)) == 50
    own = omni.omni.checkpoint.defaults.steps
    assert steps(compat.OmniDiffusionSamplingParams(num_inference_steps=None, **tiny)) == own


@pytest.mark.parametrize(("asked", "together"), [(None, 1), (3, 3)])
def test_max_num_seqs_is_how_many_take_their_steps_together(
    omni: compat.Omni, monkeypatch: pytest.MonkeyPatch, asked: int | None, together: int
) -> None:
    # nobody is submitted before all are there that may be, so that they do share their steps
    meet, generate = threading.Barrier(together), omni.omni.generate
    batches: list[int] = []
    engine = omni.omni._engine
    stepped = engine._on_stepped

    def watched(*args: Any, **options: Any) -> Any:
        meet.wait(timeout=30)
        return generate(*args, **options)

    def count(replica: Replica, report: Stepped) -> None:
        batches.append(len(report.progress))
        stepped(replica, report)

    monkeypatch.setattr(omni.omni, "generate", watched)
    monkeypatch.setattr(engine, "_on_stepped", count)
    words = ["a star", "blue moon on a sea", "cat", "dogs and more dogs", "9 + 9 = 18", "zebra in rain"]
    prompts = [{"prompt": prompt, "negative_prompt": "x"} for prompt in words[: 2 * together]]
    sampling = params(num_inference_steps=40, true_cfg_scale=8.0)
    outputs = omni.generate(prompts, sampling, max_num_seqs=asked)
    assert max(batches) == together
    monkeypatch.undo()
    assert all(levels_apart(one, other) > 4 for one, other in itertools.combinations(outputs, 2))
    for prompt, output in zip(prompts, outputs, strict=True):
        (alone,) = omni.generate(prompt, sampling)
        # who shared which steps is left to chance, and with it how sums are rounded
        assert levels_apart(output, alone) <= 1


@pytest.mark.parametrize(
    ("prompts", "options", "field"),
    [
        ("x", {"max_num_seqs": 0}, "max_num_seqs"),
        ("x", {"max_num_seqs": 9}, "max_num_seqs"),
        ("x", {"max_num_seqs": True}, "max_num_seqs"),
        ("x", {"sampling_params": [params(), params()]}, "sampling_params"),
        (compat.OmniDiffusionRequest(prompts=["x"]), {"sampling_params": params()}, "sampling_params"),
        (["x", {"prompt": "y", "prompt_embeds": 1}], {}, "prompts[1].prompt_embeds"),
        ([{"negative_prompt": "y"}], {}, "prompts[0].prompt"),
        (5, {}, "prompts[0]"),
        ([{"prompt": "y", "multi_modal_data": b"picture"}], {}, "prompts[0].multi_modal_data"),
        ([{"prompt": "y", "multi_modal_data": {"video": b""}}], {}, "prompts[0].multi_modal_data.video"),
        ("x", {"sampling_params": params(num_frames=5)}, "sampling_params.num_frames"),
        ("x", {"sampling_params": params(fps=5)}, "sampling_params.fps"),
        ("x", {"sampling_params": params(frame_rate=5)}, "sampling_params.frame_rate"),
        ("x", {"sampling_params": params(layers=2)}, "sampling_params.layers"),
        ("x", {"sampling_params": params(width=20)}, "width"),
    ],
)
def test_what_a_call_cannot_do_is_refused_before_anything_is_made(
    omni: compat.Omni, prompts: Any, options: dict[str, Any], field: str
) -> None:
    before = len(omni.omni._engine.jobs)
    with pytest.raises(InvalidArgument) as refused:
        omni.generate(prompts, **options)
    assert [violation.field for violation in refused.value.violations] == [field]
    assert len(omni.omni._engine.jobs) == before


def test_a_failure_cancels_the_other_generations(omni: compat.Omni, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, running = omni.omni.generate, threading.Event()

    def failing(prompt: str, *, on_event: Any, **options: Any) -> Any:
        if prompt == "bad":
            assert running.wait(30)
            raise InvalidArgument("bad")

        def both(event: Event) -> None:
            running.set()
            on_event(event)

        return submit(prompt, on_event=both, **options)

    monkeypatch.setattr(omni.omni, "generate", failing)
    with pytest.raises(InvalidArgument, match="bad"):
        omni.generate(["long", "bad", "never"], params(num_inference_steps=200), max_num_seqs=2)
    # a third one may have come between the failure and the stop
    states = {job.request.prompt: job.state for job in omni.omni._engine.jobs.newest()[:2]}
    assert states["long"] is JobState.CANCELLED
    assert states.get("never", JobState.CANCELLED) is JobState.CANCELLED


def test_a_static_adapter_and_a_cache_are_there_for_every_request(suite: Suite) -> None:
    cache = compat.DiffusionCacheConfig(rel_l1_thresh=1e6)
    config = compat.OmniDiffusionConfig(
        model=str(suite.folder),
        lora_path=str(suite.adapters[FIRST]),
        lora_scale=0.5,
        cache_backend="tea_cache",
        cache_config=cache,
    )
    with compat.Omni(od_config=config, **LOCAL) as omni:
        (output,) = omni.generate("a star", params(num_inference_steps=4))
    assert output.generation is not None
    effective = output.generation.effective
    assert [(lora.scale, lora.keys_applied) for lora in effective.loras] == [(0.5, 68)]
    assert output.generation.stats.steps_cached == 2


def test_a_picture_in_multi_modal_data_starts_a_video(tmp_path: Path) -> None:
    folder = ENTRIES["WanImageToVideoPipeline"].build(tmp_path / "wan")
    picture = PIL.Image.linear_gradient("L").resize((32, 32)).convert("RGB")
    path = tmp_path / "in.png"
    picture.save(path)
    small = {"width": 32, "height": 32, "num_frames": 5, "steps": 1, "seed": 7}
    with compat.Omni(str(folder), **LOCAL) as omni:
        ours = omni.omni.generate_video("a wave", first_frame=picture, **small)
        assert ours.files != omni.omni.generate_video("a wave", first_frame=picture.rotate(90), **small).files
        for image in (picture, [str(path)]):
            prompt = {"prompt": "a wave", "multi_modal_data": {"image": image}}
            assert files(omni.generate(prompt, params(num_frames=5, num_inference_steps=1))) == [ours.files]
        with pytest.raises(InvalidArgument, match="first_frame is a int, expected media"):
            omni.generate({"prompt": "a wave", "multi_modal_data": {"image": 5}}, params())


def test_a_video_is_its_file(tmp_path: Path) -> None:
    folder = ENTRIES["WanPipeline"].build(tmp_path / "wan")
    with compat.Omni(str(folder), **LOCAL) as omni:
        ours = omni.omni.generate_video("a wave", width=32, height=32, num_frames=5, steps=2, seed=7, output_fps=8)
        (output,) = omni.generate("a wave", params(num_frames=5, fps=8))
    assert output.output == list(ours.files)
    assert output.images == []
    assert output.generation is not None
    assert output.generation.effective.num_frames == 5


PICTURE, SOUND, CLIP = b"picture", b"sound", b"clip"


@pytest.mark.parametrize(
    ("tasks", "media", "changes", "method", "given"),
    [
        ([Task.TEXT_TO_IMAGE, Task.IMAGE_EDIT], {}, {}, "generate", {}),
        ([Task.IMAGE_EDIT], {"image": PICTURE}, {}, "edit_image", {"images": [PICTURE]}),
        ([Task.IMAGE_EDIT], {"image": (PICTURE, PICTURE)}, {}, "edit_image", {"images": [PICTURE] * 2}),
        (
            [Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE],
            {"image": PICTURE},
            {"strength": 0.5},
            "edit_image",
            {"images": [PICTURE], "strength": 0.5, "task": Task.IMAGE_TO_IMAGE},
        ),
        ([Task.LAYERED], {"image": PICTURE}, {}, "edit_image", {"images": [PICTURE], "layers": 4}),
        (
            [Task.IMAGE_TO_VIDEO],
            {"image": [PICTURE]},
            {"num_frames": 9, "fps": 8, "frame_rate": 24},
            "generate_video",
            {"first_frame": PICTURE, "num_frames": 9, "output_fps": 8, "fps": 24},
        ),
        ([Task.TEXT_TO_VIDEO, Task.VIDEO_TO_VIDEO], {"video": CLIP}, {}, "generate_video", {"source_video": CLIP}),
        ([Task.TEXT_TO_AUDIO_VIDEO], {}, {}, "generate_video", {"task": Task.TEXT_TO_AUDIO_VIDEO}),
        ([Task.AUDIO_TO_VIDEO], {"audio": SOUND}, {}, "generate_video", {"audio": SOUND}),
        (
            [Task.TEXT_TO_AUDIO],
            {"audio": SOUND},
            {"strength": 0.5},
            "generate_audio",
            {"reference": SOUND, "strength": 0.5},
        ),
    ],
)
def test_the_model_and_the_media_choose_the_call(
    omni: compat.Omni,
    monkeypatch: pytest.MonkeyPatch,
    tasks: list[Task],
    media: dict[str, Any],
    changes: dict[str, Any],
    method: str,
    given: dict[str, Any],
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []
    sample = omni.omni.generate("x", width=16, height=16, steps=1)

    class Recorder:
        checkpoint = SimpleNamespace(name="m", tasks=tasks, guidance=())

        def __getattr__(self, name: str) -> Any:
            return lambda prompt, **options: calls.append((name, options)) or sample

    monkeypatch.setattr(omni, "omni", Recorder())
    own = compat.OmniDiffusionSamplingParams(num_inference_steps=None, **changes)
    omni.generate({"prompt": "x", "multi_modal_data": media}, own)
    ((name, options),) = calls
    assert options.pop("on_event")
    assert options.pop("num_outputs") == 1
    assert (name, {key: value for key, value in options.items() if value is not None}) == (method, given)


@pytest.mark.parametrize(
    ("tasks", "media", "changes", "field"),
    [
        ([Task.TEXT_TO_AUDIO], {}, {"height": 64}, "sampling_params.height"),
        ([Task.IMAGE_TO_VIDEO], {"image": [PICTURE, PICTURE]}, {}, "prompts[0].multi_modal_data.image"),
        ([Task.TEXT_TO_VIDEO], {"mask": PICTURE}, {}, "prompts[0].multi_modal_data.mask"),
        ([Task.TEXT_TO_AUDIO], {"image": PICTURE}, {}, "prompts[0].multi_modal_data.image"),
        ([Task.TEXT_TO_IMAGE], {}, {"strength": 0.5}, "sampling_params.strength"),
    ],
)
def test_what_means_nothing_to_the_call_is_refused(
    omni: compat.Omni,
    monkeypatch: pytest.MonkeyPatch,
    tasks: list[Task],
    media: dict[str, Any],
    changes: dict[str, Any],
    field: str,
) -> None:
    checkpoint = SimpleNamespace(name="m", tasks=tasks, guidance=())
    monkeypatch.setattr(type(omni.omni), "checkpoint", checkpoint)
    with pytest.raises(InvalidArgument) as refused:
        omni.generate({"prompt": "x", "multi_modal_data": media}, compat.OmniDiffusionSamplingParams(**changes))
    assert [violation.field for violation in refused.value.violations] == [field]


def test_the_package_names_what_it_lacks() -> None:
    assert compat.Attention.__name__ == "Attention"
    assert compat.OmniDiffusion is compat.Omni
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        compat.Nothing  # noqa: B018
