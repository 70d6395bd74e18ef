"""Command lines of every command, from its own options and values that nobody should give. Nothing is measured for
long: they end in a dry run, or in a budget of virtual time.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from attacks.calls import call
from attacks.counts import Counts
from attacks.honest import ATTENTION, BACKEND, BANDWIDTH, MATMUL, RUNS
from mamf.cli.options.parser import Parser

#: By the module that configures it: what is typed before its options, and the kernel that it may measure.
_COMMANDS = {
    "sweep": (["sweep"], MATMUL),
    "find": (["find"], MATMUL),
    "kernels_sweep": (["sweep", "--operation", "bandwidth"], BANDWIDTH),
    "kernels_find": (["find", "--operation", "bandwidth"], BANDWIDTH),
    "attention": (["attention"], ATTENTION),
    "bandwidth": (["bandwidth"], BANDWIDTH),
    "show": (["show"], ()),
    "compare": (["compare"], ()),
    "plot": (["plot"], ()),
    "results": (["results"], ()),
    "import_": (["import"], ()),
}
_NUMBERS = [
    "",
    " ",
    "-1",
    "0",
    "1",
    "2",
    "256",
    "007",
    "1.5",
    "-0",
    "+1",
    "1_000",
    "nan",
    "inf",
    "-inf",
    "1e3",
    "1e400",
]
_NUMBERS += ["9" * 5, "9" * 20, "9" * 400, "9" * 5000, "0x10", "½", "١٢", "²", "10%", "0.1%", "0%", "100%", "1s", "0s"]
_NUMBERS += ["0.001s", "5m", "1.5h", "-5m", "1e3s", "9" * 400 + "h", "all", "None"]
_NAMES = [
    "auto",
    "cpu:0",
    "torch.mm",
    "simulated.mm",
    "burst",
    "bf16",
    "fp8",
    "int8",
    "tf32",
    "bfloat16",
    "float32,int8",
]
_NAMES += [
    "::",
    ":Y",
    ":",
    "x:",
    "../x:Y",
    "mamf.backend:Backend",
    "mamf.torch_backend:TorchBackend",
    "os:system",
    "os:no",
]
_NAMES += [
    "mamf.testing:SimulatedBackend",
    "mamf.testing:SimulatedMatmul",
    "mamf.testing:SimulatedMatmul[3]",
    "cublaslt[99]",
]
_NAMES += [
    "\x1b[31m",
    "\x00",
    "a\nb",
    "\udcff",
    "\u202e",
    "é",
    "名",
    "--",
    "-",
    "-x",
    "--bad",
    "@x",
    "%s",
    "{}",
    "x" * 5000,
]
_SHAPES = ["1x1x1", "256x256x256", "0x1x1", "-1x1x1", "1x1", "1x1x1x1", "axbxc", "256X256x256", "9" * 300 + "x1x1"]
_SHAPES += [
    "1GiB",
    "0GiB",
    "1QiB",
    "b2h8kv4q512k512d64",
    "b0h1",
    "b1h" + "9" * 50 + "d64",
    "b2h8kv3q512k512d64",
    "1e3GiB",
]
_FIELDS = ["pattern=copy", "pattern=", "pattern=x", "=copy", "data=normal", "seed=-1", "seed=" + "9" * 40, "dtype=int8"]
_FIELDS += ["warm=-1", "warm=nan", "pattern=copy,copy", "pattern", "fraction=2"]
_FILES = [
    ".",
    "..",
    "/",
    "/dev/null",
    "/dev/stdin",
    "/proc/self/mem",
    "missing",
    "missing/x.png",
    "empty",
    "binary",
    "text",
]
_FILES += [
    "folder",
    "folder/x.jsonl",
    "pipe",
    "loop",
    "closed.png/x",
    "x" * 300,
    "d/" * 2600,
    "new.png",
    "new.svg",
    "new.txt",
]
_POOLS = (_NUMBERS, _NAMES, _SHAPES, _FIELDS, _FILES)
#: What a range may be called with, up to what no memory holds.
_RANGES = [["0", "4096", "1024"], ["0", "1000000000", "1"], ["4096", "0", "1"], ["0", "0", "0"], ["1", "2", "-1"]]
_RANGES += [["0", "9" * 30, "1"], ["-9", "-1", "1"], ["0", "4096"], ["a", "b", "c"]]
_SAFE_BUDGET = ("--budget", "0.2s")


def attack(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """``logs``: honest ones, some of the files that are given. New files go into ``folder`` alone."""
    counts = Counts("bad inputs")
    files = [*_prepared(folder), *map(str, logs.values())]
    parsers = {name: list(_parsers(name)) for name in _COMMANDS}
    for _ in range(count):
        name = random.choice(list(_COMMANDS))
        counts.of["inputs"] += 1
        call(_command_line(name, parsers[name], files, random), counts)
        for left in Path().glob("mamf-*.jsonl"):
            if not left.stat().st_size:
                counts.fault("other", str(left), "an output of 0 bytes was left behind")
            left.unlink()
    return counts


def _prepared(folder: Path) -> list[str]:
    """Files that are no logs, in a folder; the names in _FILES that begin with no / are meant in there."""
    (folder / "folder").mkdir()
    (folder / "empty").touch()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "text").write_text("a\nb\n")
    (folder / "loop").symlink_to("loop")
    (folder / "closed.png").touch()
    return [each if each.startswith(("/", "..")) or each == "pipe" else str(folder / each) for each in _FILES]


def _parsers(module: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """A command's parser with what is typed for it; those of its actions, where it has some."""
    parser = Parser(prog=module)
    importlib.import_module(f"mamf.cli.options.{module}").configure(parser)
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield [], parser
    for actions in below:
        for name, action in actions.choices.items():
            yield [name], action


def _command_line(
    name: str, parsers: Sequence[tuple[list[str], argparse.ArgumentParser]], files: list[str], random: Random
) -> list[str]:
    begin, kernel = _COMMANDS[name]
    typed, parser = random.choice(list(parsers))
    known = [action for action in parser._actions if action.dest not in ("help", "operation")]
    line = [*begin, *typed]
    for action in known:
        if not action.option_strings and random.random() < 0.95:
            line += _values(action, files, random)
    options = [action for action in known if action.option_strings]
    for action in random.sample(options, min(len(options), random.choice((1, 1, 2, 3, 5)))):
        values = _values(action, files, random)
        flag = random.choice(action.option_strings)
        line += [f"{flag}={values[0]}", *values[1:]] if values and random.random() < 0.3 else [flag, *values]
    if random.random() < 0.03:
        line.append(random.choice(("--no-such-option", "--ouput=x", "extra", "-5", "")))
    return [*line, *_harmless(line, kernel, random)] if kernel else line


def _harmless(line: list[str], kernel: tuple[str, ...], random: Random) -> Iterator[str]:
    """What keeps a measuring command from the machine's own devices, and from taking long."""
    given = {word.partition("=")[0] for word in line}
    for option in (BACKEND, kernel):
        if option[0] not in given and "--resume" not in given:
            yield from option
    if random.random() < 0.3:
        yield from _SAFE_BUDGET
    else:
        yield "--dry-run"


def _values(action: argparse.Action, files: list[str], random: Random) -> list[str]:
    if action.nargs == 0:
        return []
    if action.nargs == 3:
        return list(random.choice(_RANGES))
    number = random.choice((0, 1, 1, 1, 2, 3)) if action.nargs == "+" else random.choice((0, *[1] * 20))
    return [_value(action, files, random) for _ in range(number)]


def _value(action: argparse.Action, files: list[str], random: Random) -> str:
    if action.choices and random.random() < 0.6:
        return str(random.choice(list(action.choices)))
    if action.type is Path and random.random() < 0.9:
        return random.choice(files)
    if action.dest in ("backend", "kernel") and random.random() < 0.1:
        return random.choice(("no.such.module:Kernel", *(run.begin[-1] for run in RUNS)))
    return random.choice(random.choice(_POOLS[:-1]))
