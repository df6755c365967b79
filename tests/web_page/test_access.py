"""Who may use the page, and who can: tokens, keyboards, screen readers, phones."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.web_page.studio import LONG, PROMPT, ROOT, SOME, http_served, until

PHONE = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
LOOKS = {
    "light": {"color_scheme": "light"},
    "dark": {"color_scheme": "dark"},
    "phone": {"color_scheme": "light", **PHONE},
}


def barriers(tab, axe):
    """What axe-core finds serious or critical, in its words."""
    tab.page.evaluate(axe)
    found = tab.page.evaluate("() => axe.run(document).then(result => result.violations)")
    return [
        json.dumps({"id": one["id"], "nodes": [node["html"][:150] for node in one["nodes"]]})
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.fixture(params=LOOKS)
def look(request):
    return LOOKS[request.param]


def test_no_barriers(demo, open_tab, axe, look):
    tab = open_tab(demo, **look)
    tab.page.get_by_text("More settings").click()
    tab.page.get_by_text("Compare two settings").click()
    tab.page.get_by_label("Make a second one").check()
    tab.page.get_by_label("Negative prompt of my own").check()
    tab.fill(" ")
    tab.button("Generate both").click()
    until(lambda: tab.problem_at("Prompt"))
    assert barriers(tab, axe) == []
    tab.page.get_by_label("Make a second one").uncheck()
    done, job = tab.generate(steps=2), tab.generate(**LONG)
    tab.wait(done)
    until(lambda: tab.step(job))
    assert barriers(tab, axe) == []
    tab.card(done).get_by_role("link", name=PROMPT, exact=True).click()
    tab.page.get_by_role("dialog").get_by_role("img").wait_for()
    assert barriers(tab, axe) == []
    tab.page.keyboard.press("Escape")
    tab.button("Cancel all").click()
    tab.page.get_by_role("link", name="Server").click()
    tab.page.get_by_role("table", name="Models").wait_for()
    assert barriers(tab, axe) == []


def test_a_phone_scrolls_in_one_direction(demo, open_tab):
    tab = open_tab(demo, **PHONE)
    tab.page.get_by_text("More settings").click()
    job = tab.generate("a" * 200, steps=2)
    tab.wait(job)
    wide = "() => document.documentElement.scrollWidth"
    assert tab.page.evaluate(wide) <= 360
    tab.card(job).get_by_role("heading").get_by_role("link").click()
    tab.page.get_by_role("dialog").wait_for()
    assert tab.page.evaluate(wide) <= 360
    tab.page.keyboard.press("Escape")
    tab.page.get_by_role("link", name="Server").click()
    tab.page.get_by_role("table", name="Models").wait_for()
    assert tab.page.evaluate(wide) <= 360


def test_the_keyboard_alone(demo, open_tab):
    tab = open_tab(demo)
    tab.field("Prompt").wait_for()
    tab.page.keyboard.press("Tab")
    assert tab.page.evaluate("document.activeElement.textContent") == "Skip to the results"
    tab.field("Prompt").focus()
    tab.page.keyboard.type("a red circle")
    tab.page.keyboard.press("Control+Enter")
    (job,) = until(lambda: tab.page.locator("[data-job]").filter(has_text="a red circle").all()[:1])
    job.get_by_role("heading").get_by_role("link").focus()
    tab.page.keyboard.press("Enter")
    dialog = tab.page.get_by_role("dialog")
    dialog.wait_for()
    tab.page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    # the card gets the focus back once the dialog is gone
    until(lambda: tab.page.evaluate("document.activeElement.closest('[data-job]') !== null"))


def test_a_screen_reader_hears_of_progress(demo, open_tab):
    tab = open_tab(demo)
    live = tab.page.locator("[aria-live=polite]")
    heard = set()
    job = tab.generate(**SOME)
    while tab.phase(job) != "done":
        heard.add(live.inner_text())
    until(lambda: live.inner_text() == f"{PROMPT}: done")
    assert any("percent" in text for text in heard)


def test_the_theme_can_be_chosen_and_stays(demo, open_tab):
    tab = open_tab(demo, color_scheme="light")
    back = "() => getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(back)
    toggle = tab.page.get_by_role("button", name="Theme")
    toggle.click()
    assert tab.page.evaluate(back) == light
    toggle.click()
    dark = tab.page.evaluate(back)
    assert dark != light
    tab.page.reload()
    tab.field("Prompt").wait_for()
    assert tab.page.evaluate(back) == dark


# --- tokens -----------------------------------------------------------------------------------------------------------


def token(file, subject, scopes):
    command = [sys.executable, "-m", "omni_grpc", "token", "new", "--tenant", "studio", "--subject", subject]
    command += ["--scopes", scopes, "--expires", "1d", "--file", str(file)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=dict(os.environ))
    return made.stdout.split()[0]


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    file = tmp_path_factory.mktemp("tokens") / "callers.yaml"
    tokens = {name: token(file, name, scopes) for name, scopes in (("whole", "generate,read"), ("half", "generate"))}
    with http_served("omni_grpc/demo", "--token-file", str(file)) as server:
        yield server, tokens


def sign_in(tab, secret, keep=False):
    tab.page.get_by_label("Token").fill(secret)
    tab.page.get_by_label("Keep it in this browser").set_checked(keep)
    tab.button("Sign in").click()


def test_a_token_is_asked_for_and_used(guarded, open_tab, axe):
    server, tokens = guarded
    tab = open_tab(server)
    tab.page.get_by_label("Token").wait_for()
    assert barriers(tab, axe) == []
    sign_in(tab, "wrong")
    tab.page.get_by_role("alert").filter(has_text="token").wait_for()
    sign_in(tab, tokens["whole"])
    job = tab.generate(steps=3)
    tab.wait(job)
    # shown by an address that needs no token
    until(lambda: tab.card(job).locator("img").evaluate("image => image.naturalWidth") == 128)
    tab.page.reload()
    until(lambda: job in tab.jobs())
    tab.button("Sign out").click()
    tab.page.get_by_label("Token").wait_for()
    assert tab.jobs() == []


@pytest.mark.parametrize("keep", [False, True])
def test_a_token_is_kept_as_long_as_was_chosen(guarded, open_tab, keep):
    server, tokens = guarded
    tab = open_tab(server)
    sign_in(tab, tokens["whole"], keep)
    tab.field("Prompt").wait_for()
    later = tab.page.context.new_page()
    later.goto(server.url)
    (later.get_by_label("Prompt", exact=True) if keep else later.get_by_label("Token")).wait_for()


def test_a_scope_that_is_missing_is_named(guarded, open_tab):
    server, tokens = guarded
    tab = open_tab(server)
    sign_in(tab, tokens["half"])
    tab.page.get_by_role("alert").filter(has_text="scope").wait_for()
    tab.page.get_by_role("link", name="Server").click()
    said = tab.page.get_by_role("region", name="Server").get_by_role("alert")
    said.wait_for()
    assert "read" in said.inner_text()
