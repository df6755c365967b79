"""The table in docs/adapter.md is what the installed diffusers gives."""

from __future__ import annotations

import diffusers
import pytest

from omni_grpc.adapter.abilities import ability
from omni_grpc.types.request import Task
from omni_grpc.types.spec import GuidanceKind
from tools.adapter_census import census, page, totals, written

VERSION = "0.42.1"


@pytest.mark.skipif(diffusers.__version__ != VERSION, reason=f"the table is of diffusers {VERSION}")
def test_the_table_is_current() -> None:
    found = census()
    committed, current = _rows(written()), _rows(page(found))
    assert committed.keys() == current.keys()
    # which of them need a package that is missing depends on what happens to be installed
    both = [name for name in current if "needs the packages" not in committed[name] + current[name]]
    assert len(both) > 280
    both.remove("served")
    assert {name: committed[name] for name in both} == {name: current[name] for name in both}
    served = sum(not cell.startswith("no: ") for name, cell in committed.items() if name.endswith("Pipeline"))
    assert (committed["classes"], committed["served"]) == ("300", str(served)) == ("300", "227")
    assert set(Task) - totals(found).keys() == {Task.AUDIO_TO_VIDEO}


def _rows(table: str) -> dict[str, str]:
    """The second cell of each row of the pipelines by its first, and of the first two totals."""
    rows = [line.strip("|").strip().split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {
        name: cell
        for name, cell in (row for row in rows if len(row) == 2)
        if name.endswith("Pipeline") or name in ("classes", "served")
    }


@pytest.mark.parametrize(
    ("name", "tasks", "takes"),
    [
        ("StableDiffusionPipeline", {Task.TEXT_TO_IMAGE}, {"extra", "negative_prompt", "rescale"}),
        ("StableDiffusionInpaintPipeline", {Task.INPAINT}, {"extra", "negative_prompt", "images", "mask", "strength"}),
        ("QwenImageEditPlusPipeline", {Task.IMAGE_EDIT}, {"extra", "images"}),
        ("Flux2Pipeline", {Task.TEXT_TO_IMAGE, Task.IMAGE_EDIT}, {"extra", "images"}),
        (
            "WanImageToVideoPipeline",
            {Task.IMAGE_TO_VIDEO},
            {"extra", "negative_prompt", "scale_low_noise", "first_frame", "last_frame", "num_frames"},
        ),
        ("WanVideoToVideoPipeline", {Task.VIDEO_TO_VIDEO}, {"extra", "negative_prompt", "source_video", "strength"}),
        (
            "StableAudioPipeline",
            {Task.TEXT_TO_AUDIO},
            {"extra", "negative_prompt", "duration", "start", "audio"},
        ),
    ],
)
def test_signatures_say_what_a_pipeline_takes(name: str, tasks: set[Task], takes: set[str]) -> None:
    able = ability(getattr(diffusers, name))
    assert set(able.tasks) == tasks
    assert able.takes == takes


def test_guidance_follows_the_signature() -> None:
    kinds = {name: ability(getattr(diffusers, f"{name}Pipeline")).guidance for name in ("Flux", "Wan", "HunyuanImage")}
    assert kinds["Flux"] == (GuidanceKind.EMBEDDED, GuidanceKind.TRUE_CFG)
    assert kinds["Wan"] == (GuidanceKind.EMBEDDED,)
    assert kinds["HunyuanImage"] == ()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DDPMPipeline", "takes no prompt"),
        ("WuerstchenDecoderPipeline", "needs image_embeddings"),
        ("FluxPriorReduxPipeline", "makes embeddings"),
        ("HeliosPyramidPipeline", "takes no number of steps"),
    ],
)
def test_what_cannot_be_served_says_why(name: str, reason: str) -> None:
    able = ability(getattr(diffusers, name))
    assert (able.tasks, able.reason) == ((), reason)
