"""Ranks for every test of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks

SAMPLE = "cross"
"""The family that tests marked `sampled` run on that name no other."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves out what only tools.conformance_table runs: of a test marked `sampled` all families but one, and where it
    is seldom that one too. `--turns` of that tool leaves out the families alone.
    """
    turns = [plugin.in_turns for plugin in config.pluginmanager.get_plugins() if type(plugin).__name__ == "Collector"]
    if turns and not turns[0]:
        return
    left = [item for item in items if isinstance(item, pytest.Function) and _is_left(item, often=not turns)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = [item for item in items if item not in left]


def _is_left(item: pytest.Function, *, often: bool) -> bool:
    mark = item.get_closest_marker("sampled")
    if mark is None or "alone" not in item.callspec.params:
        return False
    return item.callspec.params["alone"] != next(iter(mark.args), SAMPLE) or (
        often and mark.kwargs.get("seldom", False)
    )


@pytest.fixture(scope="package")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with Ranks(tmp_path_factory.mktemp("ranks")) as started:
        yield started
