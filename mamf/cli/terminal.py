"""Define the options that several commands share, and the functions that commands use to print.

No other module of mamf prints. The functions here escape control characters, because a text may come from a plugin or
from the log of a stranger. After a call of ``reserve_stdout_for_reports``, the output of plugins to stdout appears on
stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from mamf.backend import Backend
from mamf.errors import (
    MAX_SECONDS_WITHOUT_REPORT,
    REPORT_FORMATS,
    UsageError,
    parse_digits,
    parse_share,
    parse_size,
    shorten_value,
)
from mamf.plans import CEILING_REGIMES, CLOCK_CHOICES, COMMON_REGIMES
from mamf.text import escape_invisible_characters, wrap_line

if TYPE_CHECKING:
    from mamf.report.document import Document

#: A pattern for the texts that mamf prints in bold or in color: lines with the best result, and verdicts. The number in
#: the name of a group is the code of its style in ECMA-48 escape sequences, such as 1 for bold and 31 for red.
_COLORED_TEXT = re.compile(
    r"^(?P<b1>best .*)$"
    r"|\b(?:(?P<b31>CRITICAL|SLOWER|FAIL|wrong_result|implausible)|(?P<b33>WARN|UNDECIDED)|(?P<b32>OK|FASTER))\b",
    re.MULTILINE,
)
#: The number of columns that mamf assumes if a terminal does not report its width.
_DEFAULT_TERMINAL_COLUMNS = 80
#: Streams for reports; mamf prints to the first one. ``reserve_stdout_for_reports`` appends the original stdout.
#: ``redirect_reports`` inserts another stream at the front while its context is open.
_REPORT_STREAMS: list[TextIO] = []


def get_report_stream() -> TextIO:
    """Return the stream that reports are printed to: the original stdout, or the stream of ``redirect_reports``."""
    return _REPORT_STREAMS[0] if _REPORT_STREAMS else sys.stdout


def reserve_stdout_for_reports() -> None:
    """Reserve stdout for the reports of mamf. After this call, the output of plugins, C code and child processes to
    stdout appears on stderr.
    """
    _REPORT_STREAMS.append(open(os.dup(sys.stdout.fileno()), "w", 1, sys.stdout.encoding))  # noqa: PTH123, SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextlib.contextmanager
def redirect_reports(stream: TextIO) -> Iterator[None]:
    """Print reports to ``stream`` instead of stdout while the context is open, so that a command can redirect the
    report of another command that it runs.
    """
    _REPORT_STREAMS.insert(0, stream)
    try:
        yield
    finally:
        _REPORT_STREAMS.pop(0)


def print_line(line: str, stream: TextIO | None = None, indent: int = 4) -> None:
    """Print a line with control characters escaped, by default to the stream for reports. If it is wider than the
    terminal, break it at spaces and begin each further line with ``indent`` spaces.
    """
    stream = stream or get_report_stream()
    _write_to_stream(f"{wrap_line(escape_invisible_characters(line), find_terminal_width(stream), indent)}\n", stream)


def print_lines(text: str) -> None:
    """Print lines of text that must not be broken, such as a report or a command, to the stream for reports. Escape
    control characters.
    """
    _write_to_stream("\n".join(map(escape_invisible_characters, text.split("\n"))), get_report_stream())


def warn(line: str) -> None:
    """Print an error or a warning to stderr, in a line that begins with ``mamf:``. Do nothing if stderr is closed."""
    with contextlib.suppress(OSError):
        print_line(f"mamf: {line}", sys.stderr)


def _write_to_stream(text: str, stream: TextIO) -> None:
    # Use colors only on a terminal whose user has not disabled them (see no-color.org).
    if stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb":
        text = _COLORED_TEXT.sub(lambda match: f"\x1b[{(match.lastgroup or 'b0')[1:]}m{match[0]}\x1b[0m", text)
    encoding = stream.encoding or "utf-8"
    # Hide progress bars while the text is printed. If tqdm has not been imported, there are no bars, and importing it
    # here would slow down --help.
    tqdm = sys.modules.get("tqdm")
    with tqdm.tqdm.external_write_mode() if tqdm else contextlib.nullcontext():
        # Escape the characters that the stream cannot encode, because print would raise an error for them.
        print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)


def find_terminal_width(stream: TextIO | None = None) -> int | None:
    """Return the number of columns of the terminal that shows ``stream``, by default the stream for reports.

    Return None for a pipe or a file, because neither limits the width of a line.
    """
    stream = stream or get_report_stream()
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError):
        columns = columns or str(os.get_terminal_size(stream.fileno()).columns)
    return int(columns) if columns.isdecimal() and int(columns) else _DEFAULT_TERMINAL_COLUMNS


def print_document(options: argparse.Namespace, document: Document) -> None:
    """Print a report in the format of --format."""
    from mamf.report.formats import FORMATTERS

    # With --wide, or if the report goes to a pipe or a file, pass None as the width, so that tables show all columns.
    print_lines(FORMATTERS[options.format](document, None if getattr(options, "wide", True) else find_terminal_width()))


def choose_note_stream(options: argparse.Namespace) -> TextIO:
    """Choose the stream for lines that accompany a report, such as the path of the log.

    This is stderr if the format of --format is for programs, such as json, so that stdout has only the report.
    """
    from mamf.report.formats import TERMINAL_FORMATS

    return get_report_stream() if options.format in TERMINAL_FORMATS else sys.stderr


def print_needed_memory(needed_bytes: int, memory_purpose: str, backend: Backend) -> None:
    """Print, for --dry-run, how much memory a run needs and how much is free.

    ``memory_purpose``: words that say what needs the memory, such as ``the largest shape``.
    """
    free_bytes = backend.read_free_memory_bytes()
    print_line(
        f"memory: {needed_bytes / 1e9:.3g} GB for {memory_purpose}"
        + (f", {free_bytes / 1e9:.1f} GB free" if free_bytes else "")
    )
    if free_bytes and needed_bytes > free_bytes:
        print_line(
            "        more memory than is free is needed, so this row will end as out_of_memory; mamf still measures "
            "smaller shapes"
        )


_SECONDS_BY_UNIT = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION_PATTERN = re.compile(r"(-?\d+(?:\.\d+)?)([smh]?)")
#: Values of --devices that are not indices: ALL_DEVICES means every device of the backend, and RANK_DEVICES one device
#: for each process that a launcher such as torchrun started.
ALL_DEVICES, RANK_DEVICES = -1, -2
_DEVICE_VALUE_BY_WORD = {"all": ALL_DEVICES, "ranks": RANK_DEVICES}


def parse_duration(text: str) -> float:
    """Parse a duration such as ``90``, ``90s``, ``5m`` or ``1.5h``, and return it in seconds."""
    match = _DURATION_PATTERN.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS_BY_UNIT[match[2]] if match else 0.0
    if match and seconds <= 0:
        raise UsageError(f"a duration must be above 0, not {shorten_value(text)}")
    if not 0 < seconds < math.inf:
        raise UsageError(
            f"{shorten_value(text)!r} is not a duration: write a number of seconds, or a number with s, m or h, "
            "such as 90s or 1.5h"
        )
    return seconds


def parse_top(text: str) -> int | None:
    """Parse the number of rows that a table shows; ``all`` means None, no limit. Raises UsageError for other text."""
    if text == "all":
        return None
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{shorten_value(text)!r} is not a number of rows: write a whole number or 'all'")
    return parse_digits(text)


def parse_amount(text: str) -> float:
    """Parse a number above 0, such as ``1.6e10``. Raises UsageError for any other text."""
    try:
        amount = float(text)
    except ValueError:
        amount = 0.0
    if not 0 < amount < math.inf:
        raise UsageError(f"{shorten_value(text)!r} is not a number above 0: write it like 1.6e10")
    return amount


def parse_index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise UsageError(f"{shorten_value(text)!r} is not a whole number of at least 0")
    return parse_digits(text)


class SharedOption(NamedTuple):
    """An option that several commands have, with the same meaning and the same help.

    ``default_text``: the default as help prints it for most commands. ``keywords``: further arguments of add_argument.
    """

    help: str
    default_text: str = ""
    keywords: Mapping[str, Any] = MappingProxyType({})


_SWITCH_KEYWORDS = {"action": "store_true"}
_FILE_KEYWORDS, _FOLDER_KEYWORDS = {"type": Path, "metavar": "FILE"}, {"type": Path, "metavar": "FOLDER"}
SHARED_OPTIONS: Mapping[str, SharedOption] = {
    "--anyway": SharedOption(
        "accept figures that were measured on another device or with other settings; the report then has a warning",
        "",
        _SWITCH_KEYWORDS,
    ),
    "--backend": SharedOption(
        "backend to use: a name that 'mamf backends' lists, or a class as package.module:Class",
        "auto, the first accelerator",
    ),
    "--budget": SharedOption(
        "time limit of the run, such as 90s or 5m; the first measurement always completes, and a measurement that "
        "takes long to prepare can exceed the limit",
        "none",
        {"type": parse_duration, "metavar": "TIME"},
    ),
    "--ceiling": SharedOption(
        "logs of 'mamf find', 'mamf bandwidth' or 'mamf roofline' that contain the ceilings (the highest rates of the "
        "device)",
        "",
        {"type": Path, "nargs": "+", "metavar": "LOG"},
    ),
    "--device": SharedOption("index of the device to use", "0", {"type": parse_index, "metavar": "N"}),
    "--devices": SharedOption(
        "devices to use: their indices, 'all', or 'ranks' (one device for each process that torchrun or srun starts)",
        "only --device",
        {"type": lambda text: _DEVICE_VALUE_BY_WORD.get(text) or parse_index(text), "nargs": "+", "metavar": "N"},
    ),
    "--dry-run": SharedOption("print what mamf would measure or write, then stop", "", _SWITCH_KEYWORDS),
    "--dtype": SharedOption(
        "dtype of the operands, if the kernel supports it: bfloat16, float16, float32, tf32, float64, fp8, "
        "float8_e5m2, int8, or a scaled format such as fp8_rowwise, mxfp8 or nvfp4",
        "bfloat16; on a device without it, float16 or, on a CPU, float32",
        {"nargs": "+"},
    ),
    "--format": SharedOption("format of the report", "table", {"choices": REPORT_FORMATS, "default": "table"}),
    "--from": SharedOption("folders with existing logs to report on, instead of measuring", "", _FOLDER_KEYWORDS),
    "--isolate": SharedOption(
        "check results in a separate process that the kernel cannot tamper with",
        "only for kernels given as package.module:Class",
        {"action": argparse.BooleanOptionalAction, "default": None},
    ),
    "--kernel": SharedOption(
        "kernel to use: a name that 'mamf kernels' lists, or a class as package.module:Class",
        "all available kernels",
        {"nargs": "+"},
    ),
    "--dtypes": SharedOption(
        "also report the dtypes of parameters, outputs, logits, loss and gradients", "", _SWITCH_KEYWORDS
    ),
    "--launches": SharedOption("number of launches of each kernel", "", {"type": parse_size, "metavar": "N"}),
    "--notes": SharedOption(
        "free text to store in the log, such as how the device is cooled", "none", {"type": str, "default": ""}
    ),
    "--operation": SharedOption(
        "operation to use, such as matmul or attention; 'mamf kernels' lists all operations", "", {"metavar": "NAME"}
    ),
    "--memory": SharedOption(
        "save a CUDA memory snapshot to FILE, and report what occupies the memory at its peak", "", _FILE_KEYWORDS
    ),
    "--nvtx": SharedOption(
        "mark the forward pass of each module as a range that nsys and rocprofv3 show", "", _SWITCH_KEYWORDS
    ),
    "--output": SharedOption(
        "run log to write, or a folder for the logs if several devices share the run",
        "a name with the date",
        _FILE_KEYWORDS,
    ),
    "--output-folder": SharedOption("folder to write to", "", _FOLDER_KEYWORDS),
    "--overwrite": SharedOption("overwrite existing files instead of stopping with an error", "", _SWITCH_KEYWORDS),
    "--patience": SharedOption(
        "time without progress after which a device counts as hung, such as 10m",
        "5m",
        {"type": parse_duration, "default": MAX_SECONDS_WITHOUT_REPORT, "metavar": "TIME"},
    ),
    "--picture": SharedOption("picture file to write, .png or .svg", "none", _FILE_KEYWORDS),
    "--precision": SharedOption(
        "measure each row until the half-width of its 95%% confidence interval is at most this share of its result",
        "0.3%%",
        {"type": parse_share, "metavar": "SHARE"},
    ),
    "--regime": SharedOption(
        "type of load; burst: a few launches, then a rest, repeatedly; sustained: launches without pauses, measured "
        "after clock and power have settled",
        "burst",
        {"choices": CEILING_REGIMES, "nargs": "+"},
    ),
    "--requeue": SharedOption(
        "like --resume, but start a new run if FILE does not exist or its header (first record) is incomplete; for "
        "batch jobs that the scheduler may restart",
        "",
        _FILE_KEYWORDS,
    ),
    "--resume": SharedOption(
        "log of an unfinished run to continue, or the folder with its logs if several devices share the run; mamf "
        "measures only the missing rows",
        "",
        _FILE_KEYWORDS,
    ),
    "--set": SharedOption(
        "other settings of the problem, such as seed=1; FIELD=A,B measures both A and B",
        "",
        {"nargs": "+", "metavar": "FIELD=VALUE"},
    ),
    "--shape": SharedOption("shape to use, such as 4096x4096x4096 for matmul", "", {"metavar": "SHAPE"}),
    "--shapes": SharedOption(
        "shapes to measure, such as 4096x4096x4096 for matmul", "", {"nargs": "+", "metavar": "SHAPE"}
    ),
    "--time-limit": SharedOption(
        "maximum time to measure one row; after this time mamf stops as soon as it has timed 3 launches",
        "1s in the burst regime, 6s in the sustained regime",
        {"type": parse_duration, "metavar": "TIME", "dest": "seconds"},
    ),
    "--top": SharedOption(
        "number of rows to print per table, or 'all'; csv and json always have all rows",
        "10",
        {"type": parse_top, "default": 10, "metavar": "N"},
    ),
    "--wide": SharedOption("print all columns, even if the terminal is too narrow", "", _SWITCH_KEYWORDS),
}


def add_shared_options(group: argparse._ActionsContainer, *option_names: str, **changes: Any) -> None:
    """Add options of SHARED_OPTIONS to a parser or to a group of options.

    ``changes``: arguments of add_argument that replace those in SHARED_OPTIONS, or ``default_text``, the default as
    help prints it.
    """
    for name in option_names:
        help, default, keywords = SHARED_OPTIONS[name]
        default = changes.pop("default_text", default)
        help += f" (default: {default})" if default else ""
        group.add_argument(name, **{"help": help, **keywords, **changes})


def add_device_options(parser: argparse.ArgumentParser) -> None:
    add_shared_options(parser.add_argument_group("device"), "--backend", "--device")


def add_run_options(
    parser: argparse.ArgumentParser,
    budget_default: str = SHARED_OPTIONS["--budget"].default_text,
    resume_help: str = SHARED_OPTIONS["--resume"].help,
) -> None:
    """Add the options that all commands that measure have in common, such as --output and --resume.

    ``budget_default``: the default of --budget, as help prints it. ``resume_help``: the help of --resume.
    """
    group = parser.add_argument_group("run")
    add_shared_options(group, "--budget", default_text=budget_default)
    add_shared_options(group, "--dry-run", "--output")
    add_shared_options(group, "--resume", help=resume_help)
    add_shared_options(group, "--requeue", "--notes", "--isolate")


def add_multi_device_options(
    parser: argparse.ArgumentParser, devices_default: str = SHARED_OPTIONS["--devices"].default_text
) -> None:
    """Add the options of a command that can divide its shapes among several devices.

    ``devices_default``: the default of --devices, as help prints it.
    """
    group = parser.add_argument_group(
        "several devices",
        "Each device has its own process and log. mamf assigns the shapes to the devices in turn; in 'mamf find' and "
        "'mamf verify', each device does the whole run.",
    )
    add_shared_options(group, "--devices", default_text=devices_default)
    add_shared_options(group, "--patience")
    group.add_argument("--share", nargs=2, type=parse_index, help=argparse.SUPPRESS)


def add_measuring_options(
    parser: argparse.ArgumentParser,
    regimes_default: str = SHARED_OPTIONS["--regime"].default_text,
    known_regimes: Sequence[str] = COMMON_REGIMES,
) -> argparse._ArgumentGroup:
    """Add the options that say how rows are measured, such as --regime and --precision. Return their group.

    ``regimes_default``: the default of --regime, as help prints it. ``known_regimes``: the values that it accepts.
    """
    group = parser.add_argument_group("how to measure")
    add_shared_options(group, "--regime", default_text=regimes_default, choices=known_regimes)
    add_shared_options(group, "--precision", "--time-limit")
    group.add_argument(
        "--no-flush",
        dest="flush",
        action="store_false",
        default=None,
        help="do not flush the device's cache before each launch (applies only to the regime burst)",
    )
    group.add_argument(
        "--clock",
        choices=CLOCK_CHOICES,
        help="rows for which mamf also measures the real clock and the share of the maximum FLOP per cycle; best: rows "
        "that are the fastest so far (with several kernels, the fastest so far of their shape) (default: best)",
    )
    return group


def add_session_options(
    parser: argparse.ArgumentParser,
    budget_default: str = SHARED_OPTIONS["--budget"].default_text,
    regimes_default: str = SHARED_OPTIONS["--regime"].default_text,
) -> None:
    """Add all options of a command that measures: how to measure, the devices, the run and the report.

    ``budget_default``, ``regimes_default``: the defaults of --budget and --regime, as help prints them.
    """
    add_measuring_options(parser, regimes_default)
    add_device_options(parser)
    add_multi_device_options(parser)
    add_run_options(parser, budget_default)
    add_shared_options(parser, "--format", "--top", "--wide")
