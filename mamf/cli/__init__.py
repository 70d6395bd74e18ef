"""Run the command line: parse the arguments, run the command, and turn errors into one-line messages and exit codes.

Each command is one file in mamf.cli.commands, with its examples, its options and its code. ``mamf COMMAND --help``
imports only the file of that command. To keep help fast, this file imports torch, numpy and other large modules only
inside the function that needs them.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import keyword
import mmap
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mamf.cli import watching
from mamf.cli.parser import CommandParser, HelpAllAction, normalize_option_names, print_completions
from mamf.cli.terminal import (
    find_terminal_width,
    get_report_stream,
    print_line,
    print_lines,
    reserve_stdout_for_reports,
    warn,
)
from mamf.cli.watching import INTERRUPTED_EXIT_CODE
from mamf.errors import LogChangedWarning, MamfError, MamfWarning, RunLogError, UsageError, shorten_value
from mamf.text import wrap_line

#: The maximum time, in seconds, for which a plugin's threads may keep the process running after the command has ended.
_MAX_THREAD_WAIT_SECONDS = 5.0
#: The first bytes of every run log.
_LOG_HEADER_PREFIX = b'{"record": "header"'
_DESCRIPTION = (
    "Find the maximum achievable matmul FLOPS of an accelerator. Reports show the regime (type of load) of every rate."
)
COMMANDS_BY_HEADING = {
    "measure": ("find", "sweep", "attention", "bandwidth", "roofline", "explain", "overlap", "run", "counters", "peak"),
    "compare and report": ("show", "report", "plot", "compare", "guard", "reproduce"),
    "models": ("model", "profile", "autoprofile"),
    "machines": ("node", "verify", "doctor", "backends", "kernels"),
    "contribute": ("results", "import"),
}
COMMAND_DESCRIPTIONS = {
    "find": "find the device's ceilings (highest rates), burst and sustained, for matmul or any --operation",
    "sweep": "measure shapes of matmul or of any other --operation, and print the best",
    "attention": "measure attention kernels as shares of the device's matmul ceiling",
    "bandwidth": "measure how fast memory is copied, read and written",
    "node": "measure all devices of this machine at once, and report devices that are slow, wrong or missing",
    "verify": "run random problems with every kernel, for a minute or overnight, and check every output",
    "run": "launch one kernel once and verify it, for use under a profiler, sanitizer or debugger",
    "counters": "read hardware counters of kernels with Nsight Compute (ncu), and report what limits each kernel",
    "profile": "run an unchanged script and report where its steps spend time, as shares of the ceiling",
    "roofline": "measure or read the ceilings of compute and memory bandwidth, and compare logged rows with them",
    "explain": "explain, step by step, why the device does not reach the FLOPS of its datasheet",
    "overlap": "measure how much matmul and a collective, a copy or memory traffic slow down each other",
    "peak": "print the best known matmul rate of the device, or of any device by name, and its source",
    "model": "measure training steps of language models (forward, backward, optimizer) with any attention kernel",
    "autoprofile": "measure ceilings, kernels and a model step into one folder with a SUMMARY.md",
    "show": "print a run log again, in any format",
    "compare": "compare two run logs, and report what became faster or slower, and what is undecided",
    "guard": "measure the kernels that a file lists and fail if one is slower than its baseline, for CI",
    "reproduce": "measure a figure from a log, a table or a paper again, and report whether this device reaches it",
    "report": "write run logs, or a folder of them, as one HTML page with the result, charts and tables",
    "plot": "draw the rates or times in a run log, with the ceiling",
    "results": "check run logs, copy a log into results/ (the contributed logs), or write the pages of results/",
    "import": "convert logs of mamf-finder, versions 2 to 4, into run logs",
    "kernels": "list the kernels, and the reasons why some are not available here",
    "backends": "list each backend with its devices, or the reason why it has none",
    "doctor": "list what slows this machine down, and the commands that fix it",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command in ``arguments``, by default the command in sys.argv, and return its exit code.

    The exit code is 0 for success, 1 if the command did not finish, 2 for bad input, 3 for a regression, and 130 if a
    signal such as Ctrl-C interrupted the command.
    """
    if sys.stderr is None:  # stderr is closed, so print(file=sys.stderr) would write to stdout
        sys.stderr = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115  (it stays open until the process ends)
    if sys.stdout is None:
        warn("cannot print, because stdout is closed: redirect it to a file or to /dev/null")
        return MamfError.exit_code
    if "_ARGCOMPLETE" in os.environ:  # a shell asks for completions of the command line
        print_completions(_build_parser)
    typed_words = sys.argv[1:] if arguments is None else arguments
    if arguments is None and "profile" not in typed_words[:1]:  # a profiled script itself writes to stdout
        reserve_stdout_for_reports()
    try:
        with _print_short_warnings(runs_script="profile" in typed_words[:1]) as log_changed:
            exit_code = _run_command_and_report_errors(typed_words, is_watched=arguments is None) or log_changed[0]
    except KeyboardInterrupt:  # another signal arrived while the command ended because of the first one
        exit_code = INTERRUPTED_EXIT_CODE
    if exit_code == INTERRUPTED_EXIT_CODE and arguments is None:
        # Do not let Python end the process: if the signal arrived during an import, Python would kill the process with
        # SIGINT instead of returning this exit code.
        sys.stdout.flush()
        os._exit(exit_code)
    if arguments is None and "profile" not in typed_words[:1]:  # a profiled script may leave threads that must finish
        _start_forced_exit_thread(exit_code)
    return exit_code


def _start_forced_exit_thread(exit_code: int) -> None:
    """Start a thread that ends the process with ``exit_code`` if threads of a plugin still run after the command.

    At exit Python waits for these threads and prints nothing, so the user would not see why the command does not
    return.
    """

    def wait_for_plugin_threads_and_exit() -> None:
        main_thread = threading.main_thread()
        main_thread.join()  # a profiled script or a test may continue after mamf.cli.main returns
        time.sleep(_MAX_THREAD_WAIT_SECONDS)
        if remaining_names := [
            thread.name for thread in threading.enumerate() if not (thread.daemon or thread is main_thread)
        ]:
            warn(f"mamf ends now, although a plugin has left these threads running: {', '.join(remaining_names)}")
            os._exit(exit_code)

    threading.Thread(target=wait_for_plugin_threads_and_exit, daemon=True).start()


def _run_command_and_report_errors(typed_words: Sequence[str], is_watched: bool) -> int:
    try:
        if is_watched:
            watching.fork_watched_child(typed_words)
        exit_code = run_command(typed_words, watching.CRASH_STATE.crashed_run if watching.CRASH_STATE else None)
        get_report_stream().flush()
        return exit_code
    except MamfError as error:
        warn(str(error))
        return error.exit_code
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        warn("this command needs torch, which is not installed: see pytorch.org for how to install it")
        return MamfError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # the program that reads the pipe, such as head, has ended
        _redirect_stdout_to_null_device()
        return 0
    except OSError as error:
        if error.filename is not None:
            warn(f"cannot read or write {shorten_value(os.fspath(error.filename))}: {error.strerror}")
            return MamfError.exit_code
        _redirect_stdout_to_null_device()
        warn(f"cannot write the output: {error.strerror or error}")
        return 1
    finally:
        if watching.CRASH_STATE:
            watching.CRASH_STATE.mark_command_ended()


def run_command(typed_words: Sequence[str], crashed_run: watching.CrashedRun | None = None) -> int:
    """Run the command in ``typed_words`` and return its exit code. Errors of the command propagate to the caller.

    A command may call this function to run another command. ``crashed_run``: the crashed run to continue, if any.
    """
    if word_with_null_byte := next((word for word in typed_words if "\0" in word), None):
        raise UsageError(f"{shorten_value(word_with_null_byte)} contains a null byte: remove this byte")
    normalized_words = normalize_option_names(typed_words)
    options = _build_parser(normalized_words).parse_args(normalized_words)
    options.typed_words = typed_words
    if options.module is None:
        print_lines(f"{_format_command_overview()}\n")
        return 0
    if options.module == "version":
        print_line(f"mamf {importlib.import_module('mamf.machine.environment').get_package_version('mamf')}")
        return 0
    _choose_resume_or_new_log(options)
    options.crashed_run, options.finished_exit_codes = crashed_run, [*crashed_run.exit_codes] if crashed_run else []
    if crashed_run and hasattr(options, "resume"):
        # Resume the log with the plan that it contains, as if the user had typed only --resume.
        options.resume, options.new_log_reason, options.given_names = crashed_run.log_path, "", set()
    convert_errors = importlib.import_module("mamf.plugins.contracts").convert_plugin_errors
    with convert_errors("a plugin or a library", "it", unconverted_errors=(Exception, KeyboardInterrupt)):
        # A library that is being imported may catch the exception of Ctrl-C, so raise it again after the imports.
        with watching.SignalHandler() as signal_handler:
            run_with_options = importlib.import_module(f"mamf.cli.commands.{options.module}").run_with_options
            devices = importlib.import_module("mamf.cli.devices") if hasattr(options, "share") else None
            signal_handler.raise_if_interrupted()
        return int(devices.measure_on_devices(options, run_with_options) if devices else run_with_options(options))


def _choose_resume_or_new_log(options: argparse.Namespace) -> None:
    """Replace the option --requeue with --resume if the log that it names can be continued. Otherwise replace it with
    --output, which starts a new log.

    Set ``options.new_log_reason`` to the reason why a new log is needed, or to an empty text if none is. Raises
    UsageError if the log of --resume cannot be continued. Call this function before the command, because the command
    reads its options differently when it resumes a log.
    """
    requeue = getattr(options, "requeue", None)
    if requeue and options.resume and not getattr(options, "share", None):
        raise UsageError("--requeue cannot be combined with --resume: use only one of them")
    log_path: Any = requeue or getattr(options, "resume", None)
    options.new_log_reason = (
        _find_new_log_reason(log_path) if log_path and getattr(options, "output", log_path) is None else ""
    )
    if options.new_log_reason and not requeue:
        raise UsageError(
            f"cannot resume {log_path}, which {options.new_log_reason}: use --requeue instead to start a new run there"
        )
    if options.new_log_reason:
        options.output, options.resume = log_path.resolve() if log_path.is_symlink() else log_path, None
        options.output.unlink(missing_ok=True)
    elif requeue:
        options.resume = requeue


def _find_new_log_reason(path: Path) -> str:
    """Return why a run must start a new log at ``path``, or an empty text if the run can continue the log there.

    A new log is needed if the file does not exist, or if an earlier run ended before it had written the complete
    header, which is the first line of a log. The returned text completes a sentence that begins with the path.
    Raises RunLogError if the file cannot be read.
    """
    if not path.is_file():
        return "" if path.exists() else "does not exist"
    try:
        with path.open("rb") as file:
            first_line = file.readline()
    except OSError as error:
        raise RunLogError(f"cannot read {path}: {error.strerror}") from None
    is_header_incomplete = _LOG_HEADER_PREFIX.startswith(
        first_line[: len(_LOG_HEADER_PREFIX)]
    ) and not first_line.endswith(b"\n")
    if not is_header_incomplete:
        return ""
    return "is cut off within its header" if first_line else "is empty"


def _redirect_stdout_to_null_device() -> None:
    """Redirect stdout to the null device. Call this after a write to stdout has failed: otherwise Python fails again
    when it flushes stdout at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), get_report_stream().fileno())


@contextlib.contextmanager
def _print_short_warnings(runs_script: bool) -> Iterator[mmap.mmap]:
    """Print each warning only once and as one line while the context is open.

    Yields one byte, which becomes 1 after a LogChangedWarning. This byte is then the exit code of a command that
    is otherwise successful. The byte is in memory that forked processes share.

    ``runs_script``: whether the command runs a user's script. If so, Python prints the warnings of packages other than
    mamf in full.
    """
    printed_texts: set[str] = set()
    log_changed = mmap.mmap(-1, 1)

    def print_warning(message: Warning | str, category: type[Warning], *place: Any, **keywords: Any) -> None:
        is_ours = issubclass(category, MamfWarning)
        log_changed[0] |= issubclass(category, LogChangedWarning)
        text = str(message) if is_ours else f"{category.__name__}: {message}".splitlines()[0]
        if runs_script and not is_ours:
            show_warning_in_full(message, category, *place, **keywords)
        elif text not in printed_texts:
            printed_texts.add(text)
            warn(text)

    with warnings.catch_warnings():
        show_warning_in_full = warnings.showwarning
        warnings.simplefilter("always", MamfWarning)
        warnings.showwarning = print_warning
        yield log_changed


def _build_parser(command_words: Sequence[str]) -> CommandParser:
    """Build the argument parser of the command that the first of ``command_words`` names. If this word is not a
    command, build the parser of all commands. Import only the module of the named command.
    """
    parser = CommandParser(prog="mamf", description=_DESCRIPTION)
    parser.add_argument(
        "--version", dest="module", action="store_const", const="version", help="print the version and stop"
    )
    # Do not let argparse require a command, because it would then report a missing command before a misspelled option.
    parser.set_defaults(module=None)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=CommandParser)
    commands.type = str  # accept any text here, because the parser of the named command checks it
    first_word = command_words[0] if command_words else ""
    parser.overview_text = "" if first_word in COMMAND_DESCRIPTIONS else f"{_format_command_overview()}\n"
    for name, description in (
        {first_word: COMMAND_DESCRIPTIONS[first_word]}.items()
        if first_word in COMMAND_DESCRIPTIONS
        else COMMAND_DESCRIPTIONS.items()
    ):
        command = commands.add_parser(name, help=description, description=description)
        if name in command_words:
            module_name = get_module_name(name)
            command.set_defaults(command=name, module=module_name, parser=command)
            command_module = importlib.import_module(f"mamf.cli.commands.{module_name}")
            command.epilog = command_module.EXAMPLES
            command.command_words = command_words
            command_module.add_options(command)
            command.add_argument("--help-all", action=HelpAllAction, help="show all options and exit")
    return parser


def _format_command_overview() -> str:
    """Format the list of commands that ``mamf --help`` prints: one line per command, under the headings of
    COMMANDS_BY_HEADING.
    """
    width = find_terminal_width()
    lines = ["usage: mamf COMMAND [OPTION ...]", "", wrap_line(_DESCRIPTION, width, 0)]
    for heading, names in COMMANDS_BY_HEADING.items():
        lines += [
            "",
            f"{heading}:",
            *(wrap_line(f"  {name:<12} {COMMAND_DESCRIPTIONS[name]}", width, 15) for name in names),
        ]
    return "\n".join([*lines, "", "mamf COMMAND --help has examples and options; mamf --version prints the version"])


def get_module_name(command: str) -> str:
    """Return the name of a command's module: the command, with an underscore after it if it is a Python keyword, such
    as ``import_``.
    """
    return f"{command}_" if keyword.iskeyword(command) else command
