"""Adapters, step caches and quantisation over the wire: what can be asked for, and what comes back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter, AppliedLora
from omni_grpc.types.results import Effective, Stats
from omni_grpc.types.step_cache import METHODS, FixedCache, TeaCache
from omni_grpc.types.step_masks import steps_mask
from omni_grpc.v1 import model_pb2
from omni_grpc.wire import from_message

from .fake_executor import READY
from .service import Service, image, refusal, serving

STYLE, SKETCH = (
    Adapter(
        id=name,
        file=f"{name}.safetensors",
        sha256="ab" * 32,
        format="peft",
        rank=4,
        size_bytes=99,
        applied={"transformer": 6, "transformer_2": keys},
        skipped={"text_encoder.x": "text encoder"},
        warnings=("by its name",) if keys else (),
    )
    for name, keys in (("style", 8), ("sketch", 0))
)
WITH_LORAS = dataclasses.replace(
    READY,
    found=WorkerFindings(loras=(STYLE, SKETCH), quantized_layers={"int8": 16}, kept_layers=3, batch_invariant=True),
)
CACHE: dict[str, Any] = {
    "cache_backend": "tea_cache",
    "cache_config": {"rel_l1_thresh": 0.3, "coefficients": [2.0, 0.0]},
}


async def model(service: Service) -> model_pb2.Model:
    return (await service.models.GetModel(model_pb2.GetModelRequest(model="toy"))).model


# --- adapters ---------------------------------------------------------------------------------------------------------


async def test_adapters_are_listed_with_what_became_of_their_keys() -> None:
    async with serving(WITH_LORAS) as service:
        found = await model(service)
        assert (dict(found.quantized_layers), found.kept_layers) == ({"int8": 16}, 3)
        assert list(found.loras) == ["sketch", "style"]
        assert (found.limits.max_loras, found.limits.lora_scale.min, found.limits.lora_scale.max) == (8, -100, 100)
        assert "sampling.loras" not in [refused.feature for refused in found.refusals]
        await service.create(sampling={"loras": [{"lora_id": "style"}]}, options={"queue_timeout": {"seconds": 60}})
        listed = (await service.models.ListLoras(model_pb2.ListLorasRequest(model="toy"))).loras
    sketch, style = listed
    assert (style.lora_id, style.model, style.source, style.rank) == ("style", "toy", "style.safetensors", 4)
    assert (style.size_bytes, style.sha256, style.pinned, style.format) == (99, b"\xab" * 32, False, "peft")
    assert (list(style.targets), list(sketch.targets)) == (["transformer", "transformer_2"], ["transformer"])
    assert (style.keys_applied, list(style.keys_skipped)) == (14, ["text_encoder.x (text encoder)"])
    assert (list(style.warnings), list(sketch.warnings)) == (["by its name"], [])


async def test_adapters_count_the_jobs_that_use_them() -> None:
    async with serving(WITH_LORAS, max_num_seqs=1) as service:
        service.executor.gates["prepare"].close()
        for loras in ([{"lora_id": "style"}, {"lora_id": "sketch", "scale": 2}], [{"lora_id": "style"}], []):
            await service.create(sampling={"loras": loras})
        listed = (await service.models.ListLoras(model_pb2.ListLorasRequest())).loras
        assert {lora.lora_id: lora.in_use for lora in listed} == {"style": 2, "sketch": 1}
        service.executor.gates["prepare"].open()


async def test_a_request_gets_its_adapters_and_is_told_of_their_keys() -> None:
    loras = [{"lora_id": "style", "scale": 0.0}, {"lora_id": "sketch"}]
    async with serving(WITH_LORAS) as service:
        job = await service.finished(sampling={"loras": loras})
        only = await service.finished(sampling={"loras": [{"lora_id": "style", "target": "transformer_2"}]})
        plain = await service.finished()
        (asked,) = (request for plan in service.executor.plans[:1] for request in plan.admit)
    assert [(lora.lora_id, lora.scale, lora.target) for lora in asked.loras] == [
        ("style", 0.0, ""),
        ("sketch", 1.0, ""),
    ]
    assert from_message(Effective, job.effective).loras == tuple(
        AppliedLora(lora_id=name, scale=scale, target=target, keys_applied=keys, keys_skipped=1)
        for name, scale, target, keys in (
            ("style", 0.0, "transformer", 6),
            ("style", 0.0, "transformer_2", 8),
            ("sketch", 1.0, "transformer", 6),
        )
    )
    assert [(lora.target, lora.keys_applied) for lora in only.effective.loras] == [("transformer_2", 8)]
    assert list(plain.effective.loras) == []
    assert dict(plain.effective.quantized_layers) == {"int8": 16}
    assert plain.effective.kept_layers == from_message(Effective, plain.effective).kept_layers == 3
    assert plain.effective.batch_invariant
    assert from_message(Effective, plain.effective).batch_invariant


@pytest.mark.parametrize(
    ("reference", "field", "message"),
    [
        ({"lora_id": "stile"}, "sampling.loras.lora_id", "'stile' is not loaded; loaded: style, sketch"),
        ({"lora_id": ""}, "sampling.loras.lora_id", "'' is not loaded"),
        ({"lora_id": "style", "scale": 1000}, "sampling.loras.scale", "1000 is outside -100..100"),
        ({"lora_id": "sketch", "target": "transformer_2"}, "sampling.loras.target", "it changes transformer"),
    ],
)
async def test_an_adapter_that_is_not_there_is_refused_by_field(
    reference: dict[str, Any], field: str, message: str
) -> None:
    async with serving(WITH_LORAS) as service:
        error = await refusal(service.generation.GenerateImage(image(sampling={"loras": [reference]})))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert message in error.message


async def test_without_adapters_the_server_says_how_to_have_some() -> None:
    async with serving() as service:
        error = await refusal(service.generation.GenerateImage(image(sampling={"loras": [{"lora_id": "style"}]})))
        found = await model(service)
        assert list((await service.models.ListLoras(model_pb2.ListLorasRequest())).loras) == []
    assert error.fields == ["sampling.loras.lora_id"]
    assert "--lora NAME=PATH" in error.message
    assert (list(found.loras), found.limits.max_loras, found.limits.HasField("lora_scale")) == ([], 0, False)
    (why,) = (refused.reason for refused in found.refusals if refused.feature == "sampling.loras")
    assert "--lora NAME=PATH" in why


async def test_the_paths_of_adapters_are_not_told() -> None:
    async with serving(WITH_LORAS, lora={"style": "some/secret/place"}) as service:
        from omni_grpc.v1 import admin_pb2

        info = await service.admin.GetServerInfo(admin_pb2.GetServerInfoRequest())
    assert "secret" not in str(info)
    assert info.features["enable_layerwise_offload"] == "false"


# --- step cache -------------------------------------------------------------------------------------------------------


async def test_the_servers_cache_is_the_default_and_every_step_tells_what_it_did() -> None:
    async with serving(**CACHE) as service:
        found = await model(service)
        job = await service.finished(negative_prompt="", sampling={"steps": 5})
        events = await service.watch(job.job_id)
    assert list(found.cache_methods) == list(METHODS)
    assert (found.defaults.cache.tea_cache.rel_l1_thresh, list(found.defaults.cache.tea_cache.coefficients)) == (
        0.3, [2.0, 0.0]
    )  # fmt: skip
    assert "sampling.cache" not in [refused.feature for refused in found.refusals]
    steps = [event.step_progress for event in events if event.HasField("step_progress")]
    assert [(step.rows_total, step.rows_reused) for step in steps] == [(2, 0), (2, 2), (2, 2), (2, 2), (2, 0)]
    assert from_message(Effective, job.effective).cache == TeaCache(rel_l1_thresh=0.3, coefficients=(2.0, 0.0))
    assert job.effective.defaults_used["sampling.cache"] == "tea_cache"
    (count,) = job.stats.cache
    assert (count.component, count.method, count.hits, count.misses) == ("transformer", "tea_cache", 6, 4)
    assert (count.mean_residual_diff, count.est_speedup) == (0.25, 2.5)
    assert job.stats.steps_cached == 3
    assert [(it.hits, it.misses) for it in from_message(Stats, job.stats).cache] == [(6, 4)]


async def test_a_request_turns_the_cache_off_or_sets_it() -> None:
    async with serving(**CACHE) as service:
        off = await service.finished(sampling={"cache": {"off": {}}})
        own = await service.finished(sampling={"cache": {"tea_cache": {"rel_l1_thresh": 0.0}}})
        fitted = await service.finished(sampling={"cache": {"tea_cache": {"coefficients": [1.0, 2.0]}}})
        empty = await service.finished(sampling={"cache": {"tea_cache": {}}})
    assert off.effective.cache.WhichOneof("kind") == "off"
    assert (off.stats.steps_cached, list(off.stats.cache)) == (0, [])
    assert from_message(Effective, own.effective).cache == TeaCache(rel_l1_thresh=0.0, coefficients=(2.0, 0.0))
    assert from_message(Effective, fitted.effective).cache == TeaCache(rel_l1_thresh=0.3, coefficients=(1.0, 2.0))
    assert from_message(Effective, empty.effective).cache == TeaCache(rel_l1_thresh=0.3, coefficients=(2.0, 0.0))
    assert "sampling.cache" not in own.effective.defaults_used


@pytest.mark.parametrize(
    ("cache", "field", "message"),
    [
        ({"rel_l1_thresh": -0.1}, "sampling.cache.tea_cache.rel_l1_thresh", "is -0.1, expected a number of at least 0"),
        ({"rel_l1_thresh": float("nan")}, "sampling.cache.tea_cache.rel_l1_thresh", "is nan"),
        ({"coefficients": [1.0, float("inf")]}, "sampling.cache.tea_cache.coefficients", "expected finite numbers"),
    ],
)
async def test_a_cache_that_cannot_be_is_refused_by_field(cache: dict[str, Any], field: str, message: str) -> None:
    async with serving(**CACHE) as service:
        error = await refusal(service.generation.GenerateImage(image(sampling={"cache": {"tea_cache": cache}})))
    assert (error.code, error.fields) == ("INVALID_ARGUMENT", [field])
    assert message in error.message


@pytest.mark.parametrize(
    ("cache", "field", "why"),
    [
        ({"tea_cache": {"rel_l1_thresh": -1}}, "tea_cache.rel_l1_thresh", "of at least 0"),
        ({"tea_cache": {"signal": "latents"}}, "tea_cache.signal", "expected one of 'input', 'timestep'"),
        ({"cache_dit": {"fn_compute_blocks": 0}}, "cache_dit.fn_compute_blocks", "from 1 to 1000"),
        ({"cache_dit": {"taylorseer_order": 3}}, "cache_dit.taylorseer_order", "from 0 to 2"),
        ({"cache_dit": {"scm_steps_mask": [True] * 4}}, "cache_dit.scm_steps_mask", "has 4 entries"),
        (
            {"cache_dit": {"scm_steps_mask_policy": "fast"}},
            "cache_dit.scm_steps_mask_policy",
            "no step mask for 5 steps",
        ),
        ({"cache_dit": {"scm_steps_mask_policy": "quick"}}, "cache_dit.scm_steps_mask_policy", "expected one of"),
        ({"cache_dit": {"scm_steps_policy": "x"}}, "cache_dit.scm_steps_policy", "'dynamic', 'static'"),
        ({"mag_cache": {}}, "mag_cache.ratios", "omni-grpc calibrate"),
        ({"mag_cache": {"ratios": [0.0]}}, "mag_cache.ratios", "above 0"),
        ({"mag_cache": {"ratios": [1.0], "retention_ratio": 2}}, "mag_cache.retention_ratio", "from 0 to 1"),
        ({"sea_cache": {"power_exp": float("nan")}}, "sea_cache.power_exp", "expected a number"),
        ({"first_block": {"threshold": float("inf")}}, "first_block.threshold", "expected a number"),
        ({"sea_cache": {}, "quality": "CACHE_QUALITY_FAST"}, "quality", "leave out sea_cache"),
        ({"quality": 77}, "quality", "77 is not supported"),
    ],
)
async def test_a_cache_that_cannot_be_is_refused_by_its_field(cache: dict[str, Any], field: str, why: str) -> None:
    async with serving(**CACHE) as service:
        error = await refusal(service.generation.GenerateImage(image(sampling={"steps": 5, "cache": cache})))
    assert error.fields == [f"sampling.cache.{field}"]
    assert why in error.message


async def test_a_request_has_any_method_and_gets_back_what_it_was() -> None:
    async with serving(**CACHE) as service:
        db = {"max_warmup_steps": 2, "scm_steps_mask_policy": "fast", "taylorseer_order": 1}
        asked = [{"cache_dit": db}, {"first_block": {}}, {"sea_cache": {}}, {"quality": "CACHE_QUALITY_FAST"}]
        found = [await service.finished(sampling={"steps": 20, "cache": cache}) for cache in asked]
        few = await service.finished(sampling={"steps": 4, "cache": {"quality": "CACHE_QUALITY_FAST"}})
    dit = found[0].effective.cache.cache_dit
    assert (dit.max_warmup_steps, dit.taylorseer_order, dit.residual_diff_threshold) == (2, 1, 0.24)
    assert list(dit.scm_steps_mask) == list(steps_mask("fast", 20))
    assert [job.effective.cache.WhichOneof("kind") for job in found] == [
        "cache_dit", "first_block", "sea_cache", "cache_dit"
    ]  # fmt: skip
    assert few.effective.cache.WhichOneof("kind") == "off"
    assert [(warning.code, warning.applied) for warning in few.warnings] == [("CACHE_OFF", "off")]


async def test_a_cache_that_leaves_no_block_to_skip_is_refused() -> None:
    ready = dataclasses.replace(READY, found=WorkerFindings(cached_blocks=6))
    async with serving(ready, **CACHE) as service:
        all_of_them = {"cache_dit": {"fn_compute_blocks": 4, "bn_compute_blocks": 2}}
        error = await refusal(service.generation.GenerateImage(image(sampling={"cache": all_of_them})))
        but_one = {"cache_dit": {"fn_compute_blocks": 4, "bn_compute_blocks": 1}}
        made = await service.finished(sampling={"steps": 20, "cache": but_one})
    assert error.fields == ["sampling.cache.cache_dit.fn_compute_blocks"]
    assert "is 4, and with bn_compute_blocks 2 all 6 blocks of the model always run" in error.message
    assert "at most 5" in error.message
    assert made.effective.cache.cache_dit.fn_compute_blocks == 4


async def test_a_cache_that_the_server_was_not_started_with_is_refused() -> None:
    async with serving() as service:
        asked = image(sampling={"cache": {"tea_cache": {"rel_l1_thresh": 0.1}}})
        error = await refusal(service.generation.GenerateImage(asked))
        found = await model(service)
        off = await service.finished(sampling={"cache": {"off": {}}})
    assert error.fields == ["sampling.cache"]
    assert "--cache-backend auto" in error.message
    assert (list(found.cache_methods), found.defaults.cache.WhichOneof("kind")) == ([], "off")
    assert "sampling.cache" in [refused.feature for refused in found.refusals]
    assert off.effective.cache.WhichOneof("kind") == "off"


async def test_a_cache_that_the_api_has_no_options_for_cannot_be_turned_off_and_is_not_called_off() -> None:
    async with serving(
        dataclasses.replace(READY, found=WorkerFindings(fixed_cache=FixedCache("first_block")))
    ) as service:
        error = await refusal(service.generation.GenerateImage(image(sampling={"cache": {"off": {}}})))
        job, found = await service.finished(), await model(service)
    assert error.fields == ["sampling.cache.off"]
    assert "first_block" in error.message
    assert not job.effective.HasField("cache")
    assert not found.defaults.HasField("cache")
    assert "sampling.cache.off" in [refused.feature for refused in found.refusals]
