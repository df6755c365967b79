"""What is written into files is what was asked for: every option, media by what tells them apart, no secrets."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from omni_grpc.client import messages
from omni_grpc.client.asked import asked_of
from omni_grpc.client.saving import ParametersNotWritten
from omni_grpc.metadata import parameters_in
from omni_grpc.types.request_options import ALL, AUDIO, EDIT, IMAGE, VIDEO, options_of
from omni_grpc.types.requested import Requested

BUILD: dict[str, Callable[[dict[str, Any]], Any]] = {
    IMAGE: lambda options: messages.image_request("m", "p", options),
    EDIT: lambda options: messages.edit_request("m", "p", options.pop("images"), options),
    VIDEO: lambda options: messages.video_request("m", "p", options),
    AUDIO: lambda options: messages.audio_request("m", "p", options),
}
VALUES: dict[str, Any] = {
    "TEXT": "text", "COUNT": 3, "SEED": 2**53 - 1, "SEEDS": [1, 2], "NUMBER": 0.1, "FRACTION": 0.25, "SECONDS": 1.5,
    "NUMBERS": [1.0, 0.5], "CACHE": {"cache_dit": {"max_warmup_steps": 2, "scm_steps_mask": [True, False]}},
    "LORAS": {"sketch": 0.8}, "EXTRA": {"a": [1, None, {"b": "c"}]}, "MEDIA": b"bytes", "MEDIA_LIST": [b"one", b"two"],
}  # fmt: skip
OTHERS = {"seeds": "seed", "end": "duration", "duration": "num_frames"}
"""Options that exclude others, and which of them is given here."""


def sha(data: bytes) -> dict[str, str]:
    return {"sha256": hashlib.sha256(data).hexdigest()}


@pytest.mark.parametrize("kind", ALL)
def test_every_option_is_read_back(kind: str) -> None:
    given = {
        option.name: VALUES.get(option.type.name) or next(iter(option.type.choices or ())).value
        for option in options_of(kind)
        if not option.of_job and option.name not in OTHERS
    }
    media = {"MEDIA", "MEDIA_LIST"}
    names = {option.name for option in options_of(kind) if option.type.name in media}
    asked = asked_of(BUILD[kind](dict(given) | {"labels": {"a": "b"}, "priority": 3}))
    assert (asked.kind, asked.model, asked.prompt) == (kind, "m", "p")
    assert asked.options == {name: value for name, value in given.items() if name not in names}
    assert json.loads(json.dumps(asked.options)) == asked.options
    assert asked.inputs == {
        name: [sha(one) for one in (value if isinstance(value, list) else [value])]
        for name, value in given.items()
        if name in names
    }


@pytest.mark.parametrize(("option", "kind"), [("seeds", IMAGE), ("duration", VIDEO), ("end", AUDIO)])
def test_those_that_exclude_others_too(option: str, kind: str) -> None:
    (known,) = (one for one in options_of(kind) if one.name == option)
    assert asked_of(BUILD[kind]({option: VALUES[known.type.name]})).options == {option: VALUES[known.type.name]}


def test_a_url_is_told_without_what_signs_it() -> None:
    urls = ["https://host/a.png?signature=secret#x", "data:image/png;base64,AA=="]
    asked = asked_of(messages.edit_request("m", "p", urls, {}))
    assert asked.inputs["images"][0] == {"uri": "https://host/a.png"}
    assert list(asked.inputs["images"][1]) == ["sha256 of its data URL"]
    assert "secret" not in str(asked)


async def test_saved_files_say_how_they_were_made_unless_told_not_to(client, tmp_path) -> None:
    made = await client.generate_image("a star", model="toy", steps=2, seed=7, num_outputs=2)
    assert made.asked == Requested(
        kind=IMAGE, model="toy", prompt="a star", options={"steps": 2, "seed": 7, "num_outputs": 2}
    )
    paths = made.save(tmp_path)
    assert [path.name for path in paths] == ["00001-7.png", "00001-8.png"]
    found = parameters_in(paths[1])
    assert (found.asked, found.seed, found.index) == (made.asked, 8, 1)
    assert found.again() == {"steps": 2, "seed": 8, "width": 64, "height": 32}
    plain = made.save(tmp_path, metadata=False)
    assert [path.name for path in plain] == ["00002-7.png", "00002-8.png"]
    assert tuple(path.read_bytes() for path in plain) == made.files


async def test_a_watched_job_is_saved_as_received(client, service, tmp_path) -> None:
    job = await service.finished()
    async with client.watch_job(job.job_id) as stream:
        made = await stream.result()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ParametersNotWritten)
        (path,) = made.save(tmp_path / "a.png")
    assert (made.asked, path.read_bytes()) == (None, made.files[0])
