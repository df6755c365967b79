"""A server that serves the page, and what its users do in a tab."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.service.server import Server, served
from omni_grpc.store.job import new_job_id

ROOT = Path(__file__).resolve().parents[2]
AXE = ROOT / "clients" / "web" / "node_modules" / "axe-core" / "axe.min.js"
PROMPT = "a red circle left of a blue square"
LONG: Mapping[str, int] = {"steps": 200, "width": 448, "height": 448}
"""Fields of a job that does not end by itself while a test looks at it: half a minute."""
SOME: Mapping[str, int] = {"steps": 80, "width": 192, "height": 192}
"""Fields of a job that ends by itself after some seconds, while its steps are looked at."""
SECONDS = 60.0
_HTTP = re.compile(r"HTTP listens on (http\S+)")


@dataclasses.dataclass(frozen=True)
class HttpServer:
    """A running server, and where its page is."""

    grpc: Server
    url: str


@contextlib.contextmanager
def http_served(checkpoint: Path | str, *flags: str, port: int = 0) -> Iterator[HttpServer]:
    """Serves a checkpoint with an HTTP port for the length of the block."""
    with served(checkpoint, "--http-port", str(port), *flags) as server:
        found = _HTTP.search(server.logged())
        assert found, server.logged()
        yield HttpServer(server, found[1])


def until(wanted: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What `wanted` answers, once that is true. Fails after `seconds`."""
    end = time.monotonic() + seconds
    while not (found := wanted()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.02)
    return found


class Tab:
    """The page in a tab, with the words of its users."""

    def __init__(self, page: Any, url: str) -> None:
        self.page = page
        self.url = url
        self.errors: list[str] = []
        page.set_default_timeout(SECONDS * 1000)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        # what the policy of the page forbids is an error in the console, and nothing else
        page.on("console", lambda said: self.errors.append(said.text) if "Content Security" in said.text else None)

    def go(self, path: str = "/") -> None:
        self.page.goto(self.url + path)

    def field(self, label: str) -> Any:
        # the second settings of a comparison have the same names, further down
        return self.page.get_by_role("form", name="Generate").get_by_label(label, exact=True).first

    def button(self, name: str) -> Any:
        return self.page.get_by_role("button", name=name, exact=True)

    def fill(self, prompt: str = PROMPT, **fields: object) -> None:
        """Fills the form: `steps=3` is the field "Steps"."""
        self.field("Prompt").fill(prompt)
        for name, value in fields.items():
            self.field(name.replace("_", " ").capitalize()).fill(str(value))

    def generate(self, prompt: str = PROMPT, **fields: object) -> str:
        """Fills the form and sends it; returns the id of the job."""
        self.fill(prompt, **fields)
        # ids sort by creation: the page may still be fetching the list of the jobs before
        start = new_job_id()
        self.button("Generate").click()
        newer: list[str] = until(lambda: [job for job in self.jobs() if job > start])
        return newer[0]

    def jobs(self, phase: str = "") -> list[str]:
        """Ids of the jobs that the page shows, of those in a phase where one is given."""
        cards = self.page.locator(f"[data-job]{f'[data-phase={phase!r}]' if phase else ''}")
        return cards.evaluate_all("cards => cards.map(card => card.dataset.job)")

    def card(self, job_id: str) -> Any:
        return self.page.locator(f"[data-job={job_id}]")

    def phase(self, job_id: str) -> str:
        return str(self.card(job_id).get_attribute("data-phase"))

    def wait(self, job_id: str, phase: str = "done") -> None:
        self.page.locator(f"[data-job={job_id}][data-phase={phase!r}]").wait_for()

    def step(self, job_id: str) -> int:
        """Steps that the card says are done; 0 where it says none."""
        said = self.card(job_id).locator(".progress").all_inner_texts()
        found = re.search(r"step (\d+) of", said[0]) if said else None
        return int(found[1]) if found else 0

    def problem_at(self, label: str) -> str:
        """What is said to be wrong at a field, by the element that its control names; "" where nothing is."""
        control = self.field(label)
        if control.get_attribute("aria-invalid") != "true":
            return ""
        (name,) = (part for part in control.get_attribute("aria-describedby").split() if part.endswith("-problem"))
        return str(self.page.locator(f"#{name}").inner_text())

    def preview(self, job_id: str) -> str:
        """A digest of the pixels of the preview on the card; "" where there is none."""
        return str(
            self.card(job_id).evaluate(
                """card => {
                    const canvas = card.querySelector("canvas");
                    return canvas ? canvas.toDataURL() : "";
                }"""
            )
        )
