"""Test the options of all commands: help is fast, and an option means the same in every command."""

import argparse
import functools
import importlib
import subprocess
import sys
from collections import defaultdict
from typing import NamedTuple

import pytest

from mamf.cli import COMMAND_DESCRIPTIONS, get_module_name
from mamf.cli.parser import CommandParser
from mamf.cli.terminal import SHARED_OPTIONS
from mamf.errors import REPORT_FORMATS
from mamf.report import formats

#: The module of each command, by the words that a user types.
MODULES = {name: get_module_name(name) for name in COMMAND_DESCRIPTIONS}
MODULES |= {f"{name} --operation bandwidth": name for name in ("sweep", "find")}
MAX_MODULE_COUNT = 40
_COUNT_MODULES = """
import contextlib, io, os, sys
from mamf.cli import main
before = set(sys.modules)
for line in sys.argv[1:]:
    for name in set(sys.modules) - before:
        del sys.modules[name]
    with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
        main([*line.split(), "--help"])
    loaded = set(sys.modules)
    others = loaded & {"numpy", "torch", "importlib.metadata", "tqdm"}
    print(line, sum(name.split(".")[0] == "mamf" for name in loaded), len(printed.getvalue()) > 60, *others, sep=",")
"""
#: Options that mean something else in one command, and why. They mean the same in all other commands.
OTHER_MEANING = {
    ("--resume", "find"): "a resumed search may measure confirmed shapes more often",
    ("--resume", "verify"): "a resumed verification checks new problems for the whole budget",
    ("--baseline", "attention"): "a kernel",
    ("--baseline", "guard"): "a log in place of the file's",
    ("--ceiling", "explain"): "the matmul to explain",
    ("--ceiling", "profile"): "one log per option, which may be repeated",
    ("--devices", "node"): "not the devices of ranks",
    ("--dtype", "model"): "of a model's parameters and activations, in two dtypes only",
    ("--from", "profile"): "a trace, which no other command reads",
    ("--operation", "attention"): "only attention or decode",
    ("--output", "plot"): "a picture",
    ("--output-folder", "roofline"): "a folder whose searches may be unfinished",
    ("--output", "report"): "a page",
    ("--output", "profile"): "a folder if several ranks share the run",
    ("--shape", "explain"): "one matmul, by default that of a ceiling",
    ("--shapes", "overlap"): "pairs of a matmul and the other work",
    ("--output", "results site"): "a folder of pages",
    ("--quick", "model"): "smaller sizes, where none are given",
    ("--regime", "plot"): "rows to draw, not how to measure them",
    ("--regime", "verify"): "how launches are checked",
    ("--tolerance", "reproduce"): "of a claim, which is from another visit",
    ("--top", "reproduce"): "rows that are measured again, not shown",
}
#: Options whose default differs between commands, and why.
OTHER_DEFAULT = {
    "--budget": "a search needs a minute, a sweep has no end of its own",
    "--ceiling": "commands get ceilings from a search, from 'mamf peak', or not at all",
    "--devices": "a machine is verified on all of its devices",
    "--dtype": "bandwidth is measured in float32, which every device has",
    "--kernel": "one kernel or all, by what a command measures",
    "--launches": "one for a profiler to look at, five for counters to agree",
    "--operation": "by what a command measures",
    "--output-folder": "each command has its own",
    "--patience": "devices of a node report more often than those that compile kernels",
    "--regime": "finds confirm both, a peak is sustained, a plot draws what is there",
    "--top": "compare shows what changed",
    "--time-limit": "a pair of works is visited many times",
}


class Use(NamedTuple):
    command: str
    help: str
    default: object
    default_text: str
    type: object


def make_parser(module, words):
    parser = CommandParser(prog=module)
    parser.command_words = words
    importlib.import_module(f"mamf.cli.commands.{module}").add_options(parser)
    return parser


@functools.cache
def make_parsers():
    """Return the parser of every command and action, by the words that a user types."""
    parser_by_words = {}
    for name, module in MODULES.items():
        parser = make_parser(module, name.split())
        subparsers = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        parser_by_words |= (
            {f"{name} {action_name}": action for action_name, action in subparsers[0].choices.items()}
            if subparsers
            else {name: parser}
        )
    return parser_by_words


def yield_uses(parser, command):
    """Yield (name, Use) for each option that the help of a parser shows, except the parameters of an operation."""
    for action in parser._actions:
        if getattr(action, "is_parameter", False):
            continue
        if action.option_strings and action.dest != "help" and action.help != argparse.SUPPRESS:
            help, _, default_text = action.help.partition(" (default: ")
            default = parser.get_default(action.dest)
            use = Use(command, help, default if default != [] else None, default_text, action.type)
            yield action.option_strings[0], use


@functools.cache
def collect_uses():
    uses_by_option = defaultdict(list)
    for line, parser in make_parsers().items():
        for name, use in yield_uses(parser, MODULES.get(line, line)):
            uses_by_option[name].append(use)
    return uses_by_option


def yield_disagreements(uses_by_option):
    """Yield (option, property) for each property in which commands differ and for which no reason is listed."""
    for name, all_uses in uses_by_option.items():
        same_uses = [use for use in all_uses if (name, use.command) not in OTHER_MEANING]
        if len({use.help for use in same_uses}) > 1:
            yield name, "help"
        if len({use.type for use in same_uses}) > 1:
            yield name, "type"
        if name not in OTHER_DEFAULT and len({(use.default, use.default_text) for use in same_uses}) > 1:
            yield name, "default"


def test_one_name_has_one_meaning_default_and_help():
    assert list(yield_disagreements(collect_uses())) == []


def test_a_disagreement_is_seen():
    one, two = Use("sweep", "a", None, "1", None), Use("find", "b", None, "2", int)
    assert list(yield_disagreements({"--new": [one, two]})) == [
        ("--new", "help"),
        ("--new", "type"),
        ("--new", "default"),
    ]
    assert list(yield_disagreements({"--new": [one, one]})) == []


def test_every_exception_is_needed():
    uses_by_option = collect_uses()
    for name, command in OTHER_MEANING:
        assert command in {use.command for use in uses_by_option[name]}, (name, command)
    for name in OTHER_DEFAULT:
        same_uses = [use for use in uses_by_option[name] if (name, use.command) not in OTHER_MEANING]
        assert len({(use.default, use.default_text) for use in same_uses}) > 1, name


def test_shared_options_are_used_by_several_commands():
    assert {name for name in SHARED_OPTIONS if len(collect_uses()[name]) < 2} == set()


def test_help_loads_few_modules_and_no_entry_points():
    """Run the help of all commands in one process. Unload the modules of a command before the next command."""
    process = subprocess.run(
        [sys.executable, "-c", _COUNT_MODULES, *MODULES], capture_output=True, text=True, check=True
    )
    lines = [line.split(",") for line in process.stdout.splitlines()]
    assert [line[0] for line in lines] == list(MODULES)
    for name, count, has_help, *others in lines:
        assert int(count) <= MAX_MODULE_COUNT, name
        # --operation loads an operation by its entry point, so it needs importlib.metadata.
        assert (has_help, others) == ("True", ["importlib.metadata"] if "--operation" in name else []), name


def yield_ambiguous_arguments():
    """Yield each positional argument that a command needs, with each option that might take it as one of its values."""
    for name, parser in make_parsers().items():
        for positional in (each for each in parser._actions if not each.option_strings):
            alternatives = getattr(positional, "alternatives", ())
            for option in (each for each in parser._actions if each.option_strings and each.nargs in ("?", "+")):
                is_needed = alternatives or positional.nargs in (None, "+")
                if is_needed and option.option_strings[0] not in alternatives:
                    yield pytest.param(parser, positional.dest, option, id=f"{name} {option.option_strings[0]}")


@pytest.mark.parametrize(("parser", "positional", "option"), list(yield_ambiguous_arguments()))
def test_an_option_with_several_values_leaves_the_word_that_a_command_needs(parser, positional, option):
    value = option.choices[-1] if option.choices else {"shape": "8x8x8"}.get(option.dest, "1")
    typed = [option.option_strings[0], value]
    word_last, word_first = parser.parse_args([*typed, "WORD"]), parser.parse_args(["WORD", *typed])
    assert "WORD" in str(getattr(word_last, positional))
    assert vars(word_last) == vars(word_first)


@pytest.mark.parametrize(
    ("line", "positional", "option"),
    [
        ("show --ceiling A B LOG", "logs LOG", "ceiling A B"),
        ("show --ceiling A B --format csv LOG", "logs LOG", "ceiling A B"),
        ("show --ceiling A LOG --format csv", "logs LOG", "ceiling A"),
        ("show LOG --ceiling A B", "logs LOG", "ceiling A B"),
        ("reproduce --kernel A LOG", "source LOG", "kernel A"),
        ("reproduce --resume R --kernel A B", "source", "kernel A B"),
        ("reproduce --claim A B", "source", "claim A B"),
        ("roofline --ceiling A B", "rows", "ceiling A B"),
        ("compare --against B A", "logs A", "against B"),
        ("run --causal sdpa-flash", "kernel sdpa-flash", "size_causal yes"),
        ("run --causal both sdpa-flash", "kernel sdpa-flash", "size_causal both"),
    ],
)
def test_words_are_assigned_to_the_argument_that_needs_them(line, positional, option):
    name, *words = line.split()
    parsed_options = make_parser(MODULES[name], line.split()).parse_args(words)
    for dest, *values in (positional.split(), option.split()):
        value = getattr(parsed_options, dest)
        assert list(map(str, value if isinstance(value, list) else [value] if value else [])) == values


def test_formats_are_those_that_can_be_rendered():
    assert tuple(formats.FORMATTERS) == REPORT_FORMATS
