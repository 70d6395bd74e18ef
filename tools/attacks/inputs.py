"""Give mamf bad inputs: damaged logs, odd command lines, and files of unlimited size."""

from __future__ import annotations

import argparse
import contextlib
import copy
import gzip
import importlib
import json
import os
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from attacks.calls import FORBIDDEN, Counts, call
from attacks.honest import ATTENTION, BACKEND, BANDWIDTH, LEGACY, MATMUL, RUNS
from mamf.cli import get_module_name
from mamf.cli.parser import CommandParser

# -- odd values --------------------------------------------------------------------------------------------------------

#: Texts that ``edit_values`` writes into logs as JSON values, by placeholder. json.dumps cannot write most of them, so
#: ``edit_values`` first writes a placeholder such as "@nan@", and then replaces it.
_RAW_BY_PLACEHOLDER = {
    '"@nan@"': "NaN",
    '"@huge@"': "1e400",
    '"@minus@"': "-Infinity",
    '"@digits@"': "9" * 5000,
    '"@zero@"': "-0",
}
_RAW_BY_PLACEHOLDER['"@deep@"'] = "[" * 20_000 + "]" * 20_000
_ODD_TEXTS = ["", " ", "text", "nan", "\x1b[31mred\x1b[0m", "\x07\x08\r\n", "\u202egnp.exe", "\ud800", "x" * 5000]
_ODD_TEXTS += ["=1+1", "<b>", "![i](u)", "|", "$x^$", "%s{}", "../../x", "/dev/null", "CON", "::", ":Y", "auto"]
_ODD_TEXTS += ["名", "½", "١٢"]
_INTEGERS = (-1, 0, 2**53 + 1, 2**63, 10**30, 10**300)
_NESTED = ([], {}, [[]], ["a"], [1e308] * 3, {"a": 1}, {"m": 10**300, "n": 1, "k": 1})
#: The values that ``edit_values`` writes into the fields of a log.
_VALUES: tuple[Any, ...] = (None, True, False, *_INTEGERS, 1.5, 5e-324, 1e308, -1e308, *_ODD_TEXTS, *_NESTED)
_VALUES += (f"{FORBIDDEN}:Kernel", *(raw.strip('"') for raw in _RAW_BY_PLACEHOLDER))
#: The words for command lines: numbers, names, shapes and fields of a problem.
_NUMBERS = "-1 0 1 2 256 007 1.5 -0 +1 1_000 inf -inf 1e3 1e400 0x10 10% 0.1% 0% 100% 1s 0s 0.001s 5m -5m 1e3s all"
_NAMES = "cpu:0 torch.mm simulated.mm burst bf16 fp8 int8 float32,int8 ../x:Y os:system mamf.backend:Backend -- - -x"
_NAMES += " mamf.testing:SimulatedBackend mamf.testing:SimulatedMatmul mamf.testing:SimulatedMatmul[3] --bad @x"
_SHAPES = "1x1x1 256x256x256 0x1x1 -1x1x1 1x1 1x1x1x1 axbxc 1GiB 0GiB 1QiB 1e3GiB b2h8kv4q512k512d64 b0h1 b1h1kv3q9k9d8"
_FIELDS = "pattern=copy pattern= pattern=x =copy seed=-1 dtype=int8 warm=nan pattern=copy,copy pattern fraction=2"
_WORDS = (
    [*_NUMBERS.split(), "9" * 20, "9" * 400, "9" * 5000, "9" * 400 + "h"],
    [*_NAMES.split(), *_ODD_TEXTS],
    [*_SHAPES.split(), "9" * 300 + "x1x1"],
    _FIELDS.split(),
)
_RANGES = (
    "0 4096 1024",
    "0 1000000000 1",
    "4096 0 1",
    "0 0 0",
    "1 2 -1",
    "-9 -1 1",
    "0 4096",
    "a b c",
    f"0 {10**30} 1",
)

# -- damaged logs ------------------------------------------------------------------------------------------------------

#: Draw every hundredth log only, because drawing takes as long as all other commands together.
DRAWN_EVERY = 100


def flip_bits(random: Random, data: bytes) -> bytes:
    spoiled = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 8, 64))):
        spoiled[random.randrange(len(spoiled))] ^= 1 << random.randrange(8)
    return bytes(spoiled)


def lose_block(random: Random, data: bytes) -> bytes:
    """Remove the end or a block of a log, or fill it with zeros. A power failure does this to data that has not yet
    reached the disk.
    """
    begin = random.randrange(len(data))
    end = min(len(data), begin + random.choice((1, 100, 512, 4096, len(data), len(data))))
    return data[:begin] + random.choice((b"\0" * (end - begin), b"")) + data[end:]


def rewrite_file(random: Random, data: bytes) -> bytes:
    """Change the line ends or the encoding of a whole file, as editors and consoles do, or repeat the file."""
    changed = [data.replace(b"\n", end) for end in (b"\r\n", b"\n\n", b"")]
    changed += [b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), data.rstrip(b"\n")]
    return random.choice([*changed, data + b"\n \t\n", data + data])


def reorder_lines(random: Random, data: bytes) -> bytes:
    """Swap, repeat or remove lines."""
    lines = data.splitlines(keepends=True)
    one, two = random.randrange(len(lines)), random.randrange(len(lines))
    first, second = lines[one], lines[two]
    lines[one] = random.choice((first, second, b""))
    lines[two] = random.choice((first, second))
    return b"".join(lines)


def edit_values(random: Random, data: bytes) -> bytes:
    """Replace, remove, add or scale values in a few records, or write a key twice in one record."""
    lines = data.decode().splitlines()
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        # Change the header or the summary half of the time: a log has only one of each, but mamf reads most of its
        # fields from them.
        number = random.choice((0, len(lines) - 1, random.randrange(len(lines)), random.randrange(len(lines))))
        record = json.loads(lines[number])
        holder, name = random.choice(list(_walk_places(record)))
        value, change = holder[name], random.randrange(7)
        if change < 3:
            holder[name] = random.choice(_VALUES)
        elif change == 3:
            del holder[name]
        elif change == 4 and isinstance(holder, dict):
            holder[random.choice(("", "record", "x\x1b[2J", "schema", "*", "tflops"))] = random.choice(_VALUES)
        elif isinstance(value, float) and abs(value) < 1e308:
            holder[name] = value * random.choice((-1, 0, 1e-300, 1e-6, 0.5, 2, 1e6, 1e300))
        else:
            holder[name] = [value] * 3
        lines[number] = json.dumps(record)
        if random.random() < 0.1 and record:
            repeated_key = json.dumps(random.choice(list(record)))
            lines[number] = f"{lines[number][:-1]}, {repeated_key}: {json.dumps(random.choice(_VALUES))}}}"
            break
    text = "\n".join(lines) + "\n"
    for name, raw in _RAW_BY_PLACEHOLDER.items():
        text = text.replace(name, raw)
    return text.encode()


def _walk_places(holder: Any) -> Iterator[tuple[Any, Any]]:
    for name, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
        yield holder, name
        if value and isinstance(value, (dict, list)):
            yield from _walk_places(value)


DAMAGES = (lose_block, lose_block, flip_bits, rewrite_file, reorder_lines, *[edit_values] * 6)


def attack_logs(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Run every command that reads logs on damaged logs. No command may change a log."""
    counts, path = Counts("damaged logs"), folder / "damaged.jsonl"
    base_arguments_by_run = {run.name: run.base_arguments for run in RUNS}
    for number in range(count):
        name = random.choice(list(logs))
        data = random.choice(DAMAGES)(random, logs[name].read_bytes())
        path.write_bytes(data)
        counts.totals["inputs"] += 1
        form = random.choice(("table", "csv", "json", "markdown"))
        call(["show", str(path), "--format", form, "--top", "all"], counts)
        call(["compare", *random.sample([str(path), str(logs[name])], 2), "--format", form, "--anyway"], counts)
        call(["results", "check", str(path), *random.choice(([], ["--format", "json"]))], counts)
        if name != LEGACY:
            # In half of the cases, name no backend and no kernel, so that mamf looks up those that the log names.
            base_arguments = base_arguments_by_run[name]
            short_arguments = base_arguments[: base_arguments.index("--backend")]
            call([*random.choice((base_arguments, short_arguments)), "--resume", str(path), "--dry-run"], counts)
        if number % DRAWN_EVERY == 0:
            call(["plot", str(path), "--output", str(folder / "drawn.png"), "--overwrite"], counts)
            call(["results", "submit", str(path), "--dry-run", "--results", str(folder / "results")], counts)
        if path.read_bytes() != data:
            counts.add_fault("other", f"{name}, damaged log {number}", "a command that only reads the log changed it")
    return counts


# -- odd command lines -------------------------------------------------------------------------------------------------

#: The words that begin a command line, each with the option for the simulated kernel; empty if the command does not
#: measure.
_COMMANDS: dict[str, tuple[str, ...]] = {
    "sweep": MATMUL,
    "find": MATMUL,
    "sweep --operation bandwidth": BANDWIDTH,
    "find --operation bandwidth": BANDWIDTH,
    "attention": ATTENTION,
    "bandwidth": BANDWIDTH,
    **dict.fromkeys(("show", "compare", "plot", "results", "import"), ()),
}
_FILES = "folder folder/x.jsonl empty binary loop missing missing/x.png new.png new.svg new.txt closed.png/x"


def attack_command_lines(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Run commands with odd values of their options. Commands that measure make a dry run, or have a short budget of
    virtual time.
    """
    counts = Counts("odd command lines")
    files = [*_make_files(folder), *map(str, logs.values())]
    parsers = {name: list(_list_parsers(name)) for name in _COMMANDS}
    for _ in range(count):
        name = random.choice(list(_COMMANDS))
        counts.totals["inputs"] += 1
        call(_make_command_line(name, *random.choice(parsers[name]), files, random), counts)
        for output in Path().glob("mamf-*.jsonl"):
            if not output.stat().st_size:
                counts.add_fault("other", str(output), "left behind an empty output file")
            output.unlink()
    return counts


def _make_files(folder: Path) -> list[str]:
    (folder / "folder").mkdir()
    (folder / "binary").write_bytes(bytes(range(256)) * 20)
    (folder / "loop").symlink_to("loop")
    for name in ("empty", "closed.png"):
        (folder / name).touch()
    names = [str(folder / name) for name in (*_FILES.split(), "x" * 300, "d/" * 2600)]
    return [*names, ".", "..", "/", "/dev/null", "/dev/stdin", "/proc/self/mem"]


def _list_parsers(command: str) -> Iterator[tuple[list[str], argparse.ArgumentParser]]:
    """Yield the parser of a command, or the parsers of its subcommands if it has any. Each comes with the words that
    select it on the command line.
    """
    parser = CommandParser(prog=command)
    parser.command_words = command.split()
    importlib.import_module(f"mamf.cli.commands.{get_module_name(parser.command_words[0])}").add_options(parser)
    subcommands = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield from (([name], action) for actions in subcommands for name, action in actions.items())
    if not subcommands:
        yield [], parser


def _make_command_line(
    name: str, command_words: list[str], parser: argparse.ArgumentParser, files: list[str], random: Random
) -> list[str]:
    kernel = _COMMANDS[name]
    actions = [action for action in parser._actions if action.dest not in ("help", "operation")]
    line = [*name.split(), *command_words]
    for action in actions:
        if not action.option_strings and random.random() < 0.95:
            line += _choose_values(action, files, random)
    options = [action for action in actions if action.option_strings]
    for action in random.sample(options, min(len(options), random.choice((1, 1, 2, 3, 5)))):
        values, flag = _choose_values(action, files, random), random.choice(action.option_strings)
        line += [f"{flag}={values[0]}", *values[1:]] if values and random.random() < 0.3 else [flag, *values]
    if random.random() < 0.03:
        line.append(random.choice(("--no-such-option", "--ouput=x", "extra", "-5", "")))
    if kernel:  # Measure on the simulated device, and only briefly.
        options_in_line = {word.partition("=")[0] for word in line}
        for option in (BACKEND, kernel):
            line += () if options_in_line & {option[0], "--resume"} else option
        line += random.choice((["--dry-run"], ["--dry-run"], ["--budget", "0.2s"]))
    return line


def _choose_values(action: argparse.Action, files: list[str], random: Random) -> list[str]:
    if action.nargs == 0:
        return []
    if action.nargs == 3:
        return random.choice(_RANGES).split()
    valid_values = list(map(str, action.choices or ())) or (files if action.type is Path else [])
    count = random.choice((0, 1, 1, 1, 2, 3) if action.nargs == "+" else (0, *[1] * 20))
    return [
        random.choice(valid_values if valid_values and random.random() < 0.7 else random.choice(_WORDS))
        for _ in range(count)
    ]


# -- files of unlimited size -------------------------------------------------------------------------------------------

#: The size of the file that ``_make_bomb`` makes, after it is decompressed.
BOMB_BYTES = 400 << 20
_ROW = "1 | 1.0(mean) 1.0(median) 1.0(max) @ 256x1024x4096 | best: 1.0(mean) TFLOPS\n"
_LAST_LINES = "Tried 3 shapes => the best outcomes were:\nmean: 300.5 TFLOPS @ 512x1024x4096 (MxNxK)\n"
#: Parts of mamf-finder logs. ``_repeat_piece`` repeats one of them until it has 0.5 to 2 MiB.
_PIECES = {
    "device lines": f"** Platform/Device info:\nLinux 5\n_CudaDeviceProperties(name='NVIDIA H100', {'a' * 3900})\n",
    "brackets": f"(a{'=' * 3900}\n",
    "blanks in rows": f"0 | 1.0(max) / 1.0(mean){' ' * 960}x\n",
    "digits": f"{'1' * 3990}\n",
    "rows": _ROW,
    "runs": f"Benchmark started on 2025-01-04 16:01:02\n{_ROW}{_LAST_LINES}",
    "escapes": "\x1b]a\0\x08",
    "a long line": "a" * 100_000,
}


def _repeat_piece(piece: str, random: Random) -> bytes:
    return (piece * ((random.choice((1, 2, 4)) << 19) // len(piece)) + _ROW + _LAST_LINES).encode()


def _make_bomb(random: Random) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    block = random.choice((b"\0", b"1\n", b" ")) * (1 << 19)
    return b"".join(packer.compress(block) for _ in range(BOMB_BYTES // len(block))) + packer.flush()


def _make_many_members(random: Random) -> bytes:
    return gzip.compress(random.choice((b"", b"x\n"))) * 100_000


def _import_file(make: Callable[[Random], bytes], sweep: Path, folder: Path, random: Random, counts: Counts) -> None:
    (folder / "mm.txt").write_bytes(make(random))
    call(["import", str(folder / "mm.txt"), "--output-folder", str(folder)], counts)


Records = list[dict[str, Any]]


def _add_many_samples(records: Records, row: dict[str, Any], random: Random) -> None:
    first, spread = row["samples_seconds"][0], random.choice((1, 1.01))
    row["samples_seconds"] = [round(first * random.uniform(1, spread), 9) for _ in range(200_000)]


def _add_nesting(records: Records, row: dict[str, Any], random: Random) -> None:
    value: Any = 1
    for _ in range(random.choice((40, 300, 490, 900))):
        value = {"a": value} if random.random() < 0.5 else [value]
    random.choice(records)["details"] = value


def _add_many_rows(records: Records, row: dict[str, Any], random: Random) -> None:
    records[-1:-1] = [copy.copy(row) for _ in range(1000)]


def _add_many_texts(records: Records, row: dict[str, Any], random: Random) -> None:
    row["remarks"] = [f"at 10.0.{i % 256}.7" if i % 99 == 0 else "a" * 90 for i in range(20_000)]
    row["reason"] = random.choice(("a-", "1.", "/a b", "\\ ", "sn:", "a@", "token ")) * 4000


def _read_log(path: Path, folder: Path, counts: Counts) -> None:
    """Run the commands that read a whole log."""
    for command in (f"show {path}", f"results check {path}", f"results submit {path} --dry-run --results {folder}"):
        call(command.split(), counts)


def _read_changed_log(change: Callable[..., None], sweep: Path, folder: Path, random: Random, counts: Counts) -> None:
    """Change the log of a sweep, and read it. ``change``: a function that gets all records, one row that was measured
    successfully, and a random generator.
    """
    records = [json.loads(line) for line in sweep.read_text().splitlines()]
    change(records, next(record for record in records if record.get("status") == "ok"), random)
    path = folder / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    _read_log(path, folder, counts)


def _read_endless_file(sweep: Path, folder: Path, random: Random, counts: Counts) -> None:
    _read_log(Path("/dev/zero"), folder, counts)
    for command in (f"import /dev/zero --output-folder {folder}", f"compare /dev/zero {sweep}", "plot /dev/zero"):
        call(command.split(), counts)


def _read_pipes(sweep: Path, folder: Path, random: Random, counts: Counts) -> None:
    """Pass pipes to commands that expect files or folders. No process writes to these pipes."""
    pipe = folder / "card" / "pipe.jsonl"
    pipe.parent.mkdir()
    os.mkfifo(pipe)
    commands = [f"results check {folder}", f"results table --results {folder}", f"results check {pipe}"]
    commands += [f"results site --results {folder} --output {folder / 'site'}", f"results submit {pipe}"]
    for command in (*commands, f"plot {pipe}", f"report {folder}", f"node show {pipe.parent}"):
        call(command.split(), counts)


def _read_endless_pipe(sweep: Path, folder: Path, random: Random, counts: Counts) -> None:
    """Run ``mamf show`` on a pipe while a thread writes to it without end."""
    pipe = folder / "pipe.jsonl"
    os.mkfifo(pipe)
    piece = random.choice((b"\0", b"x\n", b'{"record": "header"}\n')) * 50_000

    def write() -> None:
        with contextlib.suppress(BrokenPipeError), pipe.open("wb") as file:
            while True:
                file.write(piece)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    call(["show", str(pipe)], counts)
    writer.join()


#: The kinds of inputs. Each function gets the log of an undamaged sweep, an empty folder, a random generator, and the
#: counts.
UNBOUNDED: dict[str, Callable[[Path, Path, Random, Counts], None]] = {
    **{f"import of {name}": partial(_import_file, partial(_repeat_piece, piece)) for name, piece in _PIECES.items()},
    "a small file that unpacks to a large one": partial(_import_file, _make_bomb),
    "many gzip members in one file": partial(_import_file, _make_many_members),
    "many samples": partial(_read_changed_log, _add_many_samples),
    "nesting": partial(_read_changed_log, _add_nesting),
    "many rows": partial(_read_changed_log, _add_many_rows),
    "many texts": partial(_read_changed_log, _add_many_texts),
    "/dev/zero": _read_endless_file,
    "pipes without a writer": _read_pipes,
    "an endless pipe": _read_endless_pipe,
}


def attack_resources(logs: dict[str, Path], folder: Path, random: Random, count: int) -> Counts:
    """Give mamf inputs of unlimited size, each kind in turn. mamf must read or refuse each of them before it counts as
    hung (HANG_SECONDS).
    """
    counts = Counts("inputs of unlimited size")
    for number in range(count):
        kind, input_folder = list(UNBOUNDED)[number % len(UNBOUNDED)], folder / str(number)
        input_folder.mkdir()
        counts.totals["inputs"] += 1
        UNBOUNDED[kind](logs["sweep"], input_folder, random, counts)
    return counts
