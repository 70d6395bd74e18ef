"""Implement the command ``mamf autoprofile``: run a fixed list of other mamf commands, save their logs in one folder,
and write the page SUMMARY.md, which summarizes their reports, into this folder.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mamf.backend import Backend
from mamf.cli import run_command
from mamf.cli.terminal import add_device_options, add_shared_options, print_line, print_lines, warn
from mamf.cli.watching import FAILURE_EXIT_CODE, INTERRUPTED_EXIT_CODE
from mamf.dtypes import canonicalize_dtype_name
from mamf.errors import MamfError, UnavailableError, UsageError
from mamf.files import make_folder, write_file_atomically, yield_numbered_paths
from mamf.plans import BURST, SUSTAINED
from mamf.text import Markup, escape_markdown

if TYPE_CHECKING:
    from mamf.report.document import Block, Document

EXAMPLES = """examples:
  mamf autoprofile                                      ./autoprofile: ceilings, attention, a model step, SUMMARY.md
  mamf autoprofile --output-folder h200 --budget 10m
  mamf report autoprofile                               show the folder as one page
Run the command again to measure what is missing.
"""
_DEFAULT_BUDGET_SECONDS, _DEFAULT_CPU_BUDGET_SECONDS = 270.0, 150.0
#: The share of the time budget that each command gets, by the name of its log without suffix. The profile of a model's
#: training step is not in this table, because it gets the time that remains.
_BUDGET_SHARE_BY_LOG_NAME = {"ceilings": 0.22, "bandwidth": 0.06, "kernels": 0.4, "counters": 0.2}
# On a CPU, measure only kernels that are not compiled, because compiling one would take the whole time budget.
_CPU_ATTENTION_OPTIONS = [
    *("--kernel", "eager", "sdpa", "sdpa-math"),
    *("--seq-lens", "256", "512", "--head-dims", "64", "--heads", "8", "--batch", "1"),
]
#: The maximum number of attention kernels whose hardware counters are read. mamf chooses the kernels that are fastest
#: on the largest measured shape.
_MAX_COUNTED_KERNELS = 2
SUMMARY_FILE_NAME = "SUMMARY.md"
#: The heading of each log in SUMMARY.md, by the log's file name. mamf writes the logs in this order.
HEADING_BY_LOG_FILE = {
    "ceilings.jsonl": "What the device can do",
    "bandwidth.jsonl": "How fast its memory is",
    "kernels.jsonl": "What attention reaches",
    "counters.jsonl": "What bounds the best kernels",
    "step.jsonl": "Where a training step ({model}) spends its time",
}
#: The maximum number of rows, and the maximum width in characters, of each table in SUMMARY.md.
_MAX_SUMMARY_TABLE_ROWS, _MAX_SUMMARY_TABLE_WIDTH = 10, 75


def add_options(parser: argparse.ArgumentParser) -> None:
    add_shared_options(parser, "--output-folder", default=Path("autoprofile"), default_text="autoprofile")
    add_shared_options(parser, "--dtype", nargs=None)
    add_shared_options(parser, "--budget", default_text="270s, or 150s on a CPU")
    add_device_options(parser)


def run_with_options(options: argparse.Namespace) -> int:
    from mamf.plugins.discovery import open_backend

    folder: Path = options.output_folder
    if (folder / SUMMARY_FILE_NAME).exists() and not any((folder / name).exists() for name in HEADING_BY_LOG_FILE):
        raise UsageError(
            f"{folder / SUMMARY_FILE_NAME} was not written by 'mamf autoprofile': choose another folder for "
            "--output-folder"
        )
    commands = AutoprofileCommands(options, folder, open_backend(options.backend or "auto", options.device or 0))
    make_folder(folder, "; choose another folder for --output-folder")
    exit_code, skip_reasons = 0, dict[str, str]()
    try:
        for name, command in commands.yield_commands():
            print_lines(f"-- mamf {shlex.join(command)}\n")
            try:
                if run_command(command) == INTERRUPTED_EXIT_CODE:
                    raise KeyboardInterrupt
            except MamfError as error:
                if error.exit_code == INTERRUPTED_EXIT_CODE:
                    raise KeyboardInterrupt from None
                skip_reasons[name] = (
                    str(error)
                    .replace("measure it again with 'mamf find'", "run 'mamf autoprofile' again")
                    .replace(", or give --no-ceiling instead of --ceiling", "")
                    .replace(", or leave out --ceiling", "")
                )
                warn(skip_reasons[name])
                # A missing chart does not change the exit code, because the summary is useful without the chart.
                exit_code = FAILURE_EXIT_CODE if name in HEADING_BY_LOG_FILE else exit_code
    except KeyboardInterrupt:
        exit_code = INTERRUPTED_EXIT_CODE
    write_file_atomically(
        folder / SUMMARY_FILE_NAME, make_summary_markdown(folder, commands.skip_reasons | skip_reasons)
    )
    print_line(f"summary: {folder / SUMMARY_FILE_NAME}; if measurements are missing, run the command again")
    return exit_code


class AutoprofileCommands:
    """The mamf commands that ``mamf autoprofile`` runs on one device, all within one time budget.

    ``folder``: the folder for the logs. If it already has an unfinished log of a command, the command resumes this log.
    ``skip_reasons``: why a command cannot run on this machine, by the file name of the command's log. Raises
    UnknownNameError for an unknown dtype.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, backend: Backend) -> None:
        self.folder, self.backend = folder, backend
        self.dtype = canonicalize_dtype_name(options.dtype) if options.dtype else None
        self.skip_reasons: dict[str, str] = {}
        self._budget_seconds = options.budget or (
            _DEFAULT_BUDGET_SECONDS if backend.is_accelerator else _DEFAULT_CPU_BUDGET_SECONDS
        )
        self._backend_name = options.backend or backend.name
        self._device_options = [
            *(["--backend", options.backend] if options.backend else []),
            *([] if options.device is None else ["--device", str(options.device)]),
        ]

    def yield_commands(self) -> Iterator[tuple[str, list[str]]]:
        """Yield each command as a pair: the name of the file that the command writes, and the command's arguments.

        The caller must run each command before it takes the next one, because the arguments of a command may depend on
        earlier logs.
        """
        self._set_noisy_logs_aside()
        is_accelerator = self.backend.is_accelerator
        dtype_options = ["--dtype", self.dtype] if self.dtype else []
        yield self._make_resumable_command(
            "ceilings", "find", *dtype_options, "--regime", BURST, *([SUSTAINED] if is_accelerator else [])
        )
        yield self._make_resumable_command(
            "bandwidth", "bandwidth", "--pattern", "copy", "--size", "4GiB" if is_accelerator else "128MiB"
        )
        ceiling_options = self._make_ceiling_options(BURST) or ["--no-ceiling"]
        yield self._make_resumable_command(
            *("kernels", "attention", *dtype_options, "--direction", "fwd", "bwd", "--time-limit", "0.3s"),
            *([] if is_accelerator else _CPU_ATTENTION_OPTIONS),
            *([] if self._has_log("kernels") else ceiling_options),
        )
        # A log of counters has its own kernels: those that were fastest when kernels.jsonl had fewer rows.
        if command := ["counters"] if self._has_log("counters") else self._make_counters_command():
            yield self._make_resumable_command("counters", *command)
        if not self._has_log("step"):
            step_count = "3" if is_accelerator else "1"
            yield (
                "step.jsonl",
                [
                    "profile",
                    *("--steps", step_count, "--warmup", step_count, "--output", str(self.folder / "step.jsonl")),
                    *self._make_ceiling_options(SUSTAINED),
                    *self._device_options,
                    *self._make_model_step_arguments(),
                ],
            )
        for name in ("ceilings", "kernels"):
            if self._has_log(name):
                picture = str(self.folder / f"{name}.png")
                yield picture, ["plot", str(self.folder / f"{name}.jsonl"), "--output", picture, "--overwrite"]

    def _set_noisy_logs_aside(self) -> None:
        """Rename ceilings.jsonl and bandwidth.jsonl if they are complete but the interval of a figure in them is
        unknown, so that mamf measures them again: to resume a complete log would measure nothing. Leave incomplete
        logs, because another process may be writing them.
        """
        from mamf.logs.run_log import read_run_log

        for path in (self.folder / "ceilings.jsonl", self.folder / "bandwidth.jsonl"):
            with contextlib.suppress(MamfError, OSError):  # the command that resumes a log says why it is unreadable
                log = read_run_log(path)
                intervals = [
                    *(ceiling.interval for ceiling in log.ceilings.values()),
                    *(row.interval for row in log.measurements if row.ok and not log.plan.is_search),
                ]
                if log.tier == "complete" and not all(interval.is_known for interval in intervals):
                    kept_path = path.rename(
                        next(new for new in yield_numbered_paths(path.with_suffix(".noisy")) if not new.exists())
                    )
                    warn(f"a figure of {path} has an unknown interval, so mamf measures again; it keeps {kept_path}")

    def _has_log(self, log_name: str) -> bool:
        return (self.folder / f"{log_name}.jsonl").exists()

    def _make_resumable_command(self, log_name: str, *command: str) -> tuple[str, list[str]]:
        return f"{log_name}.jsonl", [
            *(*command, *self._device_options),
            *("--budget", f"{self._budget_seconds * _BUDGET_SHARE_BY_LOG_NAME[log_name]:.0f}s"),
            *("--requeue" if self._has_log(log_name) else "--output", str(self.folder / f"{log_name}.jsonl")),
        ]

    def _make_ceiling_options(self, regime: str) -> list[str]:
        """Return ``--ceiling LOG`` as arguments, where LOG is the log of ceilings in the folder. Return no arguments if
        this log is missing or has no ceiling of ``regime`` (burst or sustained).
        """
        from mamf.logs.run_log import read_run_log

        log = self.folder / "ceilings.jsonl"
        return ["--ceiling", str(log)] if log.exists() and regime in read_run_log(log).ceilings else []

    def _make_counters_command(self) -> list[str]:
        """Return the arguments of ``mamf counters``. They name the measured shape with the most FLOP, and the attention
        kernels that are fastest on this shape. If the counters cannot be read here, return no arguments and add to
        ``skip_reasons``.
        """
        from mamf.logs.run_log import read_run_log
        from mamf.profiling.counters.ncu import find_ncu, make_run_options

        try:
            if missing_counters := self.backend.explain_missing_counters():
                raise UnavailableError(str(missing_counters))
            find_ncu(None)
            log = read_run_log(self.folder / "kernels.jsonl")
            rows = [row for row in log.measurements if row.ok and row.operation == log.plan.operation and not row.phase]
            if not rows:
                raise UnavailableError(
                    "mamf cannot read counters of attention kernels, because kernels.jsonl has no measured row"
                )
        except MamfError as error:
            self.skip_reasons["counters.jsonl"] = str(error)
            return []
        largest_row = max(rows, key=lambda row: row.work_amount)
        fastest_first = sorted(
            (row for row in rows if (row.problem, row.shape) == (largest_row.problem, largest_row.shape)),
            key=lambda row: row.seconds,
        )
        return [
            "counters",
            *(row.kernel for row in fastest_first[:_MAX_COUNTED_KERNELS]),
            *make_run_options(largest_row.problem, largest_row.shape),
        ]

    def _make_model_step_arguments(self) -> list[str]:
        """Return the arguments for ``mamf profile`` to run training steps of GPT-2 small, on a CPU with two layers."""
        title, *size_options = (
            ["GPT-2 small, 8 x 1024 tokens", "--shape", "b8s1024", "--set", "phase=step", "--launches", "10"]
            if self.backend.is_accelerator
            else [
                *("GPT-2 small with two layers, 64 tokens", "--shape", "b1s64"),
                *("--set", "layers=2", "phase=step", "--launches", "2"),
            ]
        )
        return [
            *("--title", title, "-m", "mamf", "run", "torch[sdpa]", "--operation", "model", "--no-verify"),
            *("--backend", self._backend_name, "--device", str(self.backend.index)),
            *(["--dtype", self.dtype] if self.dtype else []),
            *size_options,
        ]


def make_summary_markdown(folder: Path, skip_reasons: Mapping[str, str]) -> str:
    """Return the markdown page SUMMARY.md: for each log in ``folder``, the first table and the conclusion of its
    report.

    ``skip_reasons``: the reason why a missing log was not measured, by the file name of the log.
    """
    from mamf.cli.commands.show import make_log_document
    from mamf.logs.run_log import read_run_log
    from mamf.profiling.log import read_profile_or_none
    from mamf.report.document import Document, Lines, describe_machine
    from mamf.report.formats import format_markdown

    run_logs = [folder / name for name in HEADING_BY_LOG_FILE if name != "step.jsonl" and (folder / name).exists()]
    header = read_run_log(run_logs[0]).header if run_logs else None
    step_log = folder / "step.jsonl"
    step_profile = read_profile_or_none(step_log) if step_log.exists() else None
    device_name = header["device"]["name"] if header else step_profile[1].device if step_profile else "This device"
    sections = [
        f"# {escape_markdown(device_name)}: what it can do, and what kernels reach",
        *([escape_markdown(describe_machine(header))] if header else []),
    ]
    for name, heading in HEADING_BY_LOG_FILE.items():
        title = heading.format(model=escape_markdown(step_profile[0]) if step_profile else "GPT-2 small")
        if (folder / name).exists():
            picture = Path(name).with_suffix(".png")
            blocks: list[Block] = [
                *_choose_essential_blocks(
                    make_log_document(folder / name, argparse.Namespace(top=_MAX_SUMMARY_TABLE_ROWS, ceiling=None))
                ),
                *([Lines([Markup(f"![{title}]({picture})")])] if (folder / picture).exists() else []),
                Lines([Markup(f"All figures: `mamf show` [{name}]({name})")]),
            ]
        else:
            blocks = [Lines([f"not measured: {skip_reasons.get(name, 'the run ended before this measurement')}"])]
        sections.append(f"## {title}\n\n{format_markdown(Document(title, blocks))}")
    return "\n".join(f"{section.rstrip()}\n" for section in sections)


def _choose_essential_blocks(report: Document) -> Iterator[Block]:
    """Yield the warnings of ``report``, the lines that name the ceilings of its shares and the FLOP of a step, its
    first table without the columns that exceed the width of SUMMARY.md, and its conclusion.
    """
    from mamf.report.document import Answer, Lines, Table
    from mamf.report.formats import drop_columns_to_fit

    yield Lines(
        [
            text
            for block in report.visible_blocks
            if isinstance(block, Lines)
            for text in block.texts
            if text.startswith(("a step needs", "shares are relative", "MAMFU: share", "MBU: share", "WARN "))
        ]
    )
    for table in [each for each in report.visible_blocks if isinstance(each, Table)][:1]:
        yield replace(
            table, columns=drop_columns_to_fit(table.visible_columns, table.visible_rows, _MAX_SUMMARY_TABLE_WIDTH)
        )
    yield from (
        Answer([text.replace("continue with --resume", "continue with 'mamf autoprofile'") for text in each.texts])
        for each in report.visible_blocks
        if isinstance(each, Answer)
    )
