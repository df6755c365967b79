"""What a preset makes of a request: what it sets, what stays, what is warned of and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from omni_grpc.config import LimitsConfig
from omni_grpc.resolve.request import Resolved, check_draft, resolve_request
from omni_grpc.resolve.rules import ServingFacts
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.findings import WorkerFindings
from omni_grpc.types.lora import Adapter, Lora
from omni_grpc.types.preset import Preset, PresetLora
from omni_grpc.types.request import Draft, GuidanceDraft
from tests.toy import toy_checkpoint

EULER = "FlowMatchEulerDiscreteScheduler"
FAST = Preset(
    name="fast",
    title="Fast",
    pipelines=("ToyPipeline",),
    steps=4,
    scheduler_config={"base_shift": 1.1, "shift_terminal": None},
    guidance=GuidanceDraft(true_cfg_scale=1.0),
    loras=(PresetLora(lora=Lora(lora_id="fast", scale=0.125)),),
)
LEVELS = Preset(
    name="levels", title="Levels", pipelines=("ToyPipeline",), steps=2, sigmas=(1.0, 0.5), shift=5.0, scheduler=EULER
)
LATER = dataclasses.replace(FAST, name="later", loras=(PresetLora(lora=Lora(lora_id="later")),))


def adapter(name: str) -> Adapter:
    return Adapter(id=name, file="x", sha256="", format="peft", rank=4, size_bytes=1, applied={"transformer": 1})


def facts(*, recipe: str = "", loras: tuple[str, ...] = ("fast", "style"), scheduler: str = EULER) -> ServingFacts:
    checkpoint = dataclasses.replace(
        toy_checkpoint(schedulers=(EULER,)),
        configs={"scheduler": {"_class_name": scheduler}},
        presets=(FAST, LEVELS, LATER),
        recipe=recipe,
    )
    found = WorkerFindings(loras=tuple(map(adapter, loras)))
    return ServingFacts(checkpoint, LimitsConfig(max_steps=50), found=found)


def resolve(of: ServingFacts | None = None, **asked: Any) -> Resolved:
    return resolve_request(Draft(model="toy", prompt="a star", **asked), of or facts(), id="job")


def refused(of: ServingFacts | None = None, **asked: Any) -> list[tuple[str, str]]:
    with pytest.raises(InvalidArgument) as caught:
        resolve(of, **asked)
    return [(violation.field, violation.description) for violation in caught.value.violations]


def warned(resolved: Resolved) -> list[tuple[str, str, str]]:
    return [(warning.code, warning.field, warning.requested) for warning in resolved.warnings]


def test_a_preset_sets_what_the_request_does_not() -> None:
    resolved = resolve(preset="fast", negative_prompt="blurry")
    request = resolved.request
    assert (request.steps, request.preset, request.guidance.true_cfg_scale) == (4, "fast", 1.0)
    assert request.scheduler_config == {"base_shift": 1.1, "shift_terminal": None}
    assert request.loras == (Lora(lora_id="fast", scale=0.125, uid="fast"),)
    assert request.negative_prompt is None, "classifier-free guidance is off"
    assert resolved.defaults_used["sampling.steps"] == "4"
    assert resolved.defaults_used["sampling.loras"] == "fast=0.125"
    assert resolved.defaults_used["sampling.guidance.true_cfg_scale"] == "1.0"
    assert "sampling.preset" not in resolved.defaults_used
    assert warned(resolved) == [("NEGATIVE_PROMPT_WITHOUT_EFFECT", "negative_prompt", "")]


def test_without_one_a_request_is_what_it_was() -> None:
    for request in (
        resolve().request,
        resolve(preset="none").request,
        resolve(facts(recipe="fast"), preset="none").request,
    ):
        assert (request.steps, request.preset, request.loras, request.scheduler_config) == (20, "", (), {})


def test_levels_bring_their_number_of_steps_and_a_scheduler_of_their_own() -> None:
    request = resolve(facts(scheduler="ToyScheduler"), preset="levels").request
    assert (request.steps, request.sigmas, request.shift, request.scheduler) == (2, (1.0, 0.5), 5.0, EULER)


def test_what_a_request_says_itself_stays_and_is_warned_of() -> None:
    resolved = resolve(
        preset="fast", steps=20, negative_prompt="", guidance=GuidanceDraft(true_cfg_scale=4.0), shift=2.0
    )
    request = resolved.request
    assert (request.steps, request.guidance.true_cfg_scale, request.shift) == (20, 4.0, 2.0)
    assert request.scheduler_config == {}, "a shift stands for the whole rule"
    assert warned(resolved) == [
        ("PRESET_OVERRIDDEN", "sampling.steps", "20"),
        ("PRESET_OVERRIDDEN", "sampling.shift", "2.0"),
        ("PRESET_OVERRIDDEN", "sampling.guidance.true_cfg_scale", "4.0"),
    ]
    assert "the preset fast sets it to 4; its adapter was made for that" in resolved.warnings[0].message


def test_the_same_values_are_no_conflict() -> None:
    resolved = resolve(preset="levels", steps=2, shift=5.0, scheduler=EULER)
    assert warned(resolved) == []
    assert resolved.request.sigmas == (1.0, 0.5)


def test_other_steps_take_the_levels_of_a_preset_away() -> None:
    resolved = resolve(preset="levels", steps=6)
    assert (resolved.request.steps, resolved.request.sigmas, resolved.request.shift) == (6, (), 5.0)
    assert warned(resolved) == [("PRESET_OVERRIDDEN", "sampling.steps", "6")]
    assert "its sigmas are not used" in resolved.warnings[0].message
    resolved = resolve(preset="levels", sigmas=(0.9, 0.8, 0.7))
    assert (resolved.request.steps, resolved.request.sigmas) == (3, (0.9, 0.8, 0.7))
    assert warned(resolved) == [("PRESET_OVERRIDDEN", "sampling.sigmas", "0.9,0.8,0.7")]


def test_adapters_of_the_request_come_beside_those_of_the_preset() -> None:
    style = Lora(lora_id="style", scale=0.7)
    assert resolve(preset="fast", loras=(style,)).request.loras == (
        dataclasses.replace(style, uid="style"),
        Lora(lora_id="fast", scale=0.125, uid="fast"),
    )
    stronger = Lora(lora_id="fast", scale=1.0)
    resolved = resolve(preset="fast", loras=(stronger,))
    assert resolved.request.loras == (dataclasses.replace(stronger, uid="fast"),)
    assert warned(resolved) == [("PRESET_OVERRIDDEN", "sampling.loras", "fast=1")]
    many = tuple(Lora(lora_id="style", target=str(number)) for number in range(8))
    assert ("sampling.loras", "has 9 entries; the maximum is 8") in refused(preset="fast", loras=many)


def test_the_default_of_a_server_is_told() -> None:
    resolved = resolve(facts(recipe="fast"))
    assert (resolved.request.steps, resolved.request.preset) == (4, "fast")
    assert resolved.defaults_used["sampling.preset"] == "fast"
    assert resolve(facts(recipe="fast"), preset="levels").request.preset == "levels"


def test_a_preset_that_cannot_be_used_is_refused_with_those_that_can() -> None:
    assert refused(preset="fsat") == [
        (
            "sampling.preset",
            "toy has no preset 'fsat'; it has fast, levels; later cannot be used now, ListModels says why",
        )
    ]
    assert refused(preset="later") == [
        (
            "sampling.preset",
            "'later' needs the LoRA adapter later, not loaded here; load with --lora later=FILE or --recipe later",
        )
    ]
    ((field, why),) = refused(facts(recipe="later"))
    assert field == "sampling.preset"
    assert why.endswith("which is the default here; 'none' is without a preset")
    with pytest.raises(InvalidArgument, match=r"sampling\.preset"):
        check_draft(Draft(model="toy", prompt="a star", preset="later"), facts())


def test_a_schedule_that_is_the_models_own_takes_neither_levels_nor_a_shift() -> None:
    own = facts(scheduler="ToyScheduler")
    assert refused(own, sigmas=(1.0, 0.5), shift=3.0) == [
        ("sampling.sigmas", "cannot be used: the schedule of ToyScheduler is its own; leave it unset"),
        ("sampling.shift", "cannot be used: the schedule of ToyScheduler is its own; leave it unset"),
    ]
    assert refused(own, preset="fast") == [
        ("sampling.preset", "'fast' sets the shift, and the schedule of ToyScheduler is its own")
    ]


@pytest.mark.parametrize(
    ("asked", "field", "message"),
    [
        ({"sigmas": (1.0, 1.0)}, "sampling.sigmas", "has 1 after 1 at position 1; levels fall"),
        ({"sigmas": (1.5,)}, "sampling.sigmas", "has 1.5 at position 0; a level is above 0 and at most 1"),
        ({"sigmas": (1.0, float("nan"))}, "sampling.sigmas", "has nan at position 1"),
        ({"sigmas": (1.0, 0.0)}, "sampling.sigmas", "has 0 at position 1"),
        ({"sigmas": (1.0, 0.5), "steps": 4}, "sampling.sigmas", "has 2 levels for 4 steps"),
        ({"sigmas": tuple(1 - i / 100 for i in range(51))}, "sampling.sigmas", "has 51 levels; the maximum is 50"),
        ({"shift": 0.0}, "sampling.shift", "0 is not above 0 and at most 1000"),
        ({"shift": float("inf")}, "sampling.shift", "inf is not above 0"),
    ],
)
def test_levels_and_shifts_that_make_no_schedule_are_refused(asked: dict[str, Any], field: str, message: str) -> None:
    ((found, why),) = refused(**asked)
    assert (found, why[: len(message)]) == (field, message)
