"""The world of shapes: what is painted is what was wished, and the judge sees it."""

from __future__ import annotations

import dataclasses
import hashlib
import random

import numpy as np
import pytest

from omni_grpc.scenes.captions import known_words, plain, say
from omni_grpc.scenes.judge import Verdict, judge, look
from omni_grpc.scenes.layout import Scene, Thing, arrange, paint
from omni_grpc.scenes.shapes import EVERY, EVERY_COLOUR, NEW_COLOURS, NEW_SHAPES, SHAPES
from omni_grpc.scenes.wish import PLACES, RELATIONS, Background, Noun, Wish, draw_new, draw_wish

SIZES = [(128, 128), (192, 128), (128, 192), (256, 256)]
KINDS = ["one", "count", "relation", "pair", "three"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_accepts_what_was_painted_for_a_wish(kind: str) -> None:
    rng = random.Random(f"accept {kind}")
    for _ in range(24):
        wish = draw_wish(rng, kind)
        picture = paint(arrange(wish, *rng.choice(SIZES), rng))
        assert judge(wish, picture) == Verdict(True, True, True), plain(wish)


@pytest.mark.parametrize("kind", KINDS)
def test_the_judge_refuses_a_picture_of_something_else(kind: str) -> None:
    rng = random.Random(f"refuse {kind}")
    for _ in range(12):
        wish = dataclasses.replace(draw_wish(rng, kind), background=None)
        picture = paint(arrange(wish, 128, 128, rng))
        first = wish.nouns[0]
        other = rng.choice([shape for shape in SHAPES if shape != first.shape])
        changed = dataclasses.replace(wish, nouns=(dataclasses.replace(first, shape=other), *wish.nouns[1:]))
        assert not judge(changed, picture).right, (plain(wish), plain(changed))
        more = dataclasses.replace(wish, nouns=(*wish.nouns, Noun(colour="red", shape="heart")))
        assert not judge(more, picture).things
        if len(wish.nouns) > 1:
            assert not judge(dataclasses.replace(wish, nouns=wish.nouns[:1], relation=None), picture).things


@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_holds_in_one_direction(relation: str) -> None:
    nouns = (Noun(colour="blue", shape="circle"), Noun(colour="yellow", shape="square"))
    picture = paint(arrange(Wish(nouns, relation), 128, 128, random.Random(relation)))
    held = [name for name in RELATIONS if judge(Wish(nouns, name), picture).where]
    assert held == [relation]


def test_places_sizes_and_backgrounds_are_seen() -> None:
    for place, (x, y) in PLACES.items():
        thing = Thing("green", "star", x, y, 0.14)
        picture = paint(Scene(128, 128, (thing,), Background("white")))
        verdicts = {name: judge(Wish((Noun(colour="green", shape="star", place=name),)), picture) for name in PLACES}
        assert [name for name, verdict in verdicts.items() if verdict.right] == [place]
        sized = {
            size: judge(Wish((Noun(colour="green", shape="star", size=size),)), picture) for size in ("small", "large")
        }
        assert [size for size, verdict in sized.items() if verdict.right] == ["small"]
    ground = Background("red", "blue", vertical=True)
    picture = paint(Scene(128, 128, (Thing("white", "heart", 0.5, 0.5, 0.2),), ground))
    noun = (Noun(colour="white", shape="heart"),)
    assert judge(Wish(noun, None, ground), picture).ground
    for wrong in (Background("red"), Background("blue", "red", vertical=True), Background("red", "blue")):
        assert not judge(Wish(noun, None, wrong), picture).ground


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [0.11, 0.2, 0.33])
def test_a_shape_is_found_where_it_is(shape: str, radius: float) -> None:
    thing = Thing("black", shape, 0.45, 0.52, radius)
    (seen,) = look(paint(Scene(192, 128, (thing,), Background("yellow"))))
    assert (seen.colour, seen.shape) == ("black", shape)
    assert (seen.x, seen.y, seen.radius) == pytest.approx((thing.x, thing.y, thing.radius), abs=0.02)


def test_noise_is_no_thing() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), dtype=np.uint8)
    assert look(noise) == []


def test_captions_are_made_of_known_words_and_say_every_part() -> None:
    rng, known = random.Random(0), set(known_words())
    for _ in range(500):
        wish = draw_wish(rng)
        words = [word.strip(".,").lower() for word in say(wish, rng).split()]
        assert known >= set(words), set(words) - known
        assert known >= {word.strip(".,") for word in plain(wish).split()}


def test_the_same_seed_gives_the_same_world() -> None:
    def digest() -> str:
        rng = random.Random(3)
        made = hashlib.sha256(" ".join(known_words()).encode())
        for _ in range(20):
            wish = draw_wish(rng)
            made.update(say(wish, rng).encode() + paint(arrange(wish, 128, 128, rng)).tobytes())
        return made.hexdigest()

    assert digest() == digest()


def test_a_tenth_of_the_combinations_is_held_out_whatever_words_size_and_background() -> None:
    rng = random.Random(1)
    wishes = [draw_wish(rng) for _ in range(4000)]
    assert 0.08 < sum(wish.held_out for wish in wishes) / len(wishes) < 0.12
    for wish in wishes[:200]:
        plainer = tuple(dataclasses.replace(noun, size=None) for noun in wish.nouns)
        assert Wish(plainer, wish.relation).held_out == wish.held_out


def test_every_colour_can_be_told_from_every_other() -> None:
    values = np.array(list(EVERY_COLOUR.values()), float)
    distances = np.linalg.norm(values[:, None] - values[None], axis=-1) + 1e3 * np.eye(len(values))
    assert distances.min() > 75


@pytest.mark.parametrize("word", [*NEW_SHAPES, *NEW_COLOURS])
def test_what_adapters_teach_is_seen_by_a_judge_who_knows_the_word_and_by_no_other(word: str) -> None:
    rng, known = random.Random(word), set(known_words())
    assert word not in known
    for _ in range(40):
        wish = draw_new(word, rng)
        assert any(word in (noun.shape, noun.colour) for noun in wish.nouns)
        assert word in say(wish, rng).lower()
        picture = paint(arrange(wish, *rng.choice(SIZES), rng))
        assert judge(wish, picture, EVERY) == Verdict(True, True, True), plain(wish)
        assert not judge(wish, picture).right
        plainer = dataclasses.replace(
            wish,
            nouns=tuple(
                dataclasses.replace(
                    noun,
                    shape="triangle" if noun.shape == word else noun.shape,
                    colour="red" if noun.colour == word else noun.colour,
                )
                for noun in wish.nouns
            ),
        )
        assert not judge(plainer, picture, EVERY).right


def test_a_judge_who_knows_more_words_says_the_same_of_known_ones() -> None:
    rng = random.Random(11)
    for _ in range(40):
        wish = draw_wish(rng)
        picture = paint(arrange(wish, 128, 128, rng))
        assert judge(wish, picture, EVERY) == judge(wish, picture)
