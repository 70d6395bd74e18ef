"""The steps of ``mamf autoprofile``: the command of each, its share of the budget, and how it ended."""

from __future__ import annotations

import argparse
import importlib.util
from dataclasses import dataclass, field
from pathlib import Path

from mamf.backend import Backend
from mamf.cli.interruption import EXIT_CODE
from mamf.errors import UnavailableError
from mamf.logs.run_log import read_run_log
from mamf.profiling.advice import groups_of
from mamf.profiling.counters.counting import options_of
from mamf.profiling.counters.running import found_ncu
from mamf.profiling.folder import LOGS
from mamf.regime_names import BURST, SUSTAINED

# A CPU compiles an attention kernel for as long as all steps may take.
_KERNELS_OF_CPU = ("eager", "sdpa", "sdpa-math")
_SIZES_OF_CPU = {"seq_lens": [256, 512], "head_dims": [64], "heads": [8], "batch": [1]}
#: Shares of the budget; time that a step leaves goes to later ones.
_SHARES = {"ceilings": 0.22, "bandwidth": 0.06, "kernels": 0.4, "counters": 0.2}
#: Kernels whose counters are read: the fastest on the shape with the most work.
_COUNTED = 2
_TIME_LIMIT = "0.3s"
BY_USER = "by the user"
#: Profiled and timed steps, and those before them.
_PROFILED, _PROFILED_OF_CPU = 3, 1


@dataclass(frozen=True)
class Step:
    """``command``: without its log and its budget. ``operands``: words after all options.

    ``of_ceiling``: the regime of its ceiling; ``without_ceiling``: the option to use without that ceiling.
    """

    name: str
    folder: Path
    command: tuple[str, ...]
    operands: tuple[str, ...] = ()
    share: float = field(default=1.0)
    has_budget: bool = True
    of_ceiling: str | None = None
    without_ceiling: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return self.folder / LOGS[self.name]

    @property
    def is_complete(self) -> bool:
        return self.log.exists() and (not self.has_budget or read_run_log(self.log).tier == "complete")

    def arguments(self, seconds: float) -> list[str]:
        """The arguments of ``mamf``: resumes an existing log, and shows a complete one."""
        if not self.has_budget and self.log.exists():
            return ["show", str(self.log)]
        budget = ("--budget", f"{max(seconds, 1.0):.0f}s") if self.has_budget else ()
        if self.log.exists():
            return [*self.base_command(), *budget, "--resume", str(self.log)]
        return [*self.base_command(), *self._ceiling(), *budget, "--output", str(self.log), *self.operands]

    def base_command(self) -> tuple[str, ...]:
        """The command; other steps may decide on it."""
        return self.command

    def _ceiling(self) -> tuple[str, ...]:
        """The option for the ceiling, if the folder holds it by now."""
        if self.of_ceiling is None:
            return ()
        log = self.folder / LOGS["ceilings"]
        has = log.exists() and self.of_ceiling in read_run_log(log).ceilings
        return ("--ceiling", str(log)) if has else self.without_ceiling

    def read_end(self, code: int) -> tuple[str, str]:
        """Status and reason from the log."""
        if code == EXIT_CODE:
            return "interrupted", BY_USER
        if not self.log.exists():
            return "failed", f"exit code {code}"
        if not self.has_budget:
            return ("complete", "") if not code else ("failed", f"exit code {code}")
        summary = read_run_log(self.log).summary
        return ("interrupted", "killed") if summary is None else (summary["status"], summary["reason"])


@dataclass(frozen=True)
class CountersStep(Step):
    """The counters of the fastest kernels on the shape with the most work, taken from the step before."""

    def base_command(self) -> tuple[str, ...]:
        """Raises UnavailableError if no kernel was measured, RunLogError without their log."""
        groups = [group for group in groups_of(read_run_log(self.folder / LOGS["kernels"])) if group.rows]
        if not groups:
            raise UnavailableError("no kernel was measured")
        best_first = max(groups, key=lambda group: group.rows[0].amount).rows[:_COUNTED]
        command, *others = self.command
        names = [row.kernel for row in best_first]
        return (command, *names, *options_of(best_first[0].problem, best_first[0].shape), *others)


def no_counters(backend: Backend) -> str | None:
    """Why hardware counters cannot be read on a device, or None."""
    lacking = backend.without_counters()
    if lacking is not None:
        return str(lacking)
    try:
        found_ncu(None)
    except UnavailableError as error:
        return str(error)
    return None


def steps_of(options: argparse.Namespace, folder: Path, backend: Backend) -> list[Step]:
    """The steps for this device, in order; a given ceiling is not searched for."""
    device = _device(options)
    regimes = ("burst", "sustained") if backend.is_accelerator else ("burst",)
    find = Step(
        "ceilings", folder, ("find", *_device_and_dtype(options), "--regime", *regimes), share=_SHARES["ceilings"]
    )
    memory = ("bandwidth", *device, "--pattern", "copy", "--size", "4GiB" if backend.is_accelerator else "128MiB")
    counted = CountersStep("counters", folder, ("counters", *device), (), _SHARES["counters"], of_ceiling=BURST)
    return [
        *([] if options.ceiling else [find]),
        Step("bandwidth", folder, memory, share=_SHARES["bandwidth"]),
        _kernels(options, folder, backend),
        *([] if no_counters(backend) else [counted]),
        _model_step(options, folder, backend),
    ]


def _device(options: argparse.Namespace) -> tuple[str, ...]:
    named = ("--backend", options.backend) if options.backend else ()
    return (*named, *(("--device", str(options.device)) if options.device is not None else ()))


def _device_and_dtype(options: argparse.Namespace) -> tuple[str, ...]:
    return (*_device(options), *(("--dtype", options.dtype) if options.dtype else ()))


def _kernels(options: argparse.Namespace, folder: Path, backend: Backend) -> Step:
    share = _SHARES["kernels"]
    if options.operation != "attention":
        named = ("--kernel", *options.kernel) if options.kernel else ()
        command = ("sweep", "--operation", options.operation, *_device_and_dtype(options), *named)
        return Step("kernels", folder, command, (), share)
    names = options.kernel or (() if backend.is_accelerator else _KERNELS_OF_CPU)
    sizes = {name: getattr(options, name) for name in _SIZES_OF_CPU}
    if not backend.is_accelerator:
        sizes = {name: values or _SIZES_OF_CPU[name] for name, values in sizes.items()}
    asked = {**sizes, "kernel": names}
    given = [
        text for name, values in asked.items() if values for text in (f"--{name.replace('_', '-')}", *map(str, values))
    ]
    target = ("attention", *_device_and_dtype(options))
    command = (*target, "--direction", "fwd", "bwd", *given, "--time-limit", _TIME_LIMIT)
    return Step("kernels", folder, command, (), share, of_ceiling=BURST, without_ceiling=("--no-ceiling",))


def _model_step(options: argparse.Namespace, folder: Path, backend: Backend) -> Step:
    """A profiled training step of GPT-2 small; on a CPU, of two of its layers."""
    script = importlib.util.find_spec("mamf.profiling.scripts.model_step")
    where = script.origin if script and script.origin else ""
    count = _PROFILED if backend.is_accelerator else _PROFILED_OF_CPU
    operands = (
        where,
        options.backend or backend.name,
        str(backend.index),
        "small",
        *(("12", "8", "1024") if backend.is_accelerator else ("2", "1", "64")),
        "sdpa",
        str(3 * count),
        *([options.dtype] if options.dtype else ()),
    )
    command = ("profile", *_device(options), "--steps", str(count), "--warmup", str(count))
    return Step("step", folder, command, operands, has_budget=False, of_ceiling=SUSTAINED)
