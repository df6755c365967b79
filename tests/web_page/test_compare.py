"""Two settings side by side, and the server tab."""

from __future__ import annotations

import io
import math
import re

import numpy as np
import PIL.Image
import pytest

from tests.web_page.studio import LONG, PROMPT, SOME, http_served, until

CACHE = '{"rel_l1_thresh": 0.4}'


@pytest.fixture(scope="module")
def caching():
    with http_served("omni_grpc/demo", "--cache-backend", "tea_cache", "--cache-config", CACHE) as server:
        yield server


def said_psnr(tab):
    return until(lambda: re.search(r"PSNR: (infinite|[\d.]+)", tab.page.locator(".psnr").inner_text()))[1]


def pixels(tab, name):
    address = tab.page.get_by_role("dialog").get_by_role("img", name=name, exact=True).get_attribute("src")
    return np.asarray(PIL.Image.open(io.BytesIO(tab.page.request.get(address).body())).convert("RGB")).astype(float)


def test_cache_on_and_off_with_one_seed(caching, open_tab):
    tab = open_tab(caching)
    tab.page.get_by_text("Compare two settings").click()
    tab.page.get_by_label("Make a second one").check()
    tab.page.get_by_role("group", name="The second has otherwise").get_by_label("Step cache").select_option("off")
    tab.fill(steps=30)
    tab.button("Generate both").click()
    tab.page.wait_for_url("**/#/compare/**")
    said = float(said_psnr(tab))
    a, b = pixels(tab, "A"), pixels(tab, "B")
    assert said == pytest.approx(10 * math.log10(255**2 / np.mean((a - b) ** 2)), abs=0.01)
    differ = tab.page.get_by_role("table", name="What differs").inner_text()
    assert re.search(r"step cache\tTeaCache, threshold 0.4\toff", differ)
    assert "seed\t" not in differ
    assert "cache hits" in differ


def test_the_slider_shows_more_of_one_or_the_other(caching, open_tab):
    tab = open_tab(caching)
    jobs = [tab.generate(steps=2, seed=seed) for seed in (1, 2)]
    for job in jobs:
        tab.wait(job)
        tab.card(job).get_by_role("button", name=f"Compare {PROMPT}").click()
    slider = tab.page.get_by_role("slider", name="How much of A")
    over = tab.page.locator(".pair .over")
    slider.focus()
    tab.page.keyboard.press("Home")
    assert over.evaluate("image => getComputedStyle(image).clipPath") == "inset(0px 0px 0px 0%)"
    tab.page.keyboard.press("End")
    assert over.evaluate("image => getComputedStyle(image).clipPath") == "inset(0px 0px 0px 100%)"


def test_equal_pictures_are_said_to_be_equal(caching, open_tab):
    tab = open_tab(caching)
    jobs = [tab.generate(steps=2, seed=9) for _ in range(2)]
    for job in jobs:
        tab.wait(job)
    tab.go(f"/#/compare/{jobs[0]}/{jobs[1]}")
    assert said_psnr(tab) == "infinite"


def test_cache_hits_are_shown(caching, open_tab):
    tab = open_tab(caching)
    job = tab.generate(**SOME)
    until(lambda: re.search(r"cache \d+ of \d+", tab.card(job).inner_text()))


def test_the_server_tab_shows_the_load(caching, open_tab):
    tab = open_tab(caching)
    # large enough not to end while it is looked at
    job = tab.generate(**LONG)
    until(lambda: tab.step(job))
    tab.page.get_by_role("link", name="Server").click()
    tab.page.get_by_role("img", name="Jobs: running: 1, waiting: 0").wait_for()
    row = tab.page.get_by_role("table", name="Models").get_by_role("row").nth(1)
    until(lambda: row.inner_text().startswith("demo\tready\t1\t0"))
    chart = tab.page.get_by_role("img", name=re.compile("^Jobs: "))
    until(lambda: len(chart.locator("polyline").first.get_attribute("points").split()) > 2)
    tab.page.get_by_role("img", name=re.compile(r"^Time of a step: my jobs: [\d.]+ s")).wait_for()
    tab.page.get_by_role("img", name=re.compile(r"^Denoising steps per second: steps: [\d.]+")).wait_for()
    tab.page.get_by_role("link", name="Create").click()
    tab.button(f"Cancel {PROMPT}").click()
    tab.wait(job, "cancelled")
