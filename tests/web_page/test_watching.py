"""The page goes on after a reload, and after the server was away."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from omni_grpc.client import Client
from tests.web_page.studio import LONG, SOME, http_served, until


def test_a_reload_in_the_middle_goes_on(demo, open_tab):
    tab = open_tab(demo)
    job = tab.generate(**SOME)
    before = until(lambda: tab.step(job))
    tab.page.reload()
    until(lambda: tab.step(job) >= before)
    assert "step" in tab.card(job).inner_text()
    until(lambda: tab.preview(job))
    tab.wait(job)
    tab.card(job).get_by_role("img").wait_for()


def test_what_another_tab_makes_is_seen_and_followed(demo, open_tab):
    tab, other = open_tab(demo), open_tab(demo)
    other.field("Prompt").wait_for()
    job = tab.generate(**SOME)
    until(lambda: job in other.jobs())
    until(lambda: other.step(job) > 2)
    other.wait(job)


def test_a_job_of_another_client_is_followed_at_its_address(demo, open_tab):
    with Client(demo.grpc.address) as client:
        made = client.create_job("a blue square", seed=1, **SOME)
        tab = open_tab(demo, f"/#/jobs/{made.job_id}")
        dialog = tab.page.get_by_role("dialog")
        dialog.get_by_text("of 80").wait_for()
        dialog.get_by_role("img", name="output 1").wait_for()


@pytest.fixture
def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_restarted_server_is_found_again_and_its_jobs_end(free_port, open_tab, tmp_path):
    kept = ("--state-dir", str(tmp_path / "state"))
    with http_served("omni_grpc/demo", *kept, port=free_port) as server:
        tab = open_tab(server)
        done = tab.generate(steps=2)
        tab.wait(done)
        job = tab.generate("a green circle", **SOME)
        until(lambda: tab.step(job) > 3)
    banner = tab.page.get_by_role("alert").filter(has_text="Connection lost")
    banner.wait_for()
    with http_served("omni_grpc/demo", *kept, port=free_port):
        banner.wait_for(state="detached")
        tab.wait(job)
        assert tab.phase(done) == "done"
        tab.card(job).get_by_role("img").wait_for()


def test_a_server_that_kept_nothing_takes_its_jobs_along(free_port, open_tab):
    with http_served("omni_grpc/demo", port=free_port) as server:
        tab = open_tab(server)
        job = tab.generate(**LONG)
        until(lambda: tab.step(job) > 1)
        os.killpg(server.grpc.pid, signal.SIGKILL)
        tab.page.get_by_role("alert").filter(has_text="Connection lost").wait_for()
    with http_served("omni_grpc/demo", port=free_port):
        tab.card(job).wait_for(state="detached")


def test_an_answer_that_comes_late_changes_nothing(demo, open_tab):
    tab = open_tab(demo)

    def hold(route):
        answer = route.fetch()
        # the stream has told of all of the job meanwhile
        tab.page.locator("[data-phase=done]").filter(has_text="a late circle").wait_for()
        route.fulfill(response=answer)

    tab.page.route("**/CreateJob", hold)
    job = tab.generate("a late circle", steps=2)
    tab.page.get_by_role("button", name="Generate", exact=True).and_(
        tab.page.locator("[aria-disabled=false]")
    ).wait_for()
    assert tab.phase(job) == "done"
