"""From a wish to words: many ways to say the same thing."""

from __future__ import annotations

import random
import string
from collections.abc import Mapping

from omni_grpc.scenes.shapes import COLOURS, SHAPES
from omni_grpc.scenes.wish import Background, Noun, Wish, draw_wish

NUMBERS: Mapping[int, tuple[str, ...]] = {2: ("two", "2"), 3: ("three", "3")}
SYNONYMS: Mapping[str, tuple[str, ...]] = {
    "gray": ("gray", "grey"),
    "cross": ("cross", "plus sign"),
    "circle": ("circle", "circle", "disc", "dot"),
    "ring": ("ring", "ring", "donut"),
    "square": ("square", "square", "box"),
    "diamond": ("diamond", "diamond", "rhombus"),
    "small": ("small", "little", "tiny"),
    "large": ("large", "big", "huge"),
    "left of": ("left of", "to the left of", "on the left of"),
    "right of": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over", "on top of"),
    "below": ("below", "under", "beneath", "underneath"),
    "inside": ("inside", "inside of", "in", "within"),
    "top": ("at the top", "on top", "near the top"),
    "bottom": ("at the bottom", "near the bottom"),
    "left": ("on the left", "at the left", "on the left side"),
    "right": ("on the right", "at the right", "on the right side"),
    "center": ("in the center", "in the middle", "at the center", "in the centre"),
    "top left": ("in the top left", "in the upper left corner", "in the top left corner", "at the top left"),
    "top right": ("in the top right", "in the upper right corner", "in the top right corner", "at the top right"),
    "bottom left": ("in the bottom left", "in the lower left corner", "in the bottom left corner"),
    "bottom right": ("in the bottom right", "in the lower right corner", "in the bottom right corner"),
}
OPENINGS = (
    ("", 10),
    ("a picture of ", 2),
    ("a drawing of ", 2),
    ("an image of ", 1),
    ("a photo of ", 1),
    ("a painting of ", 1),
    ("draw ", 1),
    ("paint ", 1),
    ("there is ", 1),
    ("show me ", 1),
    ("please draw ", 1),
    ("i want ", 1),
    ("simple illustration of ", 1),
)


def plain(wish: Wish) -> str:
    """The wish in the words that this page of code itself uses; always the same ones."""
    things = [_thing(noun, None) for noun in wish.nouns]
    if wish.relation:
        text = f"{things[0]} {wish.relation} {things[1]}"
    else:
        text = " and ".join([", ".join(things[:-1]), things[-1]] if len(things) > 1 else things)
    if (ground := wish.background) is not None:
        if ground.to is None:
            text += f" on a {ground.colour} background"
        else:
            text += f" on a gradient from {ground.colour} to {ground.to}"
    return text


def say(wish: Wish, rng: random.Random) -> str:
    """The wish in one of many wordings."""
    things = [_thing(noun, rng) for noun in wish.nouns]
    if wish.relation:
        text = _related(things, wish.relation, rng)
    elif len(things) == 1:
        text = things[0]
    else:
        joint = rng.choice((" and ", " and ", ", ", " with ", " next to ") if len(things) == 2 else (" and ", ", "))
        text = ", ".join(things[:-1]) + joint + things[-1]
    opening = rng.choices([words for words, _ in OPENINGS], [weight for _, weight in OPENINGS])[0]
    text = opening + text
    if wish.background is not None:
        text = _with_background(text, wish.background, rng)
    if rng.random() < 0.25:
        text = text[0].upper() + text[1:]
    return text + "." if rng.random() < 0.2 else text


def held_out(count: int, seed: int) -> list[tuple[Wish, str]]:
    """Wishes that training never saw, and captions for them. The same arguments give the same ones."""
    rng = random.Random(seed)
    chosen: list[tuple[Wish, str]] = []
    while len(chosen) < count:
        wish = draw_wish(rng)
        if wish.held_out:
            chosen.append((wish, say(wish, rng)))
    return chosen


def known_words() -> tuple[str, ...]:
    """Every word that a caption can have, in lower case."""
    rng = random.Random(0)
    texts = [words for words, _ in OPENINGS]
    texts += [*COLOURS, *SHAPES, *(f"{shape}s" for shape in SHAPES), *(f"{name}es" for name in ("cross", "box"))]
    texts += [phrase for phrases in (*SYNONYMS.values(), *NUMBERS.values()) for phrase in phrases]
    for relation in ("left of", "inside", None):
        nouns = (Noun(colour="red", shape="star"), Noun(colour="blue", shape="ring"))
        for ground in (Background("gray"), Background("gray", "red"), Background("gray", "red", True)):
            texts += [say(Wish(nouns, relation, ground), rng) for _ in range(300)]
    texts += [say(Wish((Noun(colour="red", shape=shape, count=2),)), rng) for shape in SHAPES for _ in range(40)]
    words = {word.strip(string.punctuation).lower() for text in texts for word in text.split()}
    return tuple(sorted(words - {""}))


def _thing(noun: Noun, rng: random.Random | None) -> str:
    """A noun with its article or number, size, colour and place."""

    def word(name: str) -> str:
        return rng.choice(SYNONYMS.get(name, (name,))) if rng else name

    kind = f"{word(noun.colour)} {_plural(word(noun.shape)) if noun.count > 1 else word(noun.shape)}"
    if noun.size:
        kind = f"{word(noun.size)} {kind}"
    if noun.count > 1:
        text = f"{rng.choice(NUMBERS[noun.count]) if rng else NUMBERS[noun.count][0]} {kind}"
    elif rng and rng.random() < 0.15:
        text = kind
    elif rng and rng.random() < 0.08:
        text = f"one {kind}"
    else:
        text = f"{'an' if kind[0] in 'aeiou' else 'a'} {kind}"
    if noun.place:
        text += f" {word(noun.place)}" if rng else f" {SYNONYMS[noun.place][0]}"
    return text


def _related(things: list[str], relation: str, rng: random.Random) -> str:
    phrase = rng.choice(SYNONYMS[relation])
    if relation in ("left of", "right of") and rng.random() < 0.2:
        side, other = ("left", "right") if relation == "left of" else ("right", "left")
        return f"{things[0]} on the {side} and {things[1]} on the {other}"
    if relation == "inside" and rng.random() < 0.2:
        return f"{things[1]} with {things[0]} inside"
    if rng.random() < 0.15:
        return f"{things[0]} is {phrase} {things[1]}"
    return f"{things[0]} {phrase} {things[1]}"


def _with_background(text: str, ground: Background, rng: random.Random) -> str:
    def colour(name: str) -> str:
        return rng.choice(SYNONYMS.get(name, (name,)))

    if ground.to is not None:
        way = rng.choice(
            ("from top to bottom", "vertical") if ground.vertical else ("from left to right", "horizontal")
        )
        first, second = colour(ground.colour), colour(ground.to)
        if way in ("vertical", "horizontal"):
            return f"{text} on a {way} gradient from {first} to {second}"
        return f"{text} on a gradient from {first} to {second} {way}"
    name = colour(ground.colour)
    article = "an" if name[0] in "aeiou" else "a"
    return rng.choice(
        (
            f"{text} on {article} {name} background",
            f"{text} on {article} {name} background",
            f"{text}, {name} background",
            f"{text} against {article} {name} background",
            f"{text} on {name}",
            f"{text} in front of {article} {name} background",
            f"on {article} {name} background, {text}",
        )
    )


def _plural(word: str) -> str:
    if word == "plus sign":
        return "plus signs"
    return word + ("es" if word.endswith(("s", "x")) else "s")
