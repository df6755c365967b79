"""A sample of `python -m benchmarks.service.chaos`: each fault strikes real servers once.

No assertion is about speed.
"""

from __future__ import annotations

import pytest

from benchmarks.service.chaos.course import FAULTS, Numbers, strike

pytestmark = [pytest.mark.service, pytest.mark.timeout(300)]

CASES = [(name, store) for name, fault in FAULTS.items() for store in fault.stores]


@pytest.mark.parametrize(("name", "store"), CASES, ids=[f"{name}-{store}" for name, store in CASES])
def test_nothing_is_lost(name: str, store: str) -> None:
    found = strike(FAULTS[name], store, Numbers(rounds=1))
    if found.skipped:
        pytest.skip(found.skipped)
    assert found.problems == []
    assert (found.rounds, found.lost) == (1, 0)
    assert found.jobs > 0
    assert len(found.recovered) == 1
