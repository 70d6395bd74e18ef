"""Damages of a log: what crashes, disks, editors and malice do to it. Each takes a source of chance and its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from attacks.calls import FORBIDDEN

#: Written into JSON as they are, for what json.dumps refuses to write.
_RAW = {'"@nan@"': "NaN", '"@huge@"': "1e400", '"@minus@"': "-Infinity", '"@digits@"': "9" * 5000, '"@zero@"': "-0"}
_RAW['"@deep@"'] = "[" * 20_000 + "]" * 20_000
_ODD: tuple[Any, ...] = (
    *(None, True, False, "", "text", -1, 0, 1.5, 5e-324, 1e308, -1e308, 2**53 + 1, 2**63, 10**30, 10**300),
    *([], {}, [[]], ["a"], [1e308] * 3, {"a": 1}, {"m": 10**300, "n": 1, "k": 1}, "1e5", "nan", "10000000000x1x1"),
    *("\x1b[31mred\x1b[0m", "\x07\x08\r\n", "\u202egnp.exe", "\ud800", "=1+1", "![i](u)", "<b>", "|", "$x^$", "%s{}"),
    *("x" * 5000, "../../x", "/dev/null", "CON", f"{FORBIDDEN}:Kernel", f"{FORBIDDEN}:Backend", "::", ":Y", "auto"),
    *(raw.strip('"') for raw in _RAW),
)
#: What a figure is multiplied by.
_FACTORS = (-1, 0, 1e-300, 1e-6, 0.5, 2, 1e6, 1e300)


def cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def flip(random: Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    return bytes(spoiled)


def hole(random: Random, data: bytes) -> bytes:
    """A block that never reached the disk before the power went."""
    begin = random.randrange(len(data))
    end = min(len(data), begin + random.choice((1, 100, 512, 4096)))
    return data[:begin] + random.choice((b"\0" * (end - begin), b"")) + data[end:]


def paste(random: Random, data: bytes) -> bytes:
    begin, at = random.randrange(len(data)), random.randrange(len(data))
    return data[:at] + data[begin : begin + random.choice((1, 100, 5000))] + data[at:]


def rewrite(random: Random, data: bytes) -> bytes:
    """What editors and consoles do to a whole file."""
    return random.choice(
        (
            b"\xef\xbb\xbf" + data,
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\n\n"),
            data.replace(b"\n", b""),
            data.decode().encode("utf-16"),
            data.rstrip(b"\n"),
            data + b"\n \t\n",
            data + data,
            data[::-1],
        )
    )


def reorder(random: Random, data: bytes) -> bytes:
    """Lines swapped, twice or missing."""
    lines = data.splitlines(keepends=True)
    for _ in range(random.choice((1, 1, 3))):
        one, two = random.randrange(len(lines)), random.randrange(len(lines))
        way = random.randrange(3)
        if way == 0:
            lines[one], lines[two] = lines[two], lines[one]
        elif way == 1:
            lines.insert(two, lines[one])
        elif len(lines) > 1:
            del lines[one]
    return b"".join(lines)


def _edited(edit: Callable[[Random, Any, Any], None]) -> Callable[[Random, bytes], bytes]:
    """A damage of values: ``edit`` is given what holds one, and its name or number there."""

    def damage(random: Random, data: bytes) -> bytes:
        lines = data.decode().splitlines()
        for _ in range(random.choice((1, 1, 1, 2, 5))):
            # Headers and summaries are few, and most of what is read of a log.
            number = random.choice((0, len(lines) - 1, random.randrange(len(lines)), random.randrange(len(lines))))
            record = json.loads(lines[number])
            edit(random, *random.choice(list(_places(record))))
            lines[number] = json.dumps(record)
        text = "\n".join(lines) + "\n"
        for name, raw in _RAW.items():
            text = text.replace(name, raw)
        return text.encode()

    return damage


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, name
        if value and isinstance(value, (dict, list)):
            yield from _places(value)


def _replace(random: Random, holder: Any, name: Any) -> None:
    holder[name] = random.choice(_ODD)


def _remove(random: Random, holder: Any, name: Any) -> None:
    del holder[name]


def _add(random: Random, holder: Any, name: Any) -> None:
    if isinstance(holder, dict):
        holder[random.choice(("", "record", "x\x1b[2J", "schema", "*", "tflops"))] = random.choice(_ODD)
    else:
        holder.insert(name, random.choice((*_ODD, holder[name])))


def _scale(random: Random, holder: Any, name: Any) -> None:
    value = holder[name]
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        factor = random.choice(_FACTORS)
        scaled = float(value) * factor if abs(value) < 1e308 else 0.0
        holder[name] = int(scaled) if isinstance(value, int) and abs(scaled) < 1e307 else scaled
    else:
        holder[name] = [value] * 3 if random.random() < 0.2 else f"{value}\x1b]0;x\x07"


def _twice(random: Random, data: bytes) -> bytes:
    """A key twice in a line: some readers keep the first, some the last."""
    lines = data.decode().splitlines()
    number = random.randrange(len(lines))
    name = random.choice(list(json.loads(lines[number])))
    lines[number] = lines[number][:-1] + f", {json.dumps(name)}: {json.dumps(random.choice(_ODD))}}}"
    return ("\n".join(lines) + "\n").encode()


DAMAGES: tuple[Callable[[Random, bytes], bytes], ...] = (
    *(cut, flip, hole, paste, rewrite, reorder, _twice),
    *map(_edited, (_replace, _replace, _replace, _remove, _add, _scale, _scale)),
)


def damaged(random: Random, data: bytes) -> bytes:
    """A damage of a log, now and then on top of another."""
    spoiled = random.choice(DAMAGES)(random, data)
    if random.random() < 0.1:
        spoiled = (
            random.choice((cut, flip, hole, rewrite, reorder))(random, data) if not spoiled else cut(random, spoiled)
        )
    return spoiled
