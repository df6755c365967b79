"""Making something on the page: progress, previews, cancelling, what comes of a result."""

from __future__ import annotations

import re

from tests.web_page.studio import LONG, PROMPT, SOME, until


def test_the_form_shows_what_the_model_can_do_and_no_more(demo, open_tab):
    tab = open_tab(demo)
    assert tab.field("Steps").get_attribute("placeholder") == "20"
    assert tab.field("Width").get_attribute("placeholder") == "128"
    assert tab.field("CFG scale").get_attribute("placeholder") == "4"
    assert tab.field("Make").locator("option").all_inner_texts() == ["Image from text"]
    for label in ("Guidance", "Step cache", "Strength", "Frames"):
        assert tab.field(label).count() == 0, label
    assert tab.page.get_by_role("group", name="Inputs").count() == 0


def test_every_step_is_shown_as_it_comes(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(seed=7, **SOME)
    steps, previews, titles = set(), set(), set()
    while tab.phase(job) != "done":
        steps.add(tab.step(job))
        previews.add(tab.preview(job) if tab.phase(job) == "denoising" else "")
        titles.add(tab.page.title())
    assert len(steps) > 8
    assert len(previews - {""}) > 5
    assert any(re.fullmatch(r"\d+ % - omni_grpc", title) for title in titles)
    assert tab.page.title() == "omni_grpc"
    picture = tab.card(job).get_by_role("img", name=f"{PROMPT}, output 1")
    until(lambda: picture.evaluate("image => image.naturalWidth") == 192)
    assert "seed 7" in tab.card(job).inner_text()


def test_what_a_card_says_while_the_job_runs(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(**LONG)
    until(lambda: tab.step(job) > 2)
    said = tab.card(job).inner_text()
    for wanted in (r"denoising", r"\d+ %", r"step \d+ of 200", r"noise [\d.]+", r"a step", r"[\d.]+ s left"):
        assert re.search(wanted, said), wanted
    tab.button(f"Cancel {PROMPT}").click()
    tab.wait(job, "cancelled")
    assert tab.card(job).locator("canvas").count() == 0


def test_previews_can_be_switched_off(demo, open_tab):
    tab = open_tab(demo)
    tab.page.get_by_text("More settings").click()
    tab.page.get_by_label("Preview of every step").uncheck()
    job = tab.generate(**SOME)
    until(lambda: tab.step(job) > 3)
    assert tab.card(job).locator("canvas").count() == 0
    tab.wait(job)


def test_all_jobs_are_cancelled_at_once(demo, open_tab):
    tab = open_tab(demo)
    jobs = [tab.generate(f"a red circle {number}", **LONG) for number in range(3)]
    tab.button("Cancel all").click()
    for job in jobs:
        tab.wait(job, "cancelled")


def test_ten_jobs_at_once_over_one_stream(demo, open_tab):
    tab = open_tab(demo)
    watches = []
    tab.page.on("request", lambda request: watches.append(request.url) if "WatchJob" in request.url else None)
    jobs = [tab.generate(f"a red circle number {number}", steps=12) for number in range(10)]
    for job in jobs:
        tab.wait(job)
        until(lambda job=job: tab.card(job).locator("img").evaluate("image => image.naturalWidth") == 128)
    assert len(watches) <= 1  # the one that the page begins with


def test_again_makes_the_same_and_vary_another(demo, open_tab):
    tab = open_tab(demo)
    first = tab.generate(steps=4)
    tab.wait(first)

    def repeated(name: str) -> str:
        before = set(tab.jobs())
        tab.card(first).get_by_role("button", name=f"{name}: {PROMPT}").click()
        (job,) = until(lambda: set(tab.jobs()) - before)
        tab.wait(job)
        return job

    def seed(job: str) -> str:
        return re.search(r"seed (\d+)", tab.card(job).inner_text())[1]

    assert seed(repeated("Again")) == seed(first)
    assert seed(repeated("Vary")) != seed(first)


def test_a_job_has_an_address_of_its_own(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(steps=4, seed=11)
    tab.wait(job)
    # another browser, which made nothing
    other = open_tab(demo, f"/#/jobs/{job}")
    dialog = other.page.get_by_role("dialog", name=PROMPT)
    dialog.get_by_role("img").wait_for()
    table = dialog.get_by_role("table", name="What was done").inner_text()
    for row in ("seed\t11", "steps\t4", "size\t128 x 128", "model\tdemo"):
        assert row in table
    other.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    assert other.page.url.endswith("#/")


def test_a_job_that_is_not_there_is_said_so(demo, open_tab):
    tab = open_tab(demo, "/#/jobs/job_that_never_was")
    tab.page.get_by_role("dialog").get_by_text("job_that_never_was").wait_for()


def test_a_deleted_job_is_gone_for_all(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(steps=2)
    tab.wait(job)
    tab.card(job).get_by_role("button", name=f"Delete {PROMPT}").click()
    tab.card(job).wait_for(state="detached")
    tab.page.reload()
    tab.page.get_by_role("region", name="Results").wait_for()
    assert job not in tab.jobs()


OLD_AT_FIRST = """() => {
    const asked = window.fetch, old = JSON.stringify({ url: "/files/art_old?expires=1&signature=none" });
    window.olds = 0;
    window.fetch = (to, init) =>
        String(to).endsWith("/address") && window.olds++ === 0 ? Promise.resolve(new Response(old)) : asked(to, init);
}"""
"""In the page and not between it and the server, where a stream of events would pass as well."""


def test_an_address_that_is_too_old_is_renewed(demo, open_tab):
    tab = open_tab(demo)
    tab.page.evaluate(OLD_AT_FIRST)
    job = tab.generate(steps=2)
    tab.wait(job)
    until(lambda: tab.page.evaluate("window.olds") > 1)
    until(lambda: tab.card(job).locator("img").evaluate("image => image.naturalWidth") == 128)


def test_several_outputs_of_one_job(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(steps=3, seed=5, outputs=2)
    tab.wait(job)
    tab.card(job).get_by_role("link", name=PROMPT, exact=True).click()
    dialog = tab.page.get_by_role("dialog")
    until(lambda: dialog.get_by_role("img").count() == 2)
    assert {"seed 5", "seed 6"} <= set(dialog.inner_text().replace("\t", "\n").split("\n"))


def test_parameters_in_a_file_fill_the_form(demo, open_tab, tmp_path):
    tab = open_tab(demo)
    tab.page.get_by_text("More settings").click()
    tab.page.get_by_label("Write prompt and settings into the files").check()
    job = tab.generate(steps=3, seed=21, width=64, height=96)
    tab.wait(job)
    tab.card(job).get_by_role("link", name=PROMPT, exact=True).click()
    with tab.page.expect_download() as download:
        tab.page.get_by_role("link", name="Download").click()
    file = tmp_path / "made.png"
    download.value.save_as(file)
    other = open_tab(demo)
    other.field("Prompt").wait_for()
    drop_file(other, file)
    until(lambda: other.field("Prompt").input_value() == PROMPT)
    values = [other.field(label).input_value() for label in ("Steps", "Seed", "Width", "Height")]
    assert values == ["3", "21", "64", "96"]


def drop_file(tab, file):
    """Drops a file on the page, as from a folder."""
    tab.page.evaluate(
        """([name, bytes]) => {
            const data = new DataTransfer();
            data.items.add(new File([new Uint8Array(bytes)], name, { type: "image/png" }));
            document.body.dispatchEvent(new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true }));
        }""",
        [file.name, list(file.read_bytes())],
    )
