"""Reads names of kernels: C++ as profilers print it, mangled C++, and plain names of libraries and compilers."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

_CLOSES = {")": "(", "]": "[", "}": "{", ">": "<"}
#: ROCm's descriptors end with it.
_DESCRIPTOR = ".kd"
_MANGLED = re.compile(r"_Z(TS)?(?=[NL\d])")
#: Tokens of a mangled name: literals, types and substitutions hold digits that are no lengths of identifiers.
_TOKEN = re.compile(r"L[a-z]n?\d+E|DF\d+[b_x]?|[ST][0-9A-Z]*_|A\d+_|(?P<length>\d+)(?=[A-Za-z_])|.", re.DOTALL)
#: Between words: a hump of camelCase, or what is no letter.
_BETWEEN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W+")


class KernelName(NamedTuple):
    """``function``: with its namespaces, without return type, template arguments and parameters. ``arguments``: those
    of its template, unread.
    """

    function: str
    arguments: tuple[str, ...]

    @property
    def words(self) -> Iterator[str]:
        """The words of the function, then of each namespace around it: _like_this_."""
        return (f"_{_BETWEEN.sub('_', part).lower()}_" for part in reversed(self.function.split("::")))


@functools.cache
def read_name(name: str) -> KernelName:
    """Read a name in time linear in its length, also if it was cut off."""
    name = name.replace("(anonymous namespace)", "anonymous")
    if mangled := _MANGLED.match(name):
        function, *arguments = _identifiers(name[mangled.end() :]) or [name]
        return KernelName(function, tuple(arguments))
    function, inner = _split(name.removesuffix(_DESCRIPTOR))
    return KernelName(function, tuple(each.strip() for each in inner if each.strip()))


def _split(name: str) -> tuple[str, list[str]]:
    """The function, and the arguments of its last template."""
    brackets: list[str] = []
    function: list[str] = []
    arguments: list[str] = []
    begun = 0
    for place, character in enumerate(name):
        if not brackets and character == "(":
            break
        if character in "([{<":
            if not brackets:
                arguments, begun = [], place + 1
            brackets.append(character)
        elif character in _CLOSES:
            # Within parentheses, > compares or is part of an arrow.
            if brackets and brackets[-1] == _CLOSES[character]:
                brackets.pop()
                if not brackets:
                    arguments.append(name[begun:place])
        elif not brackets:
            function.append(character)
        elif character == "," and len(brackets) == 1:
            arguments.append(name[begun:place])
            begun = place + 1
    if brackets:
        arguments.append(name[begun:])
    words = "".join(function).split()
    return words[-1] if words else name, arguments


def _identifiers(mangled: str) -> list[str]:
    """Identifiers in the order of the name; those of one nested name are joined."""
    found: list[str] = []
    place, last = 0, -1
    while token := _TOKEN.match(mangled, place):
        place = token.end()
        if length := token["length"]:
            begun, place = place, place + int(length)
            identifier = mangled[begun:place].replace("_GLOBAL__N_1", "anonymous")
            if token.start() == last:
                found[-1] += f"::{identifier}"
            else:
                found.append(identifier)
            last = place
    return found
