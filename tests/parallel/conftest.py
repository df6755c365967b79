"""Ranks for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks

SAMPLE = "cross"
"""The family that tests marked `sampled` run on, except for tools.conformance_table, which runs them on all."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any(type(plugin).__name__ == "Collector" for plugin in config.pluginmanager.get_plugins()):
        return
    left = [
        item
        for item in items
        if item.get_closest_marker("sampled") and isinstance(item, pytest.Function)
        if item.callspec.params.get("alone", SAMPLE) != SAMPLE
    ]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started
