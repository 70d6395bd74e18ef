"""Inputs that nobody should give mamf: damaged logs, odd command lines, and files that take memory without bound."""

from __future__ import annotations

import argparse
import copy
import gzip
import importlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

from attacks.calls import FORBIDDEN, Counts, call
from attacks.honest import ATTENTION, BACKEND, BANDWIDTH, LEGACY, MATMUL, RUNS
from mamf.cli.parser import Parser

# -- odd values --------------------------------------------------------------------------------------------------------

#: Written into JSON as they are, because json.dumps refuses to write them.
_RAW = {'"@nan@"': "NaN", '"@huge@"': "1e400", '"@minus@"': "-Infinity", '"@digits@"': "9" * 5000, '"@zero@"': "-0"}
_RAW['"@deep@"'] = "[" * 20_000 + "]" * 20_000
_TEXTS = ["", " ", "text", "nan", "\x1b[31mred\x1b[0m", "\x07\x08\r\n", "\u202egnp.exe", "\ud800", "=1+1", "<b>"]
_TEXTS += [
    "![i](u)",
    "|",
    "$x^$",
    "%s{}",
    "x" * 5000,
    "../../x",
    "/dev/null",
    "CON",
    "::",
    ":Y",
    "auto",
    "名",
    "½",
    "١٢",
]
#: Values of a field in a log.
_VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1.5,
        5e-324,
        1e308,
        -1e308,
        2**53 + 1,
        2**63,
        10**30,
        10**300,
        *_TEXTS,
        f"{FORBIDDEN}:Kernel",
    ),
    *([], {}, [[]], ["a"], [1e308] * 3, {"a": 1}, {"m": 10**300, "n": 1, "k": 1}, *(raw.strip('"') for raw in _RAW)),
)
#: Words on a command line.
_NUMBERS = "-1 0 1 2 256 007 1.5 -0 +1 1_000 inf -inf 1e3 1e400 0x10 10% 0.1% 0% 100% 1s 0s 0.001s 5m -5m 1e3s all"
_LONG_NUMBERS = ["9" * 20, "9" * 400, "9" * 5000, "9" * 400 + "h"]
_NAMES = "cpu:0 torch.mm simulated.mm burst bf16 fp8 int8 float32,int8 ../x:Y os:system mamf.backend:Backend -- - -x"
_NAMES += " mamf.testing:SimulatedBackend mamf.testing:SimulatedMatmul mamf.testing:SimulatedMatmul[3] --bad @x"
_SHAPES = "1x1x1 256x256x256 0x1x1 -1x1x1 1x1 1x1x1x1 axbxc 1GiB 0GiB 1QiB 1e3GiB b2h8kv4q512k512d64 b0h1 b1h1kv3q9k9d8"
_SHAPES += f" {'9' * 300}x1x1"
_FIELDS = "pattern=copy pattern= pattern=x =copy seed=-1 dtype=int8 warm=nan pattern=copy,copy pattern fraction=2"
_WORDS = (
    [*_NUMBERS.split(), *_LONG_NUMBERS],
    [*_NAMES.split(), *_TEXTS],
    [*_SHAPES.split(), "9" * 300 + "x1x1"],
    _FIELDS.split(),
)
_RANGES = [["0", "4096", "1024"], ["0", "1000000000", "1"], ["4096", "0", "1"], ["0", "0", "0"], ["1", "2", "-1"]]
_RANGES += [["0", "9" * 30, "1"], ["-9", "-1", "1"], ["0", "4096"], ["a", "b", "c"]]

# -- damaged logs ------------------------------------------------------------------------------------------------------

Damage = Callable[[Random, bytes], bytes]
#: A picture takes as long to draw as all else.
DRAWN_EVERY = 100


def cut(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def flip(random: Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    return bytes(spoiled)


def hole(random: Random, data: bytes) -> bytes:
    """Lose a block that never reached the disk before the power went."""
    begin = random.randrange(len(data))
    end = min(len(data), begin + random.choice((1, 100, 512, 4096)))
    return data[:begin] + random.choice((b"\0" * (end - begin), b"")) + data[end:]


def rewrite(random: Random, data: bytes) -> bytes:
    """Change a whole file as editors and consoles do."""
    line_ends = [data.replace(b"\n", end) for end in (b"\r\n", b"\n\n", b"")]
    others = (
        b"\xef\xbb\xbf" + data,
        data.decode().encode("utf-16"),
        data.rstrip(b"\n"),
        data + b"\n \t\n",
        data + data,
    )
    return random.choice([*line_ends, *others])


def reorder(random: Random, data: bytes) -> bytes:
    """Swap, repeat or remove lines."""
    lines = data.splitlines(keepends=True)
    one, two = random.randrange(len(lines)), random.randrange(len(lines))
    way = random.randrange(3)
    if way == 0:
        lines[one], lines[two] = lines[two], lines[one]
    elif way == 1:
        lines.insert(two, lines[one])
    elif len(lines) > 1:
        del lines[one]
    return b"".join(lines)


def edit(random: Random, data: bytes) -> bytes:
    """Replace, remove, add or scale values; write a key twice."""
    lines = data.decode().splitlines()
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        # Headers and summaries are few, and most of what is read of a log.
        number = random.choice((0, len(lines) - 1, random.randrange(len(lines)), random.randrange(len(lines))))
        record = json.loads(lines[number])
        holder, name = random.choice(list(_places(record)))
        value, way = holder[name], random.randrange(7)
        if way < 3:
            holder[name] = random.choice(_VALUES)
        elif way == 3:
            del holder[name]
        elif way == 4 and isinstance(holder, dict):
            holder[random.choice(("", "record", "x\x1b[2J", "schema", "*", "tflops"))] = random.choice(_VALUES)
        elif isinstance(value, float) and abs(value) < 1e308:
            holder[name] = value * random.choice((-1, 0, 1e-300, 1e-6, 0.5, 2, 1e6, 1e300))
        else:
            holder[name] = [value] * 3
        lines[number] = json.dumps(record)
        if random.random() < 0.1 and record:
            again = json.dumps(random.choice(list(record)))
            lines[number] = f"{lines[number][:-1]}, {again}: {json.dumps(random.choice(_VALUES))}}}"
            break
    text = "\n".join(lines) + "\n"
    for name, raw in _RAW.items():
        text = text.replace(name, raw)
    return text.encode()


def _places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, name
        if value and isinstance(value, (dict, list)):
            yield from _places(value)


DAMAGES: tuple[Damage, ...] = (cut, flip, hole, rewrite, reorder, *[edit] * 6)


def attack_logs(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Give damaged logs to every command that reads one; none may change them."""
    counts = Counts("damaged logs")
    begins = {run.name: run.begin for run in RUNS}
    path = folder / "damaged.jsonl"
    for number in range(count):
        name = random.choice(list(logs))
        data = random.choice(DAMAGES)(random, logs[name].read_bytes())
        path.write_bytes(data)
        counts.of["inputs"] += 1
        form = random.choice(("table", "csv", "json", "markdown"))
        call(["show", str(path), "--format", form, "--top", "all"], counts)
        call(["compare", *random.sample([str(path), str(logs[name])], 2), "--format", form, "--anyway"], counts)
        call(["results", "check", str(path), *random.choice(([], ["--format", "json"]))], counts)
        if name != LEGACY:
            # Without a backend or a kernel on the command line, the log's own are looked up.
            begin = random.choice((begins[name], begins[name][: begins[name].index("--backend")]))
            call([*begin, "--resume", str(path), "--dry-run"], counts)
        if number % DRAWN_EVERY == 0:
            call(["plot", str(path), "--output", str(folder / "drawn.png"), "--overwrite"], counts)
            call(["results", "submit", str(path), "--dry-run", "--results", str(folder / "results")], counts)
        if path.read_bytes() != data:
            counts.fault("other", f"{name}, damaged log {number}", "was changed by being read")
    return counts


# -- odd command lines -------------------------------------------------------------------------------------------------

#: By the module that configures a command: what is typed before its options, and the kernel that it may measure.
_COMMANDS = {
    "sweep": (["sweep"], MATMUL),
    "find": (["find"], MATMUL),
    "kernels_sweep": (["sweep", "--operation", "bandwidth"], BANDWIDTH),
    "kernels_find": (["find", "--operation", "bandwidth"], BANDWIDTH),
    "attention": (["attention"], ATTENTION),
    "bandwidth": (["bandwidth"], BANDWIDTH),
    **{name: ([name], ()) for name in ("show", "compare", "plot", "results")},
    "import_": (["import"], ()),
}
_FILES = "folder folder/x.jsonl empty binary loop missing missing/x.png new.png new.svg new.txt closed.png/x"


def attack_command_lines(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Give the options of each command odd values. They end in a dry run, or in a budget of virtual time."""
    counts = Counts("odd command lines")
    files = [*_files(folder), *map(str, logs.values())]
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


def _files(folder: Path) -> list[str]:
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "loop").symlink_to("loop")
    for name in ("empty", "closed.png"):
        (folder / name).touch()
    names = [str(folder / name) for name in (*_FILES.split(), "x" * 300, "d/" * 2600)]
    return [*names, ".", "..", "/", "/dev/null", "/dev/stdin", "/proc/self/mem"]


def _parsers(module: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield a command's parser with what is typed for it, or those of its actions."""
    parser = Parser(prog=module)
    importlib.import_module(f"mamf.cli.commands.{module}").configure(parser)
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield [], parser
    for actions in below:
        for name, action in actions.choices.items():
            yield [name], action


def _command_line(
    name: str, parsers: list[tuple[list[str], argparse.ArgumentParser]], files: list[str], random: Random
) -> list[str]:
    begin, kernel = _COMMANDS[name]
    typed, parser = random.choice(parsers)
    known = [action for action in parser._actions if action.dest not in ("help", "operation")]
    line = [*begin, *typed]
    for action in known:
        if not action.option_strings and random.random() < 0.95:
            line += _values(action, files, random)
    options = [action for action in known if action.option_strings]
    for action in random.sample(options, min(len(options), random.choice((1, 1, 2, 3, 5)))):
        values, flag = _values(action, files, random), random.choice(action.option_strings)
        line += [f"{flag}={values[0]}", *values[1:]] if values and random.random() < 0.3 else [flag, *values]
    if random.random() < 0.03:
        line.append(random.choice(("--no-such-option", "--ouput=x", "extra", "-5", "")))
    if kernel:  # keep it from this machine's devices, and from taking long
        given = {word.partition("=")[0] for word in line}
        for option in (BACKEND, kernel):
            line += () if given & {option[0], "--resume"} else option
        line += random.choice((["--dry-run"], ["--dry-run"], ["--budget", "0.2s"]))
    return line


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
    return random.choice(random.choice(_WORDS))


# -- files without bound -----------------------------------------------------------------------------------------------

_MIB = 1 << 20
#: Bytes of a packed file when it is unpacked.
BOMB_BYTES = 400 * _MIB
_ROW = "1 | 1.0(mean) 1.0(median) 1.0(max) @ 256x1024x4096 | best: 1.0(mean) TFLOPS\n"
_END = "Tried 3 shapes => the best outcomes were:\nmean: 300.5 TFLOPS @ 512x1024x4096 (MxNxK)\n"
_DEVICE = "** Platform/Device info:\nLinux 5\n_CudaDeviceProperties(name='NVIDIA H100', "
_Unbounded = Callable[[dict[str, Path], Path, Random, Counts], object]
#: Text of mamf-finder logs, which is repeated.
_PIECES = {
    "device lines": f"{_DEVICE}{'a' * 3900})\n",
    "brackets": f"(a{'=' * 3900}\n",
    "blanks in rows": f"0 | 1.0(max) / 1.0(mean){' ' * 960}x\n",
    "digits": f"{'1' * 3990}\n",
    "first rows": _ROW,
    "runs": f"Benchmark started on 2025-01-04 16:01:02\n{_ROW}{_END}",
    "escapes": "\x1b]a\0\x08",
}


def _import(data: bytes, folder: Path, counts: Counts) -> None:
    (folder / "mm.txt").write_bytes(data)
    call(["import", str(folder / "mm.txt"), "--output-folder", str(folder)], counts)


def _repeated(piece: str) -> _Unbounded:
    def attack(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
        size = random.choice((1, 2, 4)) * _MIB // 2
        _import((piece * (size // len(piece)) + _ROW + _END).encode(), folder, counts)

    return attack


def _bomb(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = random.choice((b"\0", b"1\n", b" ")) * (_MIB // 2)
    packed = [packer.compress(block) for _ in range(BOMB_BYTES // len(block))]
    _import(b"".join(packed) + packer.flush(), folder, counts)


def _members(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    _import(gzip.compress(random.choice((b"", b"x\n"))) * 100_000, folder, counts)


def _read(path: Path, folder: Path, counts: Counts, *others: list[str]) -> None:
    """Read a log in each way that goes through all of it."""
    submit = ["results", "submit", str(path), "--dry-run", "--results", str(folder)]
    for command in (["show", str(path)], ["results", "check", str(path)], submit, *others):
        call(command, counts)


def _changed(change: Callable[[list[dict[str, Any]], dict[str, Any], Random], object]) -> _Unbounded:
    """Change a log: ``change`` is given all records, a measured row among them, and a source of chance."""

    def attack(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
        records = [json.loads(line) for line in logs["sweep"].read_text().splitlines()]
        change(records, next(record for record in records if record.get("status") == "ok"), random)
        path = folder / "run.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        _read(path, folder, counts)

    return attack


def _many_samples(records: list[dict[str, Any]], row: dict[str, Any], random: Random) -> None:
    first, spread = row["samples_seconds"][0], random.choice((1, 1.01))
    row["samples_seconds"] = [round(first * random.uniform(1, spread), 9) for _ in range(200_000)]


def _nesting(records: list[dict[str, Any]], row: dict[str, Any], random: Random) -> None:
    value: Any = 1
    for _ in range(random.choice((40, 300, 490, 900))):
        value = {"a": value} if random.random() < 0.5 else [value]
    random.choice(records)["details"] = value


def _many_rows(records: list[dict[str, Any]], row: dict[str, Any], random: Random) -> None:
    records[-1:-1] = [copy.copy(row) for _ in range(1000)]


def _many_texts(records: list[dict[str, Any]], row: dict[str, Any], random: Random) -> None:
    row["remarks"] = [f"at 10.0.{i % 256}.7" if i % 99 == 0 else "a" * 90 for i in range(20_000)]
    row["reason"] = random.choice(("a-", "1.", "/a b", "\\ ", "sn:", "a@", "token ")) * 4000


def _endless(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    path = Path("/dev/zero")
    ways = [["import", str(path), "--output-folder", str(folder)], ["plot", str(path)], ["report", str(path)]]
    _read(path, folder, counts, *ways, ["compare", str(path), str(logs["sweep"])])


def _pipes(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    """Give pipes that nobody writes to, where files are due."""
    pipe = folder / "card" / "pipe.jsonl"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    commands = [["results", "check", str(folder)], ["results", "table", "--results", str(folder)]]
    commands += [["results", "site", "--results", str(folder), "--output", str(folder / "site")]]
    commands += [["results", "check", str(pipe)], ["results", "submit", str(pipe)], ["plot", str(pipe)]]
    for command in (*commands, ["report", str(folder)], ["node", "show", str(pipe.parent)]):
        call(command, counts)


def _endless_pipe(logs: dict[str, Path], folder: Path, random: Random, counts: Counts) -> None:
    """Show a pipe whose writer never stops."""
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


UNBOUNDED: dict[str, _Unbounded] = {
    **{f"import of {name}": _repeated(piece) for name, piece in _PIECES.items()},
    "import of a long line": _repeated("a" * 100_000),
    "a packed file of much": _bomb,
    "many packed files in one": _members,
    "many samples": _changed(_many_samples),
    "nesting": _changed(_nesting),
    "many rows": _changed(_many_rows),
    "many texts": _changed(_many_texts),
    "/dev/zero": _endless,
    "pipes without a writer": _pipes,
    "an endless pipe": _endless_pipe,
}


def attack_resources(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Give inputs without bound, every kind in turn: each is read or refused within the seconds of a hang."""
    counts = Counts("inputs without bound")
    for number in range(count):
        kind, own = list(UNBOUNDED)[number % len(UNBOUNDED)], folder / str(number)
        own.mkdir()
        counts.of["inputs"] += 1
        UNBOUNDED[kind](logs, own, random, counts)
    return counts
