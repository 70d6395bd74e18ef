"""Inputs that take memory or time without bound: compressed, nested, long, many, and files that never end.

Each must be read, or refused in a line, within the seconds of a hang and the bytes of tools/attack.py.
"""

from __future__ import annotations

import copy
import gzip
import json
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from attacks.calls import call
from attacks.counts import Counts

_MIB = 1 << 20
_ROW = "1 | 1.0(mean) 1.0(median) 1.0(max) @ 256x1024x4096 | best: 1.0(mean) TFLOPS\n"
_END = "Tried 3 shapes => the best outcomes were:\nmean: 300.5 TFLOPS @ 512x1024x4096 (MxNxK)\n"
_START = "Benchmark started on 2025-01-04 16:01:02\n"
_DEVICE = "** Platform/Device info:\nLinux 5\n_CudaDeviceProperties(name='NVIDIA H100', "
#: Logs of mamf-finder by how many characters they have, about.
TEXTS: dict[str, Callable[[int], str]] = {
    "a long device line": lambda size: f"{_DEVICE}{'a' * size})\n",
    "many device lines": lambda size: f"{_DEVICE}{'a' * 3900})\n" * (size // 4000),
    "brackets": lambda size: f"(a{'=' * 3900}\n" * (size // 4000),
    "blanks in rows": lambda size: f"0 | 1.0(max) / 1.0(mean){' ' * 960}x\n" * (size // 1000),
    "digits": lambda size: f"{'1' * 3990}\n" * (size // 4000),
    "winners": lambda size: "".join(f"  {i} 256x1024x{i + 1}  1.0 1.0 1.0 1.0  <- winner\n" for i in range(size // 50)),
    "summaries": lambda size: _END * (size // len(_END)),
    "heads": lambda size: _START * (size // len(_START)),
    "runs": lambda size: (_START + _ROW + _END) * (size // 200),
    "first rows": lambda size: _ROW * (size // len(_ROW)),
    "hosts": lambda size: "".join(f"Linux host{i:06d} 5.1 x86_64\n" for i in range(size // 30)),
    "backspaces": lambda size: "a\x08" * (size // 2),
    "escapes": lambda size: "\x1b]a" * (size // 3),
    "holes": lambda size: "a\0" * (size // 2),
    "long numbers": lambda size: f"** Command line:\nx --m {'9' * 3900} --n ² --k 1\nElapsed time: {'9' * 999}:00:00\n",
}
#: More than a string of it may ever take, packed.
BOMB_BYTES = 400 * _MIB


def attack(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Each kind in turn, at a size that is drawn."""
    counts = Counts("resource attacks")
    for number in range(count):
        name = list(KINDS)[number % len(KINDS)]
        own = folder / str(number)
        own.mkdir()
        before = len(counts.examples)
        KINDS[name](logs, own, random, counts)
        counts.of["inputs"] += 1
        if len(counts.examples) > before:
            counts.fault("other", f"resource attack {number}", name, 0)
    return counts


_Attack = Callable[[dict[str, Path], Path, Random, Counts], object]


def _import(data: bytes, folder: Path, counts: Counts) -> None:
    (folder / "mm.txt").write_bytes(data)
    call(["import", str(folder / "mm.txt"), "--output-folder", str(folder)], counts)


def _text(make: Callable[[int], str]) -> _Attack:
    def attacked(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
        _import((make(random.choice((1, 2, 4)) * _MIB // 2) + _ROW + _END).encode(), folder, counts)

    return attacked


def _bomb(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = random.choice((b"\0", b"1\n", b" ")) * (_MIB // 2)
    packed = [packer.compress(block) for _ in range(BOMB_BYTES // len(block))]
    _import(b"".join(packed) + packer.flush(), folder, counts)


def _members(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    _import(gzip.compress(random.choice((b"", b"x\n", b"\n"))) * random.choice((100_000, 200_000)), folder, counts)


def _read(path: Path, folder: Path, counts: Counts, *others: list[str]) -> None:
    """Read a log in each way that goes through all of it."""
    submit = ["results", "submit", str(path), "--dry-run", "--results", str(folder)]
    for command in (["show", str(path)], ["results", "check", str(path)], submit, *others):
        call(command, counts)


def _changed(change: Callable[[list[dict[str, Any]], Random], object]) -> _Attack:
    def attacked(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
        records = [json.loads(line) for line in logs["sweep"].read_text().splitlines()]
        change(records, random)
        path = folder / "run.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        _read(path, folder, counts)

    return attacked


def _row(records: list[dict[str, Any]]) -> dict[str, Any]:
    return next(record for record in records if record.get("status") == "ok")


def _equal_samples(records: list[dict[str, Any]], random: Random) -> None:
    row = _row(records)
    row["samples_seconds"] = row["samples_seconds"][:1] * random.choice((300_000, 600_000, 1_000_000, 2_000_000))


def _different_samples(records: list[dict[str, Any]], random: Random) -> None:
    row = _row(records)
    first = row["samples_seconds"][0]
    row["samples_seconds"] = [round(first * random.uniform(1, 1.01), 9) for _ in range(200_000)]


def _nesting(records: list[dict[str, Any]], random: Random) -> None:
    value: Any = 1
    for _ in range(random.choice((40, 300, 490, 900))):
        value = {"a": value} if random.random() < 0.5 else [value]
    random.choice(records)["details"] = value


def _rows(records: list[dict[str, Any]], random: Random) -> None:
    row = _row(records)
    records[-1:-1] = [copy.copy(row) for _ in range(1000)]


def _texts(records: list[dict[str, Any]], random: Random) -> None:
    row = _row(records)
    row["remarks"] = [f"at 10.0.{i % 256}.7" if random.random() < 0.01 else "a" * 90 for i in range(20_000)]
    row["reason"] = random.choice(("a-", "1.", "/a b", "\\ ", "sn:", "a@", "token ")) * 4000


def _endless(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    path = Path("/dev/zero")
    ways = [["import", str(path), "--output-folder", str(folder)], ["plot", str(path)]]
    _read(path, folder, counts, *ways, ["compare", str(path), str(logs["sweep"])], ["report", str(path)])


def _pipes(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    """Pipes that nobody writes to, where files are due."""
    card = folder / "card"
    card.mkdir()
    os.mkfifo(card / "pipe.jsonl")
    site = ["results", "site", "--results", str(folder), "--output", str(folder / "site")]
    commands = [["results", "check", str(folder)], ["results", "table", "--results", str(folder)], site]
    commands += [["results", action, str(card / "pipe.jsonl")] for action in ("check", "submit", "convert")]
    commands += [["plot", str(card / "pipe.jsonl")], ["report", str(folder)], ["node", "show", str(card)]]
    for command in commands:
        call(command, counts)


def _endless_pipe(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    """A pipe whose writer never stops; ``show`` reads pipes."""
    pipe = folder / "pipe.jsonl"
    os.mkfifo(pipe)
    piece = random.choice((b"\0", b"x\n", b'{"record": "header"}\n')) * 50_000

    def write() -> None:
        try:
            with pipe.open("wb") as file:
                while True:
                    file.write(piece)
        except BrokenPipeError:
            pass

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    call(["show", str(pipe)], counts)
    writer.join()


#: All attacks by name.
KINDS: dict[str, _Attack] = {
    **{f"import of {name}": _text(make) for name, make in TEXTS.items()},
    "a packed file of much": _bomb,
    "many packed files in one": _members,
    "equal samples": _changed(_equal_samples),
    "different samples": _changed(_different_samples),
    "nesting": _changed(_nesting),
    "equal rows": _changed(_rows),
    "many texts": _changed(_texts),
    "/dev/zero": _endless,
    "pipes without a writer": _pipes,
    "an endless pipe": _endless_pipe,
}
