"""The geometry of packed rows: random batches against definitions that are written out row by row."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from omni_grpc.nn.rows import JOINT, MOD, LayoutCache, Row, Rows

runs = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), max_size=3).map(tuple)


@st.composite
def batches(draw: st.DrawFn) -> list[Row]:
    names = draw(st.sampled_from([("txt", "img"), ("img",), ("txt", "img", "audio")]))
    aside = draw(st.sampled_from([(), names[:1], names[1:2]])) if len(names) > 1 else ()
    rows = st.tuples(*(runs for _ in names)).map(lambda row: Row.of(aside=aside, **dict(zip(names, row, strict=True))))
    return draw(st.lists(rows, min_size=1, max_size=6))


def packed(rows: list[Row]) -> Rows:
    return Rows([(None, str(number)) for number in range(len(rows))], rows, LayoutCache("cpu"))


def numbered(rows: Rows, stream: str, start: int = 0) -> torch.Tensor:
    """A tensor packed by `stream` in which no two tokens are alike."""
    total = rows.stream(stream).total
    return torch.arange(start, start + 2 * total, dtype=torch.float32).reshape(total, 2)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_joint_has_each_rows_streams_one_after_the_other_but_for_those_aside(batch: list[Row]) -> None:
    rows = packed(batch)
    names = [name for name in batch[0].names if name not in batch[0].aside]
    parts = {name: numbered(rows, name, 1000 * place) for place, name in enumerate(names)}
    joint = rows.join(parts)
    expected = [parts[name][rows.stream(name).slice(row)] for row in range(len(rows)) for name in names]
    assert torch.equal(joint, torch.cat(expected))
    split = rows.split(joint)
    assert list(split) == list(parts)
    assert all(torch.equal(split[name], parts[name]) for name in parts)


@settings(max_examples=150, deadline=None)
@given(batches())
def test_every_token_finds_its_rows_modulation_vector(batch: list[Row]) -> None:
    rows = packed(batch)
    first = 0
    expected: dict[str, list[int]] = {name: [] for name in (*rows.layout.names, JOINT)}
    for row in batch:
        for name, row_runs in row.streams:
            vectors = [first + level for level, tokens in row_runs for _ in range(tokens)]
            expected[name] += vectors
            expected[JOINT] += vectors if name not in row.aside else []
        first += row.levels
    assert {name: index.tolist() for name, index in rows.index.items()} == expected
    assert rows.stream(MOD).total == first


@settings(max_examples=150, deadline=None)
@given(batches())
def test_index_tensors_are_int32_and_parts_of_one_buffer(batch: list[Row]) -> None:
    rows = packed(batch)
    tensors = [*rows.index.values(), *rows.place.values(), *(stream.cu for stream in rows.layout.streams.values())]
    assert {tensor.dtype for tensor in tensors} == {torch.int32}
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    for stream in rows.layout.streams.values():
        assert stream.cu.tolist() == list(stream.offsets)
        assert stream.longest == max(stream.lengths)


@settings(max_examples=150, deadline=None)
@given(batches(), st.data())
def test_narrow_is_the_batch_of_the_rows_that_are_left(batch: list[Row], data: st.DataObject) -> None:
    rows = packed(batch)
    for name in (*rows.layout.names, JOINT, MOD):
        rows.bind(name, name, rows.stream(name).split(numbered(rows, name)))
    chosen = data.draw(st.lists(st.sampled_from(range(len(rows))), min_size=1, unique=True).map(sorted))
    part = rows.narrow(chosen)
    assert part.owners == tuple(rows.owners[row] for row in chosen)
    assert part.layout.rows == tuple(batch[row] for row in chosen)
    for name in part.bound:
        assert torch.equal(part[name], torch.cat([rows[name][rows.stream(name).slice(row)] for row in chosen]))
        assert part[name].shape[0] == part.stream(name).total


def test_narrow_copies_only_what_is_scattered() -> None:
    rows = packed([Row.of(txt=2, img=5), Row.of(txt=3, img=4), Row.of(txt=1, img=6), Row.of(txt=1, img=1)])
    rows.bind("x", "img", rows.stream("img").split(numbered(rows, "img")))
    assert rows.narrow((0, 1, 2, 3)) is rows
    assert rows.narrow((1, 2))["x"].data_ptr() == rows["x"][5:].data_ptr()
    assert rows.narrow((1, 3))["x"].data_ptr() != rows["x"][5:].data_ptr()
    assert rows.narrow((1, 3)).layout is rows.narrow((1, 3)).layout


def test_a_single_row_is_bound_and_split_without_a_copy() -> None:
    rows = packed([Row.of(txt=2, img=3)])
    x = torch.randn(3, 4)
    rows.bind("x", "img", [x])
    assert rows["x"] is x
    joint = torch.randn(5, 4)
    assert rows.split(joint)["img"].data_ptr() == joint[2:].data_ptr()


def test_the_cache_keeps_the_layouts_used_last() -> None:
    cache = LayoutCache("cpu", capacity=2)
    small, middle, large = ((Row.of(txt=1, img=size),) for size in (1, 2, 3))
    first = cache.get(small)
    cache.get(middle)
    assert cache.get(small) is first
    cache.get(large)
    assert len(cache) == 2
    assert cache.get(small) is first
    assert cache.get(middle).rows == middle


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Row.of(joint=3), "'joint'"),
        (lambda: Row.of(mod=3), "'mod'"),
        (lambda: Row.of(img=-1), "'img'"),
        (lambda: Row.of(img=((-1, 2),)), "'img'"),
        (lambda: packed([]), "at least one row"),
        (lambda: packed([Row.of(txt=1, img=2), Row.of(img=2, txt=1)]), "the same streams"),
        (lambda: packed([Row.of(txt=1, img=2), Row.of(txt=1, img=2, aside=("txt",))]), "the same streams"),
        (lambda: Row.of(img=2, aside=("txt",)), "the row has no stream txt"),
        (lambda: Rows([], [Row.of(img=2)], LayoutCache("cpu")), "0 owners for 1 rows"),
        (lambda: packed([Row.of(img=2)]).bind("x", "img", [torch.zeros(3, 1)]), "'x'"),
        (lambda: packed([Row.of(img=2)]).bind("x", "img", []), "'x'"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, message) -> None:
    with pytest.raises(ValueError, match=message):
        make()
