"""The pictures of docs/web.md. They are made anew by `WEB_SCREENSHOTS=1 make test-web ARGS="-k screenshot"`."""

from __future__ import annotations

import io
import os

import PIL.Image
import pytest

from tests.web_page.studio import ROOT, until

FOLDER = ROOT / "docs" / "images"
MOST_BYTES = 150_000
LOOKS = {
    "light": {"color_scheme": "light", "viewport": {"width": 1280, "height": 860}},
    "dark": {"color_scheme": "dark", "viewport": {"width": 1280, "height": 860}},
    "phone": {"color_scheme": "light", "viewport": {"width": 360, "height": 740}, "is_mobile": True},
}
PROMPTS = ("a red circle left of a blue square", "a green triangle above a yellow circle", "a large purple square")


@pytest.mark.skipif(os.environ.get("WEB_SCREENSHOTS") != "1", reason="asked for by WEB_SCREENSHOTS=1 alone")
@pytest.mark.parametrize("look", LOOKS)
def test_screenshots_are_made(demo, open_tab, look):
    tab = open_tab(demo, **LOOKS[look])
    for seed, prompt in enumerate(PROMPTS):
        tab.wait(tab.generate(prompt, steps=20, seed=seed))
    tab.fill("a small orange triangle", steps=200)
    job = tab.generate("a small orange triangle", steps=200, seed=5)
    until(lambda: tab.step(job) > 90)
    if look == "phone":
        tab.page.get_by_role("region", name="In progress").scroll_into_view_if_needed()
        tab.page.evaluate("document.querySelector('.jobs').scrollIntoView()")
    picture = tab.page.screenshot()
    tab.button("Cancel all").click()
    tab.wait(job, "cancelled")
    file = FOLDER / f"page-{look}.png"
    # a palette is all that flat colors and small pictures need
    PIL.Image.open(io.BytesIO(picture)).convert("RGB").quantize(256).save(file, optimize=True)
    assert file.stat().st_size < MOST_BYTES


@pytest.mark.parametrize("look", LOOKS)
def test_the_committed_screenshots_are_small(look):
    assert 10_000 < (FOLDER / f"page-{look}.png").stat().st_size < MOST_BYTES
