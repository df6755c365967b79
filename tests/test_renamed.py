"""Fields that have the names of the API now can be read under their old names, with one warning."""

from __future__ import annotations

import dataclasses
import warnings

import pytest

from omni_grpc.types.events import Queued, Started, StepProgress
from omni_grpc.types.renamed import renamed
from omni_grpc.types.results import Artifact, Effective

OLD_NAMES = {
    Queued: {"depth": "queue_depth"},
    Started: {"steps": "total_steps"},
    StepProgress: {"total": "total_steps", "rows": "rows_total", "segments": "total_segments"},
    Artifact: {"id": "artifact_id", "sample_rate": "sample_rate_hz"},
    Effective: {"sample_rate": "sample_rate_hz"},
}


@pytest.mark.parametrize("kind", OLD_NAMES, ids=lambda kind: kind.__name__)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_names_still_give_the_values(kind: type) -> None:
    names = [field.name for field in dataclasses.fields(kind)]
    record = kind(**{name: f"the {name}" for name in names})
    for old, new in OLD_NAMES[kind].items():
        assert old not in names
        assert getattr(record, old) == f"the {new}"


def test_the_first_use_warns_where_it_is_and_names_the_new_field() -> None:
    @renamed(size="length", girth="width")
    @dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
    class Plank:
        length: int
        width: int

    with pytest.warns(DeprecationWarning, match=r"^Plank\.size is now Plank\.length$") as caught:
        assert Plank(length=3, width=1).size == 3
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Plank(length=4, width=1).size == 4
    with pytest.warns(DeprecationWarning, match=r"Plank\.girth is now Plank\.width"):
        assert Plank(length=4, width=1).girth == 1
    with pytest.raises((AttributeError, TypeError)):  # TypeError: https://github.com/python/cpython/issues/91126
        Plank(length=3, width=1).size = 5
    with pytest.raises(TypeError, match="size"):
        Plank(size=3, width=1)
