"""``mamf autoprofile``: one command, one folder, one SUMMARY.md. Each step is a command of mamf."""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from mamf.cli import call, watching
from mamf.cli.autoprofile_steps import BY_USER, Step, no_counters, steps_of
from mamf.cli.interruption import EXIT_CODE
from mamf.cli.options.autoprofile import VARIABLES
from mamf.cli.options.shared import OPTIONS
from mamf.cli.terminal import say, warn
from mamf.errors import MamfError, UsageError
from mamf.files import create_whole, make_folder, write_whole
from mamf.kinds.kind import View
from mamf.kinds.registry import kind_of
from mamf.logs.run_log import read_run_log
from mamf.plugins.discovery import open_backend, operation
from mamf.plugins.selection import choose_kernels
from mamf.profiling.folder import LOGS, SUMMARY, TABLE, StepEnd, read_folder, require_own, write_ends
from mamf.profiling.summary import summary
from mamf.report.formats import markdown

_UNFINISHED = 1
_BUDGET, _BUDGET_OF_CPU = 270.0, 150.0


def run(options: argparse.Namespace) -> int:
    if options.source:
        _write_summary(options.source)
        return 0
    if options.operation in ("matmul", "model"):
        raise UsageError(f"{options.operation} is always measured: name another --operation, or leave it out")
    remarks = _fill_sizes(options, os.environ)
    folder: Path = options.output_folder
    require_own(folder)
    backend = open_backend(options.backend or "auto", options.device or 0)
    # Reports unavailable kernels before anything is measured.
    choose_kernels(operation(options.operation), backend, options.kernel)
    if options.ceiling and not read_run_log(options.ceiling).all_ceilings:
        raise UsageError(f"{options.ceiling} holds no ceiling: give a log of 'mamf find'")
    budget = options.budget or (_BUDGET if backend.is_accelerator else _BUDGET_OF_CPU)
    make_folder(folder, "; name another --output-folder")
    if options.ceiling:
        _copy_ceiling(options.ceiling, folder / LOGS["ceilings"])
    return _Run(folder, remarks, budget, no_counters(backend)).run(steps_of(options, folder, backend))


def _copy_ceiling(ceiling: Path, own: Path) -> None:
    """Copy the log with the ceilings into the folder. Raises UsageError if the folder holds another one."""
    if not own.exists():
        create_whole(own, ceiling.read_bytes())
    elif own.read_bytes() != ceiling.read_bytes():
        raise UsageError(f"{own} differs from {ceiling}: leave --ceiling out, or name another folder")


def _fill_sizes(options: argparse.Namespace, environment: Mapping[str, str]) -> list[str]:
    """Fill in sizes that are not given; returns a remark for each. Raises UsageError for an invalid size."""
    remarks = []
    for name, variable in VARIABLES.items():
        text = environment.get(variable, "").replace(",", " ")
        if getattr(options, name) or not text.strip():
            continue
        option = f"--{name.replace('_', '-')}"
        try:
            setattr(options, name, [OPTIONS[option].keywords["type"](each) for each in text.split()])
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"the environment variable {variable}: {error}") from None
        remarks.append(f"{option} {text} comes from the environment variable {variable}.")
    for remark in remarks:
        say(remark)
    return remarks


class _Run:
    """Runs steps within the budget, and records in the folder how each ended."""

    def __init__(self, folder: Path, remarks: list[str], budget: float, no_counters: str | None) -> None:
        self.folder, self.remarks, self.budget, self.no_counters = folder, remarks, budget, no_counters
        self.ends: list[StepEnd] = []
        watch = watching.WATCH
        # After a crash, when the first process began.
        self.begun = watch.begun if watch and watch.restart else time.monotonic()

    def run(self, steps: list[Step]) -> int:
        code = 0
        try:
            for step in steps:
                self._run_step(step)
        except KeyboardInterrupt:
            code = EXIT_CODE
        if any(end.status == "failed" for end in self.ends):
            code = code or _UNFINISHED
        reasons = {step.name: "interrupted before it" for step in steps}
        if self.no_counters:
            reasons["counters"] = self.no_counters
        taken = {end.name for end in self.ends}
        self.ends += [StepEnd(name, "", "left out", why) for name, why in reasons.items() if name not in taken]
        write_ends(self.folder, self.ends, self.remarks)
        if not any((self.folder / log).exists() for log in LOGS.values()):
            warn("nothing was measured")
            return code or _UNFINISHED
        _write_summary(self.folder)
        return code

    def _run_step(self, step: Step) -> None:
        left = self.budget - (time.monotonic() - self.begun)
        if left <= 0 and not step.is_complete:
            self.ends.append(StepEnd(step.name, "", "left out", "the budget ended before it"))
            return
        try:
            arguments = step.arguments(min(step.share * self.budget, left))
        except MamfError as error:  # an earlier step left nothing to use
            self.ends.append(StepEnd(step.name, "", "left out", str(error)))
            return
        say(f"-- {step.name}: mamf {shlex.join(arguments)}")
        self.ends.append(self._call_step(step, arguments))
        if self.ends[-1].reason == BY_USER:
            raise KeyboardInterrupt

    def _call_step(self, step: Step, arguments: list[str]) -> StepEnd:
        # As one would type it in the folder.
        command = f"mamf {shlex.join(Path(each).name if os.sep in each else each for each in arguments)}"
        try:
            status, reason = step.read_end(call(arguments))
        except MamfError as error:
            warn(str(error))
            if error.exit_code == EXIT_CODE:
                return StepEnd(step.name, command, "interrupted", BY_USER)
            return StepEnd(step.name, command, "failed", str(error))
        except KeyboardInterrupt:
            return StepEnd(step.name, command, "interrupted", BY_USER)
        return StepEnd(step.name, command, status, reason)


def _write_summary(path: Path) -> None:
    folder = read_folder(path)
    if folder.kernels:
        log = folder.kernels
        write_whole(path / TABLE, markdown.render(kind_of(log.plan).document(log, View())))
    for name in ("ceilings", "kernels"):
        _draw(path, name)
    write_whole(path / SUMMARY, summary(read_folder(path)))
    say(f"summary: {path / SUMMARY}")


def _draw(path: Path, name: str) -> None:
    if (path / LOGS[name]).exists():
        try:
            call(["plot", str(path / LOGS[name]), "--output", str(path / f"{name}.png"), "--overwrite"])
        except MamfError as error:
            warn(f"no picture of the {name}: {error}")
