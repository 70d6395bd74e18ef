"""``mamf sweep``: measure shapes, keep a run log, print the best."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from mamf.backend import Advice, Backend, Unavailable
from mamf.cli.interruption import EXIT_CODE, Interruption
from mamf.cli.options import add_device_options, add_output_options, duration
from mamf.cli.plan_options import (
    add_measuring_options,
    add_problem_options,
    add_shape_options,
    plan_from,
    require_same_device,
    shapes_from,
)
from mamf.discovery import kernel_for, open_backend
from mamf.doctor import as_line, diagnose, warnings
from mamf.environment import command_line, describe_environment, tool_version
from mamf.errors import LogMismatchError, MamfError, RunLogWriteError, UnsupportedError, UsageError
from mamf.estimate import estimate_seconds, probe_flops
from mamf.kernel import MatmulKernel
from mamf.measure import Measurement
from mamf.records import measurement_record, plan_record, utc_now
from mamf.report import FORMATS, render, summary_record
from mamf.run_log import RunLog, RunLogWriter, read_run_log
from mamf.sweep import Plan, Sweep

_NOTHING_MEASURED = 1
_EXAMPLES = """examples:
  mamf sweep --m-range 0 20480 256                    79 shapes Mx4096x4096 in burst
  mamf sweep --m 8192 --n 8192 --k 8192 --regime burst sustained
  mamf sweep --m-range 0 20480 256 --regime classic   mamf-finder's protocol
  mamf sweep --resume LOG                             go on after Ctrl-C or kill
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EXAMPLES
    add_shape_options(parser)
    add_problem_options(parser)
    add_measuring_options(parser)
    add_device_options(parser)
    run_options = parser.add_argument_group("run")
    run_options.add_argument(
        "--budget", type=duration, help="stop after so long, for example 5m; the rest can be resumed"
    )
    run_options.add_argument(
        "--dry-run", action="store_true", help="say how many shapes, how much memory and time, and stop"
    )
    run_options.add_argument("--output", type=Path, metavar="FILE", help="the run log to write (default: a dated name)")
    run_options.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on with this log, measuring only what it lacks"
    )
    run_options.add_argument("--notes", default="", help="free text for the log: cooling, machine, what was special")
    add_output_options(parser, FORMATS)
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    with Interruption() as interruption:
        try:
            session = _Session(options, interruption)
            return session.dry_run() if options.dry_run else session.run()
        except KeyboardInterrupt:
            print("mamf: interrupted before the first shape; nothing is lost", file=sys.stderr)
            return EXIT_CODE


class _End(NamedTuple):
    """How a sweep ended: the summary's status, why if early, and the exit code."""

    status: str
    reason: str
    exit_code: int


class _Session:
    """A sweep with everything around it: device, log, progress, report."""

    def __init__(self, options: argparse.Namespace, interruption: Interruption) -> None:
        self.options = options
        self.interruption = interruption
        self.log: RunLog | None = read_run_log(options.resume) if options.resume else None
        if self.log and options.output:
            raise UsageError("--resume continues its own file: leave --output out")
        requested = shapes_from(options)
        self.backend = self._open_backend()
        self.plan = plan_from(options, requested, self.backend, self.log)
        self.kernel = self._kernel()
        if self.log:
            require_same_device(self.log, self.backend)
        self.findings: list[Advice] = []
        self.held = self.log.held if self.log else set()
        self.rows: list[Measurement] = self.log.kept if self.log else []
        # A library may have swallowed the exception while it was imported.
        interruption.check()

    def _open_backend(self) -> Backend:
        device = self.log.header["device"] if self.log else {}
        name = self.options.backend or device.get("backend", "auto")
        index = self.options.device if self.options.device is not None else device.get("index", 0)
        return open_backend(name, index)

    def _kernel(self) -> MatmulKernel:
        name = self.options.kernel or (self.log.header["kernel"] if self.log else "auto")
        kernel = kernel_for(self.backend, self.plan.problem, name)
        if self.log and kernel.name != self.log.header["kernel"]:
            raise LogMismatchError(
                f"{self.log.path} was measured with kernel {self.log.header['kernel']}, not {kernel.name}"
            )
        reason = kernel.unsupported(self.backend, self.plan.problem)
        if reason:
            raise UnsupportedError(reason)
        return kernel

    def dry_run(self) -> int:
        plan, backend = self.plan, self.backend
        steps = plan.steps(self.held)
        needed = max(plan.nbytes(shape, backend.info.cache_bytes) for shape in plan.measured_shapes())
        free = backend.free_memory()
        flops = probe_flops(self.kernel, plan.problem, backend)
        seconds = estimate_seconds(plan, steps, backend, flops)
        print(f"device: {backend.info.name} ({backend.name}:{backend.index}), {self.kernel.name} {plan.problem.dtype}")
        print(f"shapes: {len(plan.shapes)}, in {', '.join(plan.regimes)}: {len(steps)} to measure")
        print(f"memory: {needed / 1e9:.3g} GB for the largest" + (f", of {free / 1e9:.1f} GB free" if free else ""))
        if free and needed > free:
            print("        which will be out_of_memory; smaller shapes are measured")
        print(f"time: about {seconds:.0f} s, judging by {flops / 1e12:.3g} TFLOPS at 1024x1024x1024")
        return 0

    def run(self) -> int:
        if self.log and not self.plan.steps(self.held):
            return self._report(self.log.header, self.log.summary, self.log.path)
        self.findings = diagnose(self.backend)
        header = self.log.header if self.log else self._header()
        sweep = Sweep(self.plan, self.kernel, self.backend, self.held)
        with self.interruption.shielded():
            writer = self._open_log(header)
        for finding in warnings(self.findings):
            print(f"mamf: {as_line(finding)}", file=sys.stderr)
        with writer:
            begun = self.backend.now()
            end = self._collect(sweep, writer)
            with self.interruption.shielded():
                return self._finish(header, writer, end, self.backend.now() - begun)

    def _header(self) -> dict[str, Any]:
        backend = self.backend
        sensors = backend.telemetry
        return {
            "tool": tool_version(),
            "command": command_line(),
            "started": utc_now(),
            "device": asdict(backend.info),
            "timer": backend.timer,
            "sensors": f"unavailable: {sensors.reason}" if isinstance(sensors, Unavailable) else "available",
            "kernel": self.kernel.name,
            "plan": plan_record(self.plan),
            "settings": backend.settings(),
            "environment": describe_environment(backend.environment_variables),
            "findings": [as_line(finding).strip() for finding in self.findings],
            "notes": self.options.notes,
        }

    def _open_log(self, header: dict[str, Any]) -> RunLogWriter:
        if self.log is None:
            return RunLogWriter.create(self.options.output or default_path(self.backend, self.plan), header)
        writer = RunLogWriter.append(self.log)
        resumed = {"tool": tool_version(), "command": command_line(), "started": utc_now(), "notes": self.options.notes}
        writer.write("resume", resumed)
        return writer

    def _collect(self, sweep: Sweep, writer: RunLogWriter) -> _End:
        """Measure and log until done, or until something ends it early."""
        from mamf.cli.progress import Progress

        total = len(self.plan.steps(sweep.held))
        try:
            with Progress(total) as progress:
                sweep.on_phase = progress.phase
                for row in sweep.results():
                    with self.interruption.shielded():
                        writer.write("measurement", measurement_record(row))
                        self.rows.append(row)
                    progress.add(row)
                    self.interruption.check()
        except KeyboardInterrupt:
            return _End("interrupted", "by the user", EXIT_CODE)
        except MamfError as error:
            return _End("interrupted", str(error), error.exit_code)
        code = 0 if any(row.ok for row in self.rows) else _NOTHING_MEASURED
        return _End("interrupted", "the budget ended", code) if sweep.left_out else _End("complete", "", code)

    def _finish(self, header: dict[str, Any], writer: RunLogWriter, end: _End, elapsed: float) -> int:
        """Close the log with a summary and print the report; returns the exit code."""
        done = {row.step for row in self.rows if not row.is_reference}
        summary = summary_record(self.rows, end.status, end.reason, elapsed, len(self.plan.steps(done)))
        code = end.exit_code
        try:
            writer.write("summary", {**summary, "time": utc_now()})
        except RunLogWriteError as error:
            print(f"mamf: {error}", file=sys.stderr)
            code = error.exit_code
        self._report(header, summary, writer.path)
        return code

    def _report(self, header: dict[str, Any], summary: dict[str, Any] | None, path: Path) -> int:
        print(render(self.options.format, self.rows, header, summary, self.options.top), end="")
        print(f"log: {path}", file=sys.stdout if self.options.format in ("table", "markdown") else sys.stderr)
        return 0


def default_path(backend: Backend, plan: Plan) -> Path:
    slug = re.sub(r"[^a-z0-9]+", "-", backend.info.name.lower()).strip("-")
    moment = datetime.now().strftime("%Y%m%d-%H%M%S")
    return Path(f"mamf-sweep-{slug}-{plan.problem.dtype}-{'-'.join(plan.regimes)}-{moment}.jsonl")
