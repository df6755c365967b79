"""Inputs: images with a painted mask, videos, sound."""

from __future__ import annotations

import io
import re

import PIL.Image
import pytest

from tests.web_page.studio import http_served, until

KEEP_UPLOADS = """() => {
    const send = window.fetch;
    window.fetch = async (address, init) => {
        if (init?.body instanceof Blob) window.uploaded = [...new Uint8Array(await init.body.arrayBuffer())];
        return send(address, init);
    };
}"""
"""A browser driver does not see the bytes of a Blob that is sent."""


QUEUE = 3


def png(width=64, height=64, color=(200, 30, 30)):
    file = io.BytesIO()
    PIL.Image.new("RGB", (width, height), color).save(file, "PNG")
    return {"name": "input.png", "mimeType": "image/png", "buffer": file.getvalue()}


@pytest.fixture(scope="module")
def inpainter(tiny):
    flags = ("--diffusion-load-format", "diffusers", "--max-queue", str(QUEUE))
    with http_served(tiny("stable_diffusion"), *flags) as server:
        yield server


def paint(tab):
    """Paints the upper left quarter of the mask with the pointer, and a spot in the middle with the keys."""
    canvas = tab.page.get_by_role("application", name="Mask")
    until(lambda: canvas.evaluate("canvas => canvas.width") == 64)
    tab.page.get_by_label("Brush").fill("50")
    box = canvas.bounding_box()
    tab.page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.2)
    tab.page.mouse.down()
    tab.page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + box["height"] * 0.3, steps=4)
    tab.page.mouse.up()
    canvas.focus()
    for key in ("ArrowRight", "ArrowDown", " "):
        tab.page.keyboard.press(key)


def test_an_image_is_inpainted_under_a_painted_mask(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Inpaint (mask)")
    tab.page.get_by_label("Input images").set_input_files(png())
    tab.page.get_by_text("input.png").wait_for()
    tab.page.evaluate(KEEP_UPLOADS)
    tab.button("Paint the mask").click()
    paint(tab)
    tab.button("Use this mask").click()
    tab.page.get_by_text("painted mask").wait_for()
    mask = PIL.Image.open(io.BytesIO(bytes(tab.page.evaluate("window.uploaded")))).convert("L")
    assert mask.size == (64, 64)
    assert (mask.getpixel((14, 14)), mask.getpixel((60, 60))) == (255, 0)
    job = tab.generate("a cat", steps=2, seed=3)
    tab.wait(job)
    tab.card(job).get_by_role("link", name="a cat", exact=True).click()
    table = tab.page.get_by_role("table", name="What was done").inner_text()
    assert "task\tInpaint (mask)" in table
    assert "size\t64 x 64" in table


def test_an_inpaint_without_its_mask_is_said_at_the_mask(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Inpaint (mask)")
    tab.page.get_by_label("Input images").set_input_files(png())
    tab.page.get_by_text("input.png").wait_for()
    tab.fill("a cat", steps=2)
    tab.button("Generate").click()
    tab.page.locator("#f-mask-problem").filter(has_text="required").wait_for()


def test_a_result_is_sent_on_as_an_input(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Image from text")
    job = tab.generate("a cat", steps=2, width=64, height=64)
    tab.wait(job)
    tab.card(job).get_by_role("link", name="a cat", exact=True).click()
    tab.button("Use as an input").click()
    tab.page.get_by_text("output 1", exact=True).wait_for()
    tab.field("Make").select_option(label="Image from image")
    edited = tab.generate("a dog", steps=4, strength=0.5)
    tab.wait(edited)


def test_places_in_the_queue_are_shown_and_move(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Image from text")
    # this pipeline runs one request at a time
    jobs = [tab.generate(f"a cat {number}", steps=200, width=256, height=256) for number in range(3)]
    until(lambda: "1 job before it" in tab.card(jobs[2]).inner_text())
    tab.button("Cancel a cat 1").click()
    until(lambda: "next in the queue" in tab.card(jobs[2]).inner_text())
    tab.button("Cancel all").click()
    for job in jobs:
        tab.wait(job, "cancelled")


def test_a_full_queue_says_when_to_try_again(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Image from text")
    jobs = [tab.generate(f"a cat {number}", steps=200, width=256, height=256) for number in range(QUEUE)]
    while not tab.page.get_by_role("alert").filter(has_text="queue").count():
        before = len(tab.jobs())
        tab.button("Generate").click()
        until(lambda before=before: len(tab.jobs()) > before or tab.page.get_by_role("alert").count())
    said = tab.page.get_by_role("alert").filter(has_text="queue").inner_text()
    assert re.search(r"\(try again in [\d.]+ s\)", said)
    tab.button("Cancel all").click()
    for job in jobs:
        tab.wait(job, "cancelled")


def test_a_pasted_image_becomes_an_input(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Prompt").wait_for()
    tab.page.evaluate(
        """bytes => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], "pasted.png", { type: "image/png" }));
            document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: data, bubbles: true }));
        }""",
        list(png()["buffer"]),
    )
    tab.page.get_by_text("pasted.png", exact=True).wait_for()
    assert tab.field("Make").evaluate("select => select.selectedOptions[0].text") != "Image from text"


def test_a_file_that_is_no_image_is_said_at_its_field(inpainter, open_tab):
    tab = open_tab(inpainter)
    tab.field("Make").select_option(label="Image from image")
    broken = {"name": "broken.png", "mimeType": "image/png", "buffer": b"no picture"}
    tab.page.get_by_label("Input images").set_input_files(broken)
    tab.page.get_by_text("broken.png").wait_for()
    tab.fill("a cat")
    tab.button("Generate").click()
    tab.page.locator("#f-images-problem").filter(has_text="unknown type").wait_for()


def test_a_video_is_played(tiny, open_tab):
    with http_served(tiny("wan_single")) as server:
        tab = open_tab(server)
        assert tab.field("Frames").get_attribute("placeholder")
        job = tab.generate("a cat runs", steps=2, frames=5, width=64, height=64)
        tab.wait(job)
        tab.card(job).get_by_role("link", name="a cat runs", exact=True).click()
        video = tab.page.get_by_role("dialog").locator("video")
        until(lambda: video.evaluate("video => video.readyState >= 2 && video.videoWidth") == 64)
        video.evaluate("video => { video.muted = true; return video.play(); }")
        until(lambda: video.evaluate("video => video.currentTime") > 0)


def test_a_video_begins_with_an_image(tiny, open_tab):
    with http_served(tiny("wan_i2v")) as server:
        tab = open_tab(server)
        tab.page.get_by_label("First frame").set_input_files(png())
        tab.page.get_by_text("input.png", exact=True).wait_for()
        job = tab.generate("a cat runs", steps=2, frames=5, width=64, height=64)
        tab.wait(job)
        tab.card(job).get_by_role("link", name="a cat runs", exact=True).click()
        assert "task\tVideo from images" in tab.page.get_by_role("table", name="What was done").inner_text()


def test_sound_is_played(tiny, open_tab):
    with http_served(tiny("stable_audio")) as server:
        tab = open_tab(server)
        job = tab.generate("rain", steps=2)
        tab.wait(job)
        tab.card(job).get_by_role("link", name="rain", exact=True).click()
        sound = tab.page.get_by_role("dialog").locator("audio")
        until(lambda: sound.evaluate("sound => sound.duration") > 0)
