"""Run a command on several devices, with one process and one log per device, and report the logs as one run.

With ``--devices``, mamf divides the shapes among the devices. ``mamf node`` first measures each device while the others
are idle, then all devices at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from mamf.backend import STARTING_PROCESS_PID_VARIABLE
from mamf.cli.progress import PhaseLines, add_phase_listener
from mamf.cli.reading import read_roofs
from mamf.cli.resuming import get_resume_command
from mamf.cli.terminal import (
    ALL_DEVICES,
    RANK_DEVICES,
    choose_note_stream,
    get_report_stream,
    print_document,
    print_line,
    redirect_reports,
    warn,
)
from mamf.cli.watching import FAILURE_EXIT_CODE, INTERRUPTED_EXIT_CODE, REGRESSION_EXIT_CODE, SignalHandler
from mamf.engine.runner import get_crash_record
from mamf.engine.traits import replace_assumed_traits
from mamf.errors import (
    DeviceError,
    LogChangedWarning,
    LogMismatchError,
    MamfError,
    RunLogWriteError,
    UnavailableError,
    UnsupportedError,
    UsageError,
    describe_error,
    get_catchable_plugin_errors,
)
from mamf.files import make_folder
from mamf.kinds.kind import ReportOptions
from mamf.kinds.registry import get_kind, make_run_title
from mamf.logs.run_log import RunLog, read_run_log
from mamf.logs.shared_runs import divide_missing_shapes, find_shared_run_logs, read_log_or_shared_run
from mamf.node.children import (
    ADDRESS_KEY,
    FAILURE_KEY,
    PHASE_KEY,
    SUCCESS_EXIT_CODES,
    WAITING_PHASE,
    WARNING_KEY,
    ChildEvent,
    ChildProcesses,
    ChildWatch,
    watch_children_until_end,
)
from mamf.node.device import DeviceRun
from mamf.node.group import find_rank_place, require_rank_place
from mamf.node.logs import UNMEASURABLE_REASON, UNWRITTEN_LOG_REASON, NodeRun, read_node_folder
from mamf.node.verdict import NodeDevice
from mamf.operations.matmul.operation import make_matmul_kernel
from mamf.plans import NODE_BUDGET_SECONDS, SWEEP, VERIFY
from mamf.plugins.discovery import count_devices, find_usable_backend_name, open_backend

#: A function that sends a record from the process of a device to its parent process.
SendRecord = Callable[[Mapping[str, Any]], None]
RunCommand = Callable[[argparse.Namespace], int]
#: The maximum time, in seconds, for a process to complete its log after its parent process has ended.
_MAX_LOG_COMPLETION_SECONDS = 15.0


def measure_on_devices(options: argparse.Namespace, run_command: RunCommand) -> int:
    """Run ``run_command`` in this process or, with --devices, in one process per device. Return the exit code."""
    if options.share:
        return run_as_child_process(lambda send: _measure_shapes_of_device(options, run_command, send))
    if options.devices == [RANK_DEVICES]:
        return _measure_shapes_of_rank(options, run_command)
    if options.resume is not None and options.resume.is_dir():
        return _resume_logs_in_folder(options)
    devices = _read_requested_devices(options)
    if len(devices) < 2:
        options.device = devices[0] if devices else options.device
        return run_command(options)
    if options.dry_run:
        print_line(f"devices: {_format_indices(devices)}, one process and one log each; the plan of the first device:")
        options.device, options.share = devices[0], [0, len(devices)]
        return run_command(options)
    folder = options.output or Path(f"mamf-{options.command}-{datetime.now():%Y%m%d-%H%M%S}")
    if folder.suffix == ".jsonl":
        raise UsageError(f"--output {folder} must be a folder, because each device writes a log: leave out .jsonl")
    make_empty_folder(folder, "--output")
    commands = {
        device: [_make_device_command(options, device, [rank, len(devices)], folder / f"device{device}.jsonl")]
        for rank, device in enumerate(devices)
    }
    return _run_and_report(options, folder, commands)


def _read_requested_devices(options: argparse.Namespace) -> list[int]:
    """Return the indices of the devices that --devices names. Without this option, return an empty list, but for a new
    run of ``mamf verify`` without --device all devices. Raises UsageError if --devices mixes words and indices, or if
    --device is given too.
    """
    indices = sorted(set(options.devices or ()))
    if indices and options.device is not None:
        raise UsageError("--device cannot be combined with --devices: use one of them")
    if len(indices) > 1 and indices[0] < 0:
        raise UsageError("--devices cannot mix words and indices: give 'all', 'ranks' or only indices")
    if options.command == VERIFY and not indices and options.device is None and options.resume is None:
        indices = [ALL_DEVICES]
    return resolve_device_indices(options.backend or find_usable_backend_name(), indices) if indices else []


def _format_indices(devices: Iterable[int]) -> str:
    return " ".join(map(str, devices))


def _make_device_command(options: argparse.Namespace, device: int, rank_and_count: list[int], path: Path) -> list[str]:
    """Return the command line for the process of one device: the words that the user typed, then options that override
    some of the typed options.

    ``rank_and_count``: the index of this process, and the number of processes. ``path``: the device's log.
    """
    is_new_run, paths = options.resume is None, getattr(options, "ceiling", None) or ()
    # If --ceiling names a folder with the logs of several devices, pass on only the logs of this device.
    ceilings = [each for path in paths for each in (find_shared_run_logs(path, device) if path.is_dir() else [path])]
    return [
        *(sys.executable, "-m", "mamf", *options.typed_words, "--share", *map(str, rank_and_count)),
        *(["--device", str(device)] if is_new_run else []),
        *("--output" if is_new_run and not options.new_log_reason else "--requeue", str(path)),
        *(["--ceiling", *map(str, ceilings)] if ceilings else []),
    ]


def _run_on_devices(
    options: argparse.Namespace, commands: Mapping[int, Iterable[Sequence[str]]]
) -> tuple[dict[int, str], list[int], bool]:
    """Run the commands of different devices in parallel, and the commands of one device in sequence. If a command
    fails, skip the remaining commands of its device.

    Return the reason why each failed device failed, by the device's index; the exit codes of all processes; and whether
    a signal, such as Ctrl-C, ended the run.
    """
    failure_reasons, exit_codes, was_interrupted = dict[int, str](), list[int](), False
    queues, printed_lines = {device: deque(queue) for device, queue in commands.items()}, set[str]()

    def forward_warning(event: ChildEvent) -> None:
        line = str((event.message or {}).get(WARNING_KEY, ""))
        if line.startswith("mamf: ") and line not in printed_lines:  # print it once, although each device sends it
            printed_lines.add(line)
            warn(f"device {event.rank}: {line.removeprefix('mamf: ')}")

    with SignalHandler():
        try:
            while next_commands := {device: queue.popleft() for device, queue in queues.items() if queue}:
                watch = ChildWatch(
                    [*next_commands], options.patience, success_exit_codes=(*SUCCESS_EXIT_CODES, REGRESSION_EXIT_CODE)
                )
                run_children(watch, next_commands, on_event=forward_warning)
                failure_reasons |= watch.failure_reasons
                exit_codes += watch.exit_codes.values()
                for device in watch.failure_reasons:
                    queues[device].clear()
        except KeyboardInterrupt:
            was_interrupted = True
    return failure_reasons, exit_codes, was_interrupted


def _run_and_report(options: argparse.Namespace, folder: Path, commands: Mapping[int, Iterable[Sequence[str]]]) -> int:
    """Run the commands of all devices, and return the exit code. Warn about devices that failed, and print one report
    of all logs in the folder.
    """
    failure_reasons, exit_codes, was_interrupted = _run_on_devices(options, commands)
    devices_by_reason = dict[str, list[int]]()
    for device, reason in failure_reasons.items():
        devices_by_reason.setdefault(reason, []).append(device)
    has_logs = bool(find_shared_run_logs(folder))
    for reason, devices in devices_by_reason.items():
        # If all devices failed for the same reason, the devices are probably not at fault, so do not name them.
        is_common_reason = not has_logs and len(devices_by_reason) == 1
        warn(reason if is_common_reason else f"device {_format_indices(devices)} failed: {reason}")
    if not has_logs:
        folder.rmdir()
        return INTERRUPTED_EXIT_CODE if was_interrupted else max(*exit_codes, FAILURE_EXIT_CODE)
    from mamf.report.document import add_logged_warnings
    from mamf.report.verification import count_verified_items

    log = read_log_or_shared_run(folder)
    roofs = read_roofs(options) if options.command == SWEEP and options.ceiling else None
    report_options = ReportOptions(options.top, roofs, getattr(options, "baseline", None))
    print_document(options, add_logged_warnings(get_kind(log.plan).make_document(log, report_options), log))
    print_line(f"logs: {folder}", choose_note_stream(options))
    working = sorted({part.header["device"]["index"] for part in log.part_logs} - failure_reasons.keys())
    if failure_reasons:
        resume_command = f"mamf {get_resume_command(log)} --resume {shlex.quote(str(folder))}"
        remedy = f"; add --devices {_format_indices(working)} to use only the other devices" if working else ""
        warn(f"run '{resume_command}' to measure the remaining rows{remedy}")
    if log.plan.kind == VERIFY and count_verified_items(log.measurements)["wrong"]:
        return REGRESSION_EXIT_CODE
    if was_interrupted:
        return INTERRUPTED_EXIT_CODE
    return FAILURE_EXIT_CODE if failure_reasons or not any(row.ok for row in log.measurements) else 0


def _resume_logs_in_folder(options: argparse.Namespace) -> int:
    """Resume each log in a folder on the device that wrote the log, and return the exit code. If --devices leaves out a
    device with a log, the listed devices measure the remaining shapes of that device.
    """
    folder = options.resume
    logs = dict[int, list[RunLog]]()
    for path in find_shared_run_logs(folder):
        log = read_run_log(path)
        if get_resume_command(log).split()[0] != options.command:
            command = f"mamf {get_resume_command(log)} --resume {shlex.quote(str(folder))}"
            raise LogMismatchError(f"{path} is the log of {make_run_title(log.plan)}: resume it with '{command}'")
        if path.stem.startswith("device"):
            logs.setdefault(log.header["device"]["index"], []).append(log)
    if not logs or options.device is not None:
        raise UsageError(
            f"cannot resume {folder}: it must contain logs of devices, such as device0.jsonl (then leave out --device, "
            "or name some of the devices with --devices), or logs of ranks (then add --devices ranks)"
        )
    requested_devices = sorted(set(options.devices or [ALL_DEVICES]))
    devices_to_use = list(logs) if ALL_DEVICES in requested_devices else requested_devices
    if devices_without_log := [device for device in devices_to_use if device not in logs]:
        raise LogMismatchError(
            f"{folder} has no log of device {devices_without_log[0]}: name only the devices {_format_indices(logs)} "
            "with --devices"
        )
    if not options.dry_run:
        divide_missing_shapes(folder, logs, devices_to_use)
    commands, resumed_paths = dict[int, list[list[str]]](), list[str]()
    for device, log in [(index, log) for index in devices_to_use for log in logs[index]]:
        plan = log.plan
        is_complete = log.tier == "complete" and len(log.rows_kept_on_resume) == len(log.measurements)
        if not is_complete or (plan.kind == VERIFY and options.budget is not None):
            rank_and_count = [plan.options.rank, plan.options.ranks] if plan.is_shared else [0, 0]
            commands.setdefault(device, []).append(_make_device_command(options, device, rank_and_count, log.path))
            resumed_paths.append(str(log.path))
    if options.dry_run:
        print_line(f"logs to resume: {', '.join(resumed_paths) or 'nothing'}")
        return 0
    return _run_and_report(options, folder, commands)


def _measure_shapes_of_device(options: argparse.Namespace, run_command: RunCommand, send_record: SendRecord) -> int:
    """Measure the shapes of one device in its process, and return the exit code.

    ``send_record``: a function that sends a record to the parent process.
    """
    threading.Thread(target=_end_run_when_parent_ends, daemon=True).start()
    if options.share == [0, 1]:  # The log has the shapes of a failed device, so use its plan, not the typed one.
        options.given_names = set()
    with add_phase_listener(lambda text: send_record({PHASE_KEY: text})), redirect_reports(sys.stderr):
        exit_code = run_command(options)
    if exit_code != FAILURE_EXIT_CODE:
        return exit_code
    log = read_run_log(options.resume or options.output)
    reason = log.summary["reason"] if log.summary else f"{log.path} has no summary"
    if log.tier == "complete" or reason.startswith("the budget ended"):
        return 0  # not an error: the parent process fails only if no device measured a row
    raise DeviceError(reason)


def _end_run_when_parent_ends() -> None:
    """Wait until the parent process ends, which closes stdin. Then let the run complete its log, and exit."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_MAX_LOG_COMPLETION_SECONDS)
    os._exit(INTERRUPTED_EXIT_CODE)


def _measure_shapes_of_rank(options: argparse.Namespace, run_command: RunCommand) -> int:
    """Measure this process's part of the shapes, for a run that torchrun or srun started. Return the exit code."""
    rank_place, folder = require_rank_place(os.environ), options.resume or options.output
    if folder is None:
        raise UsageError("--devices ranks needs --output or --resume, with the folder for the logs of all ranks")
    path = folder / f"rank{rank_place.rank}.jsonl"
    if not options.crashed_run:
        make_folder(folder)
        options.new_log_reason = options.new_log_reason or (
            "does not exist" if options.resume and not path.exists() else ""
        )
        options.resume, options.output = (
            (None, path) if options.new_log_reason or options.resume is None else (path, None)
        )
    device_count = count_devices(options.backend or find_usable_backend_name())
    if options.resume is None:
        # If a launcher shows each process only one device, this device has the index 0.
        options.device = rank_place.local_rank if device_count > 1 else 0
    options.share = [rank_place.rank, rank_place.rank_count]
    with Path(os.devnull).open("w") as null_device, redirect_reports(null_device):
        exit_code = run_command(options)
    if rank_place.rank == 0:
        print_line(f"logs: {folder}; run 'mamf show {shlex.quote(str(folder))}' when all ranks have ended")
    return exit_code


# -- parent and child processes of this command and of mamf node -------------------------------------------------------


def resolve_device_indices(backend_name: str, requested_indices: Sequence[int]) -> list[int]:
    """Return the sorted indices of the requested devices. Raises UnavailableError if a device does not exist, and
    UsageError for RANK_DEVICES (``--devices ranks``), which is not an index.
    """
    if RANK_DEVICES in requested_indices:
        raise UsageError("--devices ranks does not work with this command: give indices of devices, or 'all'")
    count = count_devices(backend_name)
    indices = list(range(count)) if ALL_DEVICES in requested_indices else sorted(set(requested_indices))
    if missing := [device for device in indices if device >= count]:
        existing = [device for device in indices if device < count]
        remedy = f"; use --devices {' '.join(map(str, existing))}" if existing else ""
        count_text = "1 device" if count == 1 else f"{count} devices"
        raise UnavailableError(f"{backend_name} has only {count_text}, and no device {missing[0]}{remedy}")
    return indices


def make_empty_folder(folder: Path, option: str) -> None:
    """Create the folder that ``option`` names. Raises UsageError if the folder has files or cannot be created."""
    make_folder(folder, f"; choose another folder for {option}")
    if any(folder.iterdir()):
        raise UsageError(f"{folder} is not empty: choose another folder for {option}")


def run_children(
    watch: ChildWatch,
    commands: Mapping[int, Sequence[str]],
    resume_children: Callable[[ChildProcesses], None] = lambda children: None,
    on_event: Callable[[ChildEvent], None] = lambda event: None,
) -> None:
    """Run one command per device in its own process, and show on the terminal what each device is doing.

    ``resume_children``: a function that lets the processes continue. mamf calls it when all of them wait at a
    barrier. ``on_event``: called for each message of a process.
    """

    def forward_event(event: ChildEvent) -> None:
        on_event(event)
        phases.show_phases(watch.phases)

    environment = {**os.environ, "PYTHONUNBUFFERED": "1", STARTING_PROCESS_PID_VARIABLE: str(os.getpid())}
    with ChildProcesses(commands, environment) as children, PhaseLines(commands) as phases:
        watch_children_until_end(
            watch, children.processes, children.wait_for_event, lambda: resume_children(children), forward_event
        )


def run_as_child_process(
    work: Callable[[SendRecord], int], describe_failure: Callable[[BaseException], str] = describe_error
) -> int:
    """Run ``work`` in this child process and return the exit code. ``work`` gets a function that sends a record to the
    parent process. If ``work`` raises an exception, send the text that ``describe_failure`` returns for it.
    """
    parent_stream = get_report_stream()

    def send_record(record: Mapping[str, Any]) -> None:
        try:
            print_line(json.dumps(record), parent_stream)
        except BrokenPipeError:  # the parent process has ended, so this one must end too
            raise KeyboardInterrupt from None

    with SignalHandler():
        try:
            return work(send_record)
        except KeyboardInterrupt:
            return INTERRUPTED_EXIT_CODE
        except get_catchable_plugin_errors() as error:  # includes the errors of vendors' libraries
            send_record({FAILURE_KEY: describe_failure(error)})
            return error.exit_code if isinstance(error, MamfError) else 1


#: The parent process sends one of these lines to each waiting process: the first to continue, the second to end.
_MEASURE_ANSWER, _END_ANSWER = "go", "end"


def prepare_node_run(options: argparse.Namespace) -> list[int]:
    """Set the backend and the output folder in the options. Return the indices of the devices to measure, but none if
    a launcher started several processes on this machine and this one is not the first of them.
    """
    for name in options.kernel or ():
        make_matmul_kernel(name)
    options.backend = options.backend or find_usable_backend_name()
    options.output_folder = options.output_folder or Path(f"mamf-node-{datetime.now():%Y%m%d-%H%M%S}")
    if (rank_place := find_rank_place(os.environ)) is not None:
        if options.overlap:
            raise UsageError("--overlap works on one machine only: start 'mamf overlap' with torchrun or srun")
        if rank_place.local_rank > 0:
            return []
        options.output_folder /= f"node{rank_place.node_index}"
    return resolve_device_indices(options.backend, options.devices or [ALL_DEVICES])


def measure_node_devices(options: argparse.Namespace, indices: list[int]) -> tuple[Path, NodeRun, list[NodeDevice]]:
    """Measure all devices of this machine, each in a separate process. Return the folder of the logs, how the run
    ended, and the devices.
    """
    folder = options.output_folder
    make_empty_folder(folder, "--output-folder")
    run, watch = NodeRun(indices), ChildWatch(indices, options.patience)
    run.write_run_file(folder)
    with SignalHandler():
        try:
            _run_node_children(options, folder, run, watch)
            run.is_over = True
        except KeyboardInterrupt:
            warn("interrupted (exit code 130): the verdict covers only what was measured; run again in a new folder")
    run.failures = watch.failure_reasons
    try:
        run.write_run_file(folder)
    except (RunLogWriteError, UsageError) as error:  # continue, because the verdict can still be printed
        warn(str(error))
    _, devices = read_node_folder(folder, known_run=run)
    return folder, run, [replace(device, address=watch.bus_addresses.get(device.index)) for device in devices]


def _run_node_children(options: argparse.Namespace, folder: Path, run: NodeRun, watch: ChildWatch) -> None:
    commands = {
        index: [
            *(sys.executable, "-m", "mamf", "node", "--led", str(index), str(len(run.devices))),
            *("--output-folder", str(folder), "--backend", options.backend),
            *(("--dtype", options.dtype) if options.dtype else ()),
            *(("--budget", f"{options.budget:g}s") if options.budget else ()),
            *(("--verify", f"{options.verify:g}s") if options.verify else ()),
            *(("--kernel", *options.kernel) if options.kernel else ()),
        ]
        for index in run.devices
    }

    def answer_waiting_children(children: ChildProcesses) -> None:
        if watch.failure_reasons:
            run.separate_measurement_reason = (
                f"{', '.join(f'device {index}' for index in sorted(watch.failure_reasons))} failed"
            )
        for index in watch.running_ranks:
            children.send_line(index, _END_ANSWER if run.separate_measurement_reason else _MEASURE_ANSWER)

    run_children(watch, commands, answer_waiting_children)


def measure_node_device(options: argparse.Namespace, send_record: SendRecord) -> int:
    """Measure one device for ``mamf node`` in its process, and return the exit code. If a measurement fails, the logs
    written before it remain.

    ``send_record``: sends a record to the parent process.
    """
    index, device_count = options.led
    # Fail if another program changes a log. Otherwise mamf would go on in a new log, which the verdict would not read.
    warnings.simplefilter("error", LogChangedWarning)
    send_record({PHASE_KEY: "opening the device"})
    backend = open_backend(options.backend, index)
    replace_assumed_traits(backend)
    # Send the name of each row before its launch, so that the report of a crash names the kernel and the shape.
    get_crash_record(backend).set_pending_row = lambda row: send_record(
        {PHASE_KEY: f"{row.kernel} at {row.shape}" if row else "between rows"}
    )
    send_record({ADDRESS_KEY: backend.read_bus_address()})

    def wait_for_other_devices() -> bool:
        """Wait until the processes of all devices have called this function. Return False if a device failed."""
        send_record({PHASE_KEY: WAITING_PHASE})
        return sys.stdin.readline().strip() == _MEASURE_ANSWER

    run = DeviceRun(
        backend,
        options.output_folder,
        options.dtype,
        options.kernel,
        options.budget or NODE_BUDGET_SECONDS,
        options.verify,
    )
    run.on_progress, run.wait_for_other_devices = lambda text: send_record({PHASE_KEY: text}), wait_for_other_devices
    run.measure_single_device_parts()
    if device_count > 1:
        run.measure_copies_to_next_device()
    return 0


def describe_node_failure(error: BaseException) -> str:
    """Describe why measuring a device failed. Mark failures that are not the device's fault, such as a full disk."""
    if isinstance(error, (LogChangedWarning, RunLogWriteError)):
        return f"{UNWRITTEN_LOG_REASON}: {error}"
    return (
        f"{UNMEASURABLE_REASON}: {error}"
        if isinstance(error, (UsageError, UnsupportedError))
        else describe_error(error)
    )
