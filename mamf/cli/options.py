"""Options that several commands share: one name, one meaning, one help; and how the values of options are read."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from mamf.choices import FORMATS, PATIENCE_SECONDS
from mamf.errors import UsageError
from mamf.limits import parse_digits, parse_share, parse_size, shorten
from mamf.plans import CLOCKS
from mamf.regime_names import CEILINGS

Value = TypeVar("Value")
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)")
#: Every device of the backend; the device of each process that a launcher started.
ALL, RANKS = -1, -2


def duration(text: str) -> float:
    """Seconds from ``90``, ``90s``, ``5m`` or ``1.5h``."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a duration; write 90s, 5m or 1.5h")
    return seconds


def share(text: str) -> float:
    """A share between 0 and 1 from ``0.3%`` or ``0.003``."""
    return read(parse_share, text)


def size(text: str) -> int:
    """A dimension or a count: at least 1."""
    return read(parse_size, text)


def bound(text: str) -> int:
    """A bound of a range; the sizes of the range are checked together."""
    if not text.isascii() or not text.removeprefix("-").isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number")
    return -_number(text[1:]) if text.startswith("-") else _number(text)


def _number(digits: str) -> int:
    return read(parse_digits, digits)


def read(parse: Callable[[str], Value], text: str) -> Value:
    """Read the value of an option, so that argparse reports a UsageError."""
    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def index(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number from 0")
    return _number(text)


def device_index(text: str) -> int:
    """The index of a device, ``all`` (ALL) or ``ranks`` (RANKS)."""
    return {"all": ALL, "ranks": RANKS}[text] if text in ("all", "ranks") else index(text)


def row_count(text: str) -> int | None:
    """How many rows to show: a number, or ``all`` (None)."""
    return None if text == "all" else index(text)


class Shared(NamedTuple):
    """``default``: the default as help names it, for most commands. ``keywords``: further arguments of add_argument."""

    help: str
    default: str = ""
    keywords: Mapping[str, Any] = MappingProxyType({})


_SWITCH = {"action": "store_true"}
_FILE, _FOLDER = {"type": Path, "metavar": "FILE"}, {"type": Path, "metavar": "FOLDER"}
OPTIONS: Mapping[str, Shared] = {
    "--anyway": Shared("accept figures from another device or with other settings; the report says so", "", _SWITCH),
    "--backend": Shared("one of 'mamf backends', or package.module:Class", "auto, the first accelerator"),
    "--budget": Shared(
        "time for the run, such as 90s or 5m; the first row is waited for",
        "none",
        {"type": duration, "metavar": "TIME"},
    ),
    "--ceiling": Shared(
        "logs of 'mamf find' or 'mamf roofline' with the ceilings", "", {"type": Path, "nargs": "+", "metavar": "LOG"}
    ),
    "--device": Shared("index of the device", "0", {"type": index, "metavar": "N"}),
    "--devices": Shared(
        "indices of several devices to use, 'all', or 'ranks': one for each process that torchrun or srun starts",
        "only --device",
        {"type": device_index, "nargs": "+", "metavar": "N"},
    ),
    "--dry-run": Shared("print what would be done, and stop", "", _SWITCH),
    "--dtype": Shared(
        "dtype of the operands: bfloat16, float16, float32, tf32, float64, fp8, float8_e5m2, int8, or with scales: "
        "fp8_rowwise, mxfp8, nvfp4, ...",
        "bfloat16, or float16 if the device lacks it",
        {"nargs": "+"},
    ),
    "--format": Shared("format of the report", "table", {"choices": FORMATS, "default": "table"}),
    "--from": Shared("measure nothing, and report on what a folder holds", "", _FOLDER),
    "--isolate": Shared(
        "check results in a fresh process, which a kernel cannot change",
        "of kernels by path",
        {"action": argparse.BooleanOptionalAction, "default": None},
    ),
    "--kernel": Shared("one of 'mamf kernels', or package.module:Class", "all available kernels", {"nargs": "+"}),
    "--dtypes": Shared("count the dtypes of parameters, outputs, logits, loss and gradients", "", _SWITCH),
    "--launches": Shared("launches of each kernel", "", {"type": size, "metavar": "N"}),
    "--notes": Shared("free text for the log, such as how the device is cooled", "", {"type": str, "default": ""}),
    "--operation": Shared("operation; 'mamf kernels' lists them", "", {"metavar": "NAME"}),
    "--memory": Shared("keep the allocations (CUDA), and report what causes the peak", "", _FILE),
    "--nvtx": Shared("mark modules as ranges for nsys or rocprofv3", "", _SWITCH),
    "--output": Shared("run log to write; a folder with --devices", "a name with the date", _FILE),
    "--output-folder": Shared("folder to write to", "", _FOLDER),
    "--overwrite": Shared("replace existing files", "", _SWITCH),
    "--patience": Shared(
        "time without progress after which a device counts as hung",
        "5m",
        {"type": duration, "default": PATIENCE_SECONDS, "metavar": "TIME"},
    ),
    "--picture": Shared("picture to write: .png or .svg", "none", _FILE),
    "--precision": Shared("half-width of the 95%% interval to reach", "0.3%%", {"type": share, "metavar": "SHARE"}),
    "--regime": Shared(
        "burst (rests between launches) or sustained (continuous load)", "burst", {"choices": CEILINGS, "nargs": "+"}
    ),
    "--resume": Shared("continue this log, or folder of --devices, and measure only what is missing", "", _FILE),
    "--set": Shared(
        "fields of the problem; FIELD=A,B measures both values", "", {"nargs": "+", "metavar": "FIELD=VALUE"}
    ),
    "--shape": Shared("one shape, such as 4096x4096x4096 for matmul", "", {"metavar": "SHAPE"}),
    "--shapes": Shared("whole shapes, such as 4096x4096x4096 for matmul", "", {"nargs": "+", "metavar": "SHAPE"}),
    "--time-limit": Shared(
        "longest time for a row, after which 3 launches are enough",
        "1s in burst, 6s in sustained",
        {"type": duration, "metavar": "TIME"},
    ),
    "--top": Shared(
        "rows in a table, best first: a number or 'all'", "10", {"type": row_count, "default": 10, "metavar": "N"}
    ),
    "--wide": Shared("all columns, even if the terminal is too narrow", "", _SWITCH),
}


def add(group: argparse._ActionsContainer, *names: str, **changes: Any) -> None:
    """Add shared options. ``default_text``: the default as help names it; other ``changes``: of add_argument's
    keywords.
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
    """The options of every command that measures; ``budget``: its default as help names it."""
    group = parser.add_argument_group("run")
    add(group, "--budget", default_text=budget)
    add(group, "--dry-run", "--output", "--resume", "--notes", "--isolate")


def add_devices_options(parser: argparse.ArgumentParser, devices: str = OPTIONS["--devices"].default) -> None:
    """``devices``: the default as help names it."""
    group = parser.add_argument_group(
        "several devices", "share a run: a process and a log each, shapes dealt out in turn"
    )
    add(group, "--devices", default_text=devices)
    add(group, "--patience")
    group.add_argument("--share", nargs=2, type=index, help=argparse.SUPPRESS)


def add_measuring_options(
    parser: argparse.ArgumentParser, regimes: str = OPTIONS["--regime"].default, known: Sequence[str] = CEILINGS
) -> argparse._ArgumentGroup:
    """How rows of kernels are measured; ``regimes``: the default as help names it, ``known``: all regimes."""
    group = parser.add_argument_group("measuring")
    add(group, "--regime", default_text=regimes, choices=known)
    add(group, "--precision", "--time-limit")
    group.add_argument("--no-flush", action="store_true", default=None, help="burst: keep the operands in the cache")
    group.add_argument(
        "--clock",
        choices=CLOCKS,
        help="rows whose clock during the launch and share of cycles to measure too; by default the best of each "
        "shape or problem",
    )
    return group


def add_session_options(
    parser: argparse.ArgumentParser,
    budget: str = OPTIONS["--budget"].default,
    regimes: str = OPTIONS["--regime"].default,
) -> None:
    """Measuring, device, run and report; ``budget`` and ``regimes``: the defaults as help names them."""
    add_measuring_options(parser, regimes)
    add_device_options(parser)
    add_devices_options(parser)
    add_run_options(parser, budget)
    add_output_options(parser)
