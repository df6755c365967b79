"""Command lines of all programs here: no abbreviated flags, and usage errors of two lines that name what was meant."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

USAGE_ERROR = 2
"""Exit code of a wrong command line."""

_FLAG = re.compile(r"(--[A-Za-z][\w.-]*)(=.*)?", re.DOTALL)
_MOST = 3
"""Names that a suggestion has at most."""


def meant(word: str, known: Collection[str], *, quoted: bool = True) -> str:
    """'; did you mean ...?' with the known names that `word` abbreviates or resembles; empty where there is none."""
    begun = sorted(name for name in known if word and name.startswith(word))
    found = begun[:_MOST] or difflib.get_close_matches(word, known, n=1)
    if not found:
        return ""
    *others, last = [repr(name) if quoted else name for name in found]
    return "; did you mean " + " or ".join([*([", ".join(others)] if others else []), last]) + "?"


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that takes flags by their full names alone, and says in two lines what is wrong.

    `others`: arguments that it does not know are left to whoever calls `parse_known_args`, instead of being refused. A
    description of several lines, such as a docstring, keeps them.
    """

    def __init__(self, *arguments: Any, others: bool = False, **options: Any) -> None:
        if "\n" in (options.get("description") or ""):
            options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(*arguments, **{"allow_abbrev": False, **options})
        self._others = others

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if not self._others:
            # first, since argparse would name a required flag that is missing, and it is there, misspelled
            self._refuse_unknown(words)
        found, rest = super().parse_known_args(words, namespace)
        if rest and not self._others:
            self.error(f"unknown argument {rest[0]!r}")
        return found, rest

    @property
    def flags(self) -> list[str]:
        """Its flags by their full names."""
        return [name for action in self._actions for name in action.option_strings if name.startswith("--")]

    @property
    def _hands_on(self) -> bool:
        """Whether what follows its own words, flags too, is the command line of something else."""
        return any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)

    def unknown(self, word: str, also: Collection[str] = ()) -> str:
        """What to say of an argument that is not one of this parser, with the flag of it or of `also` that it may stand
        for.
        """
        flag, shown = word.partition("=")[0], [*self.flags, *also]
        known = [name for name in shown if flag.startswith("--no-") or not name.startswith("--no-")] or shown
        return f"unknown argument {flag!r}{meant(flag, known, quoted=False)}"

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        for word in words:
            if word == "--":
                return
            if not word.startswith("-") and self._hands_on:
                return  # the rest is for another parser
            flag = _FLAG.fullmatch(word)
            if flag is not None and flag[1] not in self._option_string_actions:
                self.error(self.unknown(word))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        choices = action.choices
        if choices is None or value in choices:
            return
        names = [str(name) for name in choices]
        close = meant(str(value), names)
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown command {str(value)!r}" + (close or f"; commands: {', '.join(names)}"))
        raise argparse.ArgumentError(action, f"{str(value)!r} is not one of {', '.join(names)}{close}")
