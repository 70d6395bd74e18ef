"""What commands share: their options, each with one meaning and one help text, and what they print.

No other module prints. Control characters in third-party text are escaped. After ``keep_stdout``, whatever plugins and
libraries print to stdout appears on stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO, TypeVar

from mamf.backend import Backend
from mamf.errors import FORMATS, MAX_SILENT_SECONDS, UsageError, parse_digits, parse_share, parse_size, shorten
from mamf.plans import CEILING_REGIMES, CLOCKS, COMMON_REGIMES
from mamf.text import escape_invisible_characters, escape_invisible_characters_in_lines, wrap_line

if TYPE_CHECKING:
    from mamf.report.document import Document

#: Text to color on a terminal: answers and verdicts. The name of a group ends with the color's number (ECMA-48).
_JUDGED = re.compile(
    r"^(?P<b1>best .*)$"
    r"|\b(?:(?P<b31>CRITICAL|SLOWER|FAIL|wrong_result|implausible)|(?P<b33>WARN|UNDECIDED)|(?P<b32>OK|FASTER))\b",
    re.MULTILINE,
)
# The width of a terminal that does not report it.
_USUAL_COLUMNS = 80
#: The original stdout, after keep_stdout; a stream that replaces it comes first.
_KEPT: list[TextIO] = []


def stdout() -> TextIO:
    """Return the stream for reports."""
    return _KEPT[0] if _KEPT else sys.stdout


def keep_stdout() -> None:
    """Reserve stdout for reports: from now on, what plugins print, also from C and child processes, goes to stderr."""
    _KEPT.append(open(os.dup(sys.stdout.fileno()), "w", 1, sys.stdout.encoding))  # noqa: PTH123, SIM115
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


@contextlib.contextmanager
def reports_to(stream: TextIO) -> Iterator[None]:
    """Print reports to another stream within the context, for a command that another command runs."""
    _KEPT.insert(0, stream)
    try:
        yield
    finally:
        _KEPT.pop(0)


def say(line: str, to: TextIO | None = None) -> None:
    """Print a line, by default to the stream for reports."""
    _write(f"{escape_invisible_characters(line)}\n", to or stdout())


def say_lines(text: str) -> None:
    """Print a text that consists of whole lines, such as a report."""
    _write(escape_invisible_characters_in_lines(text), stdout())


def warn(line: str) -> None:
    """Print an error or a warning to stderr. A closed stderr is ignored."""
    with contextlib.suppress(OSError):
        say_wrapped(f"mamf: {line}", sys.stderr)


def say_wrapped(line: str, to: TextIO) -> None:
    """Print a line, broken at blanks where it is wider than the terminal."""
    _write(f"{wrap_line(escape_invisible_characters(line), terminal_columns(to))}\n", to)


def _write(text: str, stream: TextIO) -> None:
    if _has_colors(stream):
        text = _JUDGED.sub(lambda found: f"\x1b[{(found.lastgroup or 'b0')[1:]}m{found[0]}\x1b[0m", text)
    encoding = stream.encoding or "utf-8"
    # Characters that the terminal's encoding lacks are printed as escapes.
    print(text.encode(encoding, "backslashreplace").decode(encoding), end="", file=stream)


def terminal_columns(stream: TextIO | None = None) -> int | None:
    """Return the width of the terminal behind a stream, by default the one for reports; None if it is a pipe or a file,
    which take any width.
    """
    stream = stream or stdout()
    if not stream.isatty():
        return None
    columns = os.environ.get("COLUMNS", "")
    with contextlib.suppress(OSError):
        columns = columns or str(os.get_terminal_size(stream.fileno()).columns)
    return int(columns) if columns.isdecimal() and int(columns) else _USUAL_COLUMNS


def _has_colors(stream: TextIO) -> bool:
    """Return whether the stream is a terminal with colors and the user has not disabled them (no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def print_document(options: argparse.Namespace, document: Document) -> None:
    """Print a report in the format of --format."""
    from mamf.report.formats import FORMATS

    # None, for --wide, pipes and files, shows all columns.
    width = None if getattr(options, "wide", True) else terminal_columns()
    say_lines(FORMATS[options.format](document, width))


def is_for_people(options: argparse.Namespace) -> bool:
    """Return whether the report's format is for people, not for programs."""
    from mamf.report.formats import TERMINAL_FORMATS

    return options.format in TERMINAL_FORMATS


def note_stream(options: argparse.Namespace) -> TextIO:
    """Return the stream for lines that accompany a report: stderr if a program reads the report."""
    return stdout() if is_for_people(options) else sys.stderr


def say_memory(needed: int, of: str, backend: Backend) -> None:
    """Print the memory that a run needs, for --dry-run. ``needed``: bytes. ``of``: what needs them."""
    free = backend.free_memory()
    say(f"memory: {needed / 1e9:.3g} GB for {of}" + (f", {free / 1e9:.1f} GB free" if free else ""))
    if free and needed > free:
        say("        this will end as out_of_memory; smaller shapes are measured")


Value = TypeVar("Value")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
#: Values of --devices: every device of the backend; the device of each process that a launcher started.
ALL, RANKS = -1, -2


def duration(text: str) -> float:
    """Read a duration such as ``90``, ``90s``, ``5m`` or ``1.5h``, in seconds."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a duration; write 90s, 5m or 1.5h")
    return seconds


def share(text: str) -> float:
    """Read a share between 0 and 1, such as ``0.3%`` or ``0.003``."""
    return read(parse_share, text)


def size(text: str) -> int:
    """Read a dimension or a count, which is at least 1."""
    return read(parse_size, text)


def bound(text: str) -> int:
    """Read a bound of a range, which may be negative: the range checks its sizes later."""
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number")
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _number(digits: str) -> int:
    return read(parse_digits, digits)


def read(parse: Callable[[str], Value], text: str) -> Value:
    """Read the value of an option; a UsageError becomes an error that argparse reports."""
    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number of at least 0")
    return _number(text)


def device_index(text: str) -> int:
    """Read the index of a device, ``all`` (ALL) or ``ranks`` (RANKS)."""
    return {"all": ALL, "ranks": RANKS}[text] if text in ("all", "ranks") else index(text)


def row_count(text: str) -> int | None:
    """Read the number of rows to print; ``all`` gives None."""
    return None if text == "all" else index(text)


class Shared(NamedTuple):
    """A shared option. ``default``: as help prints it for most commands. ``keywords``: further arguments of
    add_argument.
    """

    help: str
    default: str = ""
    keywords: Mapping[str, Any] = MappingProxyType({})


_SWITCH = {"action": "store_true"}
_FILE, _FOLDER = {"type": Path, "metavar": "FILE"}, {"type": Path, "metavar": "FOLDER"}
OPTIONS: Mapping[str, Shared] = {
    "--anyway": Shared(
        "use figures even if they are from another device or other settings; the report says so", "", _SWITCH
    ),
    "--backend": Shared("backend name from 'mamf backends', or package.module:Class", "auto, the first accelerator"),
    "--budget": Shared(
        "time limit, such as 90s or 5m; the first measurement always completes",
        "none",
        {"type": duration, "metavar": "TIME"},
    ),
    "--ceiling": Shared(
        "logs of 'mamf find' or 'mamf roofline' to read ceilings from",
        "",
        {"type": Path, "nargs": "+", "metavar": "LOG"},
    ),
    "--device": Shared("index of the device to use", "0", {"type": index, "metavar": "N"}),
    "--devices": Shared(
        "devices to use: indices, 'all', or 'ranks' (one device for each process that torchrun or srun starts)",
        "only --device",
        {"type": device_index, "nargs": "+", "metavar": "N"},
    ),
    "--dry-run": Shared("print what mamf would measure or write, then stop", "", _SWITCH),
    "--dtype": Shared(
        "dtype of the operands: bfloat16, float16, float32, tf32, float64, fp8, float8_e5m2, int8, or a scaled format "
        "such as fp8_rowwise, mxfp8 or nvfp4",
        "bfloat16, or float16 if the device lacks it",
        {"nargs": "+"},
    ),
    "--format": Shared("format of the report", "table", {"choices": FORMATS, "default": "table"}),
    "--from": Shared("do not measure; report on the logs in these folders", "", _FOLDER),
    "--isolate": Shared(
        "check results in a separate process that the kernel cannot tamper with",
        "only for kernels given as package.module:Class",
        {"action": argparse.BooleanOptionalAction, "default": None},
    ),
    "--kernel": Shared(
        "kernel name from 'mamf kernels', or package.module:Class", "all available kernels", {"nargs": "+"}
    ),
    "--dtypes": Shared("also report the dtypes of parameters, outputs, logits, loss and gradients", "", _SWITCH),
    "--launches": Shared("number of launches of each kernel", "", {"type": size, "metavar": "N"}),
    "--notes": Shared(
        "free text to store in the log, such as how the device is cooled", "", {"type": str, "default": ""}
    ),
    "--operation": Shared("name of the operation; 'mamf kernels' lists them", "", {"metavar": "NAME"}),
    "--memory": Shared(
        "save a CUDA memory snapshot to FILE, and report what the memory contains at its peak", "", _FILE
    ),
    "--nvtx": Shared("mark the forward pass of each module as a range that nsys and rocprofv3 show", "", _SWITCH),
    "--output": Shared("run log to write; a folder if several devices share the run", "a name with the date", _FILE),
    "--output-folder": Shared("folder to write to", "", _FOLDER),
    "--overwrite": Shared("overwrite existing files", "", _SWITCH),
    "--patience": Shared(
        "time without progress after which a device counts as hung, such as 10m",
        "5m",
        {"type": duration, "default": MAX_SILENT_SECONDS, "metavar": "TIME"},
    ),
    "--picture": Shared("picture file to write, .png or .svg", "none", _FILE),
    "--precision": Shared(
        "measure each row until the half-width of its 95%% interval is this share of the figure or less",
        "0.3%%",
        {"type": share, "metavar": "SHARE"},
    ),
    "--regime": Shared(
        "burst: short trains of launches with rests; sustained: continuous load until clock and power settle",
        "burst",
        {"choices": CEILING_REGIMES, "nargs": "+"},
    ),
    "--requeue": Shared("like --resume, but start a new run if FILE does not exist; for jobs that a queue may restart"),
    "--resume": Shared(
        "run log to continue, or folder with the logs of several devices; mamf measures only what is missing", "", _FILE
    ),
    "--set": Shared(
        "set fields of the problem; FIELD=A,B measures both values", "", {"nargs": "+", "metavar": "FIELD=VALUE"}
    ),
    "--shape": Shared("shape to use, such as 4096x4096x4096 for matmul", "", {"metavar": "SHAPE"}),
    "--shapes": Shared("complete shapes, such as 4096x4096x4096 for matmul", "", {"nargs": "+", "metavar": "SHAPE"}),
    "--time-limit": Shared(
        "maximum time to measure a row; after this time mamf stops as soon as it has 3 launches",
        "1s in burst, 6s in sustained",
        {"type": duration, "metavar": "TIME", "dest": "seconds"},
    ),
    "--top": Shared(
        "number of rows to print per table, best first, or 'all'",
        "10",
        {"type": row_count, "default": 10, "metavar": "N"},
    ),
    "--wide": Shared("print all columns, even if the terminal is too narrow", "", _SWITCH),
}


class _Requeue(argparse.Action):
    """Store the path as --resume does, and note that a missing file begins a run."""

    def __call__(self, parser: Any, options: argparse.Namespace, path: Any, option: str | None = None) -> None:
        options.resume, options.requeues = path, True


def add(group: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add shared options. ``default_text``: the default, as help prints it. Other ``changes`` replace keywords of
    add_argument.
    """
    for name in names:
        help, default, keywords = OPTIONS[name]
        default = changes.pop("default_text", default)
        help += f" (default: {default})" if default else ""
        group.add_argument(name, **{"help": help, **keywords, **changes})


def add_device_options(parser: argparse.ArgumentParser) -> None:
    add(parser.add_argument_group("device"), "--backend", "--device")


def add_output_options(parser: argparse.ArgumentParser) -> None:
    add(parser, "--format", "--top", "--wide")


def add_run_options(parser: argparse.ArgumentParser, budget: str = OPTIONS["--budget"].default) -> None:
    """Add the options of every command that measures. ``budget``: its default, as help prints it."""
    group = parser.add_argument_group("run")
    add(group, "--budget", default_text=budget)
    add(group, "--dry-run", "--output", "--resume")
    add(group, "--requeue", dest="resume", action=_Requeue, **_FILE)
    add(group, "--notes", "--isolate")


def add_devices_options(parser: argparse.ArgumentParser, devices: str = OPTIONS["--devices"].default) -> None:
    """Add the options of a run that several devices share. ``devices``: the default, as help prints it."""
    group = parser.add_argument_group(
        "several devices", "Each has its own process and log; shapes are assigned round-robin."
    )
    add(group, "--devices", default_text=devices)
    add(group, "--patience")
    group.add_argument("--share", nargs=2, type=index, help=argparse.SUPPRESS)


def add_measuring_options(
    parser: argparse.ArgumentParser, regimes: str = OPTIONS["--regime"].default, known: Sequence[str] = COMMON_REGIMES
) -> argparse._ArgumentGroup:
    """Add the options that say how rows are measured. ``regimes``: the default, as help prints it. ``known``: all
    regimes to choose from.
    """
    group = parser.add_argument_group("measuring")
    add(group, "--regime", default_text=regimes, choices=known)
    add(group, "--precision", "--time-limit")
    group.add_argument(
        "--no-flush",
        dest="flush",
        action="store_false",
        default=None,
        help="do not flush the cache before each launch (in the regime burst only)",
    )
    group.add_argument(
        "--clock",
        choices=CLOCKS,
        help="rows for which mamf measures the clock during launches and the share of cycles used "
        "(default: the best row of "
        "each shape or problem)",
    )
    return group


def add_session_options(
    parser: argparse.ArgumentParser,
    budget: str = OPTIONS["--budget"].default,
    regimes: str = OPTIONS["--regime"].default,
) -> None:
    """Add the options for measuring, devices, run and report. ``budget``, ``regimes``: their defaults in help."""
    add_measuring_options(parser, regimes)
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser, budget)
    add_output_options(parser)
