"""The step cache of a request as callers write it: in Python, on the command line, in a body of OpenAI's."""

from __future__ import annotations

import argparse

import pytest

from omni_grpc.cli import generate
from omni_grpc.client import messages
from omni_grpc.config.flags import SettingsParser
from omni_grpc.omni import Omni
from omni_grpc.types.cache_choice import cache_draft, chosen
from omni_grpc.types.errors import InvalidArgument
from omni_grpc.types.request_options import AUDIO, IMAGE, normalized
from omni_grpc.types.step_cache import METHODS, CacheDraft, CacheQuality
from omni_grpc.v1 import generation_pb2
from omni_grpc.web.openai.fields import GENERATIONS
from omni_grpc.web.openai.reading import Reading
from omni_grpc.wire.cache_choice import read_cache

MASK = [True, False, True]
FORMS = [
    ("off", "off", CacheDraft(off=True)),
    *((quality.value.lower(), quality.value.lower(), CacheDraft(quality=quality)) for quality in CacheQuality),
    ("FAST", "fast", CacheDraft(quality=CacheQuality.FAST)),
    *((method, method, CacheDraft(method=method)) for method in METHODS),
    ("TeaCache", "tea_cache", CacheDraft(method="tea_cache")),
    ({"sea_cache": {}}, {"sea_cache": {}}, CacheDraft(method="sea_cache")),
    ({"TeaCache": {}}, {"tea_cache": {}}, CacheDraft(method="tea_cache")),
    (
        {"sea": {"sea_threshold": 0.25}},
        {"sea_cache": {"threshold": 0.25}},
        CacheDraft(method="sea_cache", given={"threshold": 0.25}),
    ),
    (
        {"cache_dit": {"Fn_compute_blocks": 2, "scm_steps_mask": MASK}},
        {"cache_dit": {"fn_compute_blocks": 2, "scm_steps_mask": MASK}},
        CacheDraft(method="cache_dit", given={"fn_compute_blocks": 2, "scm_steps_mask": tuple(MASK)}),
    ),
]


@pytest.mark.parametrize(("written", "choice", "draft"), FORMS, ids=str)
def test_every_form_asks_for_the_same_wherever_it_is_written(written, choice, draft):
    faults = {}
    assert normalized(IMAGE, {"cache": written}, faults) == {"cache": choice}
    assert faults == {}
    assert cache_draft(choice) == draft
    assert cache_draft(chosen(draft)) == draft
    message = messages.image_request("m", "p", {"cache": written})
    assert read_cache(message.sampling.cache) == draft
    reading = Reading(IMAGE, generation_pb2.GenerateImageRequest(), GENERATIONS)
    reading.read({"cache": written})
    assert read_cache(reading.message.sampling.cache) == draft


WRONG = [
    "slow", "", 3, True, ["sea_cache"], {}, {"sea_cache": 0.2}, {"sea_cache": {}, "tea_cache": {}},
    {"sea_cache": {"limit": 1}}, {"calibrate": {}}, "calibrate",
]  # fmt: skip


@pytest.mark.parametrize("value", WRONG, ids=str)
def test_what_is_no_cache_is_refused_by_field_with_what_is_one(value):
    with pytest.raises(InvalidArgument) as error:
        messages.image_request("m", "p", {"cache": value})
    assert [violation.field for violation in error.value.violations] == ["sampling.cache"]
    assert "a quality (near_lossless, balanced, fast), a method (tea_cache" in str(error.value)


@pytest.mark.parametrize("fields", [{"threshold": "high"}, {"residual_order": 1.5}], ids=str)
def test_a_value_that_its_field_cannot_hold_is_refused_before_it_is_sent(fields):
    with pytest.raises(InvalidArgument) as error:
        messages.audio_request("m", "p", {"cache": {"sea_cache": fields}})
    assert [violation.field for violation in error.value.violations] == ["sampling.cache"]
    assert normalized(AUDIO, {"cache": {"sea_cache": fields}}, {}) == {"cache": {"sea_cache": fields}}


def test_a_flag_takes_a_name_or_json(capsys):
    parser = SettingsParser()
    generate.add_commands(parser.add_subparsers())

    def parsed(text: str) -> argparse.Namespace:
        return parser.parse_args(["generate", "a star", "--out", "x.png", "--cache", text])

    assert parsed("fast").cache == "fast"
    assert parsed('{"sea_cache": {"threshold": 0.2}}').cache == {"sea_cache": {"threshold": 0.2}}
    for wrong in ("slow", '{"sea_cache": {"limit": 1}}', "{"):
        with pytest.raises(SystemExit):
            parsed(wrong)
        assert "a quality (near_lossless, balanced, fast)" in capsys.readouterr().err


def test_cache_dits_own_arguments_are_taken_from_a_body_of_a_peer():
    reading = Reading(IMAGE, generation_pb2.GenerateImageRequest(), GENERATIONS)
    reading.read({"cache_dit_params": {"Fn_compute_blocks": 2, "enable_taylorseer": True}})
    assert read_cache(reading.message.sampling.cache) == CacheDraft(
        method="cache_dit", given={"fn_compute_blocks": 2, "taylorseer_order": 1}
    )


def test_requests_of_one_model_each_get_the_cache_that_they_ask_for():
    asked = [None, "off", "fast", "first_block", {"sea_cache": {"threshold": 0.2}}]
    with Omni(cache_backend="auto", device="cpu", cpu_threads=1, warm_up_seconds=0) as omni:
        made = [omni.generate("a red circle", steps=10, width=64, height=64, seed=1, cache=one) for one in asked]
    methods = [[count.method for count in one.stats.cache] for one in made]
    own, off, fast, first_block, sea = methods
    assert own
    assert fast
    assert (off, first_block, sea) == ([], ["first_block"], ["sea_cache"])
    assert [one.asked.options.get("cache") for one in made] == asked
