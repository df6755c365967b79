"""Random records of any type, from its type hints. Values differ from every default and survive single precision."""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from omni_grpc.types.errors import Code, Failure, Violation
from omni_grpc.types.step_cache import METHODS, FixedCache, RequestCache
from omni_grpc.wire.exceptions import rule

WORDS = st.text(min_size=1, max_size=8)
NUMBERS = st.integers(min_value=2, max_value=2**32 - 1)
EIGHTHS = st.integers(min_value=1, max_value=1_000_000).map(lambda n: n / 8)
"""Exact in single precision, and in nanoseconds."""

FAILURES = st.builds(
    Failure,
    code=st.sampled_from(list(Code)),
    reason=WORDS,
    message=WORDS,
    violations=st.lists(st.builds(Violation, WORDS, WORDS), max_size=3).map(tuple),
    retry_after=st.none() | EIGHTHS,
    metadata=st.dictionaries(WORDS, WORDS, max_size=3),
)


def records(kind: type) -> st.SearchStrategy[Any]:
    """All fields of a dataclass at random but for those that are not sent, which keep their defaults."""
    hints = typing.get_type_hints(kind)
    fields = [field.name for field in dataclasses.fields(kind) if rule(kind, field.name).sent]
    return st.builds(kind, **{name: _values(name, hints[name]) for name in fields})


def _values(name: str, hint: Any) -> st.SearchStrategy[Any]:
    if name == "sha256":
        return st.binary(min_size=32, max_size=32).map(bytes.hex)
    if hint == RequestCache | FixedCache | None:
        return st.none() | st.one_of(*map(records, METHODS.values()))
    if isinstance(hint, types.UnionType):
        return st.one_of(*(_values(name, part) for part in typing.get_args(hint)))
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return st.lists(_values(name, parts[0]), min_size=1, max_size=3).map(tuple)
    if origin is Mapping:
        return st.dictionaries(WORDS, _values(name, parts[1]), min_size=1, max_size=3)
    if hint is Failure:
        return FAILURES
    if dataclasses.is_dataclass(hint):
        return records(typing.cast(type, hint))
    if issubclass(hint, enum.Enum):
        return st.sampled_from(list(hint))
    simple = {
        int: NUMBERS,
        float: EIGHTHS,
        str: WORDS,
        bool: st.booleans(),
        bytes: st.binary(),
        types.NoneType: st.none(),
    }
    return simple[hint]
