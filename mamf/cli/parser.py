"""Parse the command line, print its help and complete it in shells. An error is one line that suggests the nearest
option, and help hides rare options.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mamf.cli.terminal import find_terminal_width, print_line, print_lines
from mamf.errors import UsageError
from mamf.text import wrap_line

#: Options that few people need. --help hides them, but --help-all shows them.
RARE_OPTIONS = {
    *(
        "--anyway",
        "--clock",
        "--devices",
        "--isolate",
        "--no-flush",
        "--notes",
        "--num-iterations",
        "--num-warmup-iterations",
    ),
    *("--order", "--overwrite", "--patience", "--precision", "--reference", "--reference-every", "--seed"),
    *("--time-limit",),
}
#: mamf's names for options that have a different name in mamf-finder, the predecessor of mamf.
_OPTION_BY_FINDER_OPTION = {"--cuda-device": "--device", "--output-file": "--output"}
_SIZES_ADVICE, _LAUNCH_COUNT_ADVICE = (
    "use 'mamf sweep' to measure sizes that you choose",
    "use 'mamf sweep --regime classic' to choose the number of launches",
)
_PRINT_ADVICE = "use --top, --wide and --format to choose what is printed"
#: The advice that error messages give for options of mamf-finder that mamf lacks, or that only some of its commands
#: have.
_ADVICE_BY_FINDER_OPTION = {
    **dict.fromkeys((f"--{size}{end}" for size in "mnk" for end in ("", "-range")), _SIZES_ADVICE),
    **dict.fromkeys(("--shape", "--shapes"), _SIZES_ADVICE),
    **dict.fromkeys(("--num-iterations", "--num-warmup-iterations"), _LAUNCH_COUNT_ADVICE),
    **dict.fromkeys(("--verbose", "--no-verbose"), _PRINT_ADVICE),
    "--search": "use 'mamf find' to search, or 'mamf sweep' to measure a grid",
    "--shapes-file": "use --shapes of 'mamf sweep' to give the shapes themselves",
    "--telemetry": "leave it out, because sensors are always read",
    "--tune": "use --budget, --precision or --quick to set how long a search takes",
}
_INVALID_CHOICE_PATTERN = re.compile(r"invalid choice: '?([^' ]+)'? \(choose from (.*)\)")


class CommandHelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Format help like argparse, but list the choices of an option with several values only once."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        return (
            f"{{{','.join(action.choices)}}} ..."
            if action.choices and action.nargs == "+"
            else super()._format_args(action, default_metavar)
        )


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, suggests the nearest option, and exits with ``usage_exit_code``.

    Its help begins with the examples of the command and hides the options in RARE_OPTIONS.

    - ``usage_exit_code``: the exit code after an error in the options.
    - ``overview_text``: the text that ``mamf --help`` prints; empty in the parser of a single command.
    - ``shows_rare_options``: whether help shows the options in RARE_OPTIONS too.
    - ``command_words``: the words of the command line. Some commands have options that depend on the operation or the
      kernel that these words name.
    - ``operation_name``: the operation whose options the parser has; empty if the command has no option --operation.
    - ``list_operation_names``: returns the operations that --operation can choose.
    """

    usage_exit_code = 2
    overview_text = ""
    shows_rare_options = False
    command_words: Sequence[str] = ()
    operation_name: str = ""
    list_operation_names: Callable[[], Iterable[str]] = tuple

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords, allow_abbrev=False, formatter_class=CommandHelpFormatter)
        # Reject blank values of options without a type, and of options of type Path.
        self.register("type", None, parse_nonempty_text)
        self.register("type", Path, lambda text: Path(parse_nonempty_text(text)))
        # Let argparse treat a word such as -5m as a value, because no option of mamf begins with a digit.
        self._negative_number_matcher = re.compile(r"-\.?\d")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._move_positional_word_to_front(args or ()), namespace)

    def _move_positional_word_to_front(self, words: Sequence[str]) -> list[str]:
        """Move a word of the command line to the front if otherwise a required positional argument would get no word.

        An option that takes several values takes all words that follow it, even a word that is meant for the positional
        argument. Move the last word that the option can spare.
        """
        if not any(_is_required_positional(action, words) for action in self._actions):
            return list(words)
        option: argparse.Action | None = None
        value_count, spare_index = 0, None
        for index, word in enumerate(words):
            if word.startswith("-") and word != "--" and not self._negative_number_matcher.match(word):
                name, equals, _ = word.partition("=")
                option, value_count = None if equals else self._option_string_actions.get(name), 0
                continue
            value_count += 1
            min_count, max_count = _get_value_count_range(option)
            if value_count > max_count:  # argparse gives this word to the positional argument, so move no word
                return list(words)
            if value_count > min_count and option and word not in (option.choices or ()):
                spare_index = index
        return (
            list(words)
            if spare_index is None
            else [words[spare_index], *words[:spare_index], *words[spare_index + 1 :]]
        )

    def parse_args(self, args: Sequence[str] | None = None, namespace: object = None) -> argparse.Namespace:  # type: ignore[override]
        """Parse the words ``args``. In the result, ``given_names`` has the names of the options whose values differ
        from their defaults.
        """
        options: argparse.Namespace
        options, unknown = self.parse_known_args(args)
        parser: CommandParser = getattr(options, "parser", self)
        for action in parser._actions:  # before Python 3.13, argparse accepts --option=-- as an empty list of values
            if action.nargs in (None, "+") and getattr(options, action.dest, None) == [] != action.default:
                parser.error(f"argument {action.option_strings[0]}: expected a value")
        options.given_names = {name for name, value in vars(options).items() if value != parser.get_default(name)}
        if unknown := [word for word in unknown if word != "--"]:
            # For an option of mamf-finder, say what to use in mamf. For an option of another operation, name the
            # operation. For any other word, suggest the nearest option.
            name = unknown[0].partition("=")[0]
            known_options = [
                each for each, action in parser._option_string_actions.items() if action.help is not argparse.SUPPRESS
            ]
            similar_options = sorted(
                each for each in known_options if each.startswith(name.lower())
            ) or difflib.get_close_matches(name, known_options, n=1, cutoff=0.7)
            suggestion = f" (did you mean {similar_options[0]}?)" if similar_options else "; --help lists all options"
            if not name.startswith("-"):
                hint = (
                    f"write --name {unknown[0]!r}, or see --help"
                    if "--name" in known_options
                    else "--help shows how many values each option takes"
                )
                parser.error(f"unexpected argument {unknown[0]!r}: {hint}")
            advice = _ADVICE_BY_FINDER_OPTION.get(name)
            if owner_names := _list_operations_with_option(name, parser.list_operation_names()):
                parser.error(
                    f"{name} is an option of {', '.join(owner_names)}, not of {parser.operation_name}: leave it out, "
                    f"or choose an operation that has it: --operation {owner_names[0]}"
                )
            parser.error(f"unknown option {unknown[0]!r}{f': {advice}' if advice else suggestion}")
        return options

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert the value of an option. If the conversion fails, report the message of the function that converts the
        value. argparse would drop this message.
        """
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(action, str(error.__context__)) from None

    def print_help(self, file: object = None) -> None:
        print_lines(self.format_help())

    def format_help(self) -> str:
        """Format the help. This hides the rare options permanently, which does no harm because mamf exits after it
        prints the help.
        """
        if self.overview_text:
            return self.overview_text
        rare_actions = [
            each
            for each in (() if self.shows_rare_options else self._actions)
            if RARE_OPTIONS.intersection(each.option_strings) or getattr(each, "is_rare", False)
        ]
        for each in rare_actions:
            each.help = argparse.SUPPRESS
        formatter = self._get_formatter()
        formatter.add_text(self.description and wrap_line(self.description, find_terminal_width(), indent=0))
        formatter.add_text(self.epilog and _wrap_examples(self.epilog, find_terminal_width()))
        formatter.add_usage(self.usage, self._actions, self._mutually_exclusive_groups)
        for group in self._action_groups:
            if any(action.help is not argparse.SUPPRESS for action in group._group_actions):
                formatter.start_section(group.title)
                formatter.add_text(group.description and wrap_line(group.description, find_terminal_width()))
                formatter.add_arguments(group._group_actions)
                formatter.end_section()
        formatter.add_text(f"more options: --help-all ({len(rare_actions)})" if rare_actions else None)
        return formatter.format_help()

    def error(self, message: str) -> NoReturn:
        """Print the error message of argparse in one line, and exit. For an invalid choice, suggest the nearest valid
        one. For an unknown command, argparse would list all commands; this method does not.
        """
        if invalid := _INVALID_CHOICE_PATTERN.search(message):
            similar = difflib.get_close_matches(invalid[1], re.findall(r"[\w.-]+", invalid[2]), n=1)
            hint = f" (did you mean {similar[0]}?)" if similar else ""
            if "COMMAND" in message:
                from mamf.operations.unknown import get_operation
                from mamf.plugins.discovery import OPERATION_GROUP, find_entry_points_by_name

                message = f"there is no command {invalid[1]!r}"
                if invalid[1] in find_entry_points_by_name(OPERATION_GROUP):
                    command = "attention" if get_operation(invalid[1]).shows_ceiling_shares else "sweep"
                    hint = f"; measure this operation with 'mamf {command} --operation {invalid[1]}'"
                hint = hint or "; mamf --help lists all commands"
            message += hint
        # Only ranges of sizes take three arguments.
        print_line(
            f"{self.prog}: {message.replace('expected 3 arguments', 'expected 3 arguments, START STOP STEP')}",
            sys.stderr,
        )
        sys.exit(self.usage_exit_code)


def _list_operations_with_option(option: str, operation_names: Iterable[str]) -> list[str]:
    """Return those of ``operation_names`` whose shapes or problems have a parameter with this option."""
    from mamf.operation import get_parameters
    from mamf.plugins.discovery import make_operation

    return [
        name
        for name in sorted(operation_names)
        for operation in [make_operation(name)]
        if any(
            option == parameter.option_name
            for parameter_type in (operation.shape_type, operation.problem_type)
            for parameter in get_parameters(parameter_type).values()
        )
    ]


def find_option_value(option: str, words: Sequence[str]) -> str | None:
    """Find the value of an option in words that argparse has not parsed yet. Return None if the option is missing, and
    an empty text if no value follows it.
    """
    for word, next_word in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, joined_value = word.partition("=")
        if name == option:
            return joined_value if equals else "" if next_word.startswith("-") else next_word
    return None


def parse_nonempty_text(text: str) -> str:
    """Return the text unchanged. Raises UsageError if it is blank."""
    if not text.strip():
        raise UsageError("the value is empty: give a value, or leave the option out")
    return text


def _wrap_examples(examples: str, width: int | None) -> str:
    """Wrap the examples of a command to the width of the terminal. If an example and its comment do not fit in one
    line, print the comment in a line before the example.
    """
    lines: list[str] = []
    for line in examples.splitlines():
        command, comment = re.fullmatch(r"(\s*\S.*?)(?:\s{2,}(\S.*))?|", line).groups()  # type: ignore[union-attr]
        is_too_long = width is not None and len(line) > width
        lines += [f"    # {comment}", command] if is_too_long and comment else [line]
    return "\n".join(wrap_line(line, width) for line in lines)


def _is_required_positional(action: argparse.Action, words: Sequence[str]) -> bool:
    """Return whether an argument is positional and required. A positional argument is not required if the command line
    has one of the options in the field ``alternatives`` of the argument.
    """
    if alternatives := getattr(action, "alternatives", ()):
        return not any(word.partition("=")[0] in alternatives for word in words)
    return not action.option_strings and action.nargs in (None, "+")


def _get_value_count_range(option: argparse.Action | None) -> tuple[int, float]:
    """Return the minimum and maximum number of values that an option takes. Return (0, 0) if ``option`` is None."""
    if option is None:
        return 0, 0
    if isinstance(option.nargs, int):
        return option.nargs, option.nargs
    return {"?": (0, 1), "*": (0, math.inf), "+": (1, math.inf)}.get(option.nargs or "", (1, 1))


class HelpAllAction(argparse._HelpAction):
    """The action of ``--help-all``: it prints the help of a command including rare options, and exits."""

    def __call__(self, parser: Any, *arguments: Any) -> None:
        parser.shows_rare_options = True
        super().__call__(parser, *arguments)


def normalize_option_names(arguments: Sequence[str]) -> list[str]:
    """Replace option names of mamf-finder by names of mamf, such as ``--m_range`` by ``--m-range``. Keep the values."""
    hyphenated = [re.sub("^--[^=]*", lambda match: match[0].replace("_", "-"), argument) for argument in arguments]
    pattern = f"^({'|'.join(_OPTION_BY_FINDER_OPTION)})(?==|$)"
    return [re.sub(pattern, lambda match: _OPTION_BY_FINDER_OPTION[match[0]], argument) for argument in hyphenated]


def print_completions(make_parser: Callable[[Sequence[str]], argparse.ArgumentParser]) -> None:
    """Print the words that complete the command line that the user is typing in a shell, and end the process.

    The shell passes this command line in environment variables. ``make_parser``: a function that takes the words of the
    command line and returns its parser.
    """
    import argcomplete

    from mamf.dtypes import DTYPES

    # Leave out the last word, which the user is still typing; it is empty after a space.
    parser = make_parser(f"{os.environ.get('COMP_LINE', '')}|".split()[1:-1])
    names = {
        "--kernel": _list_entry_point_names("kernels"),
        "--backend": _list_entry_point_names("backends"),
        "--dtype": sorted(DTYPES),
        "--operation": _list_entry_point_names("operations"),
    }
    subparsers = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for command in itertools.chain.from_iterable(each.choices.values() for each in subparsers):
        for option in names.keys() & command._option_string_actions.keys():
            command._option_string_actions[option].completer = functools.partial(
                lambda values, **_: values, names[option]
            )
    argcomplete.autocomplete(parser, always_complete_options="long")


def _list_entry_point_names(group_suffix: str) -> list[str]:
    """List the names in all groups of entry points that begin with ``mamf.`` and end with ``group_suffix``."""
    from importlib.metadata import entry_points

    points = entry_points()
    groups = (group for group in points.groups if group.startswith("mamf.") and group.endswith(group_suffix))
    return sorted({point.name for group in groups for point in points.select(group=group)})
