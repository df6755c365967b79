"""Reads metrics as Prometheus does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import httpx2
from prometheus_client.core import Metric
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


class Figures:
    """The samples of one scrape, by name and labels."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self.families = {family.name: family for family in families}
        self.samples = [sample for family in self.families.values() for sample in family.samples]

    def of(self, name: str, **labels: str) -> float:
        """The sum of what has these labels, and perhaps others. Raises KeyError where nothing has."""
        found = [one.value for one in self.samples if one.name == name and labels.items() <= one.labels.items()]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)

    def labels(self, name: str) -> list[Mapping[str, str]]:
        return [one.labels for one in self.samples if one.name == name]


def read(text: str, content_type: str = "text/plain") -> Figures:
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in content_type else None
    return Figures((parse or text_string_to_metric_families)(text))


async def scrape(address: str | None, **headers: str) -> Figures:
    """The figures at an address of a server."""
    assert address is not None, "the server has no port of metrics"
    async with httpx2.AsyncClient(timeout=30, trust_env=False) as client:
        response = await client.get(f"{address}/metrics", headers=headers)
    assert response.status_code == 200, response.text
    return read(response.text, response.headers["content-type"])
