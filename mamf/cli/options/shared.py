"""Options that several commands share: one name, one meaning, one help."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from mamf.choices import FORMATS, PATIENCE_SECONDS
from mamf.cli.options.values import device_index, duration, head_dims, index, row_count, shape, share, size
from mamf.operations.attention.shapes import DIRECTIONS
from mamf.operations.matmul.kernel import LAYOUTS
from mamf.regime_names import CEILINGS


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
    "--batch": Shared(
        "attention: sequences", "as many as make 16384 tokens, 1024 on a CPU", {"type": size, "nargs": "+"}
    ),
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
    "--direction": Shared("attention: passes", "fwd", {"choices": DIRECTIONS, "nargs": "+"}),
    "--dry-run": Shared("print what would be done, and stop", "", _SWITCH),
    "--dtype": Shared(
        "dtype of the operands: bfloat16, float16, float32, tf32, float64, fp8, float8_e5m2, int8, or with scales: "
        "fp8_rowwise, mxfp8, nvfp4, ...",
        "bfloat16, or float16 if the device lacks it",
        {"nargs": "+"},
    ),
    "--fast-accumulation": Shared(
        "8-bit floats: fewer bits in partial sums", "", {"action": argparse.BooleanOptionalAction, "default": None}
    ),
    "--format": Shared("format of the report", "table", {"choices": FORMATS, "default": "table"}),
    "--from": Shared("measure nothing, and report on what a folder holds", "", _FOLDER),
    "--head-dims": Shared(
        "attention: dimensions of a head; 192/128 if keys and values differ",
        "128",
        {"type": head_dims, "nargs": "+", "metavar": "D"},
    ),
    "--heads": Shared("attention: query heads", "2048 / head dimension", {"type": size, "nargs": "+", "metavar": "H"}),
    "--isolate": Shared(
        "check results in a fresh process, which a kernel cannot change",
        "of kernels by path",
        {"action": argparse.BooleanOptionalAction, "default": None},
    ),
    "--kernel": Shared("one of 'mamf kernels', or package.module:Class", "all available kernels", {"nargs": "+"}),
    "--launches": Shared("launches of each kernel", "", {"type": size, "metavar": "N"}),
    "--layout": Shared("layout of A and B: n as multiplied, t transposed", "nt", {"choices": LAYOUTS}),
    "--notes": Shared("free text for the log, such as how the device is cooled", "", {"type": str, "default": ""}),
    "--operation": Shared("operation; 'mamf kernels' lists them", "", {"metavar": "NAME"}),
    "--out-dtype": Shared("dtype of C", "the dtype of A; bfloat16 for 8-bit floats, int32 for int8"),
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
    "--seed": Shared("seed of all random choices", "0", {"type": index, "metavar": "N"}),
    "--seq-lens": Shared("attention: keys", "1024 4096 16384", {"type": size, "nargs": "+", "metavar": "S"}),
    "--set": Shared(
        "fields of the problem; FIELD=A,B measures both values", "", {"nargs": "+", "metavar": "FIELD=VALUE"}
    ),
    "--shape": Shared("one shape, such as 4096x4096x4096 for matmul", "", {"type": shape, "metavar": "SHAPE"}),
    "--shapes": Shared("shapes, such as 4096x4096x4096 for matmul", "", {"nargs": "+", "metavar": "SHAPE"}),
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
    parser: argparse.ArgumentParser, regimes: str = OPTIONS["--regime"].default
) -> argparse._ArgumentGroup:
    """How rows of kernels are measured; ``regimes``: the default as help names it."""
    group = parser.add_argument_group("measuring")
    add(group, "--regime", default_text=regimes)
    add(group, "--precision", "--time-limit")
    group.add_argument("--no-flush", action="store_true", default=None, help="burst: keep the operands in the cache")
    return group
