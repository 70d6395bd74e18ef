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
MOST_MODULES = 40
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


def parser_of(module, words):
    parser = CommandParser(prog=module)
    parser.command_words = words
    importlib.import_module(f"mamf.cli.commands.{module}").add_options(parser)
    return parser


@functools.cache
def parsers():
    """Return the parser of every command and action, by the words that a user types."""
    found = {}
    for name, module in MODULES.items():
        parser = parser_of(module, name.split())
        below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found |= {f"{name} {each}": action for each, action in below[0].choices.items()} if below else {name: parser}
    return found


def uses(parser, command):
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
def options():
    found = defaultdict(list)
    for line, parser in parsers().items():
        for name, use in uses(parser, MODULES.get(line, line)):
            found[name].append(use)
    return found


def disagreements(found):
    """Yield (option, property) for each property in which commands differ and for which no reason is listed."""
    for name, all_uses in found.items():
        same = [use for use in all_uses if (name, use.command) not in OTHER_MEANING]
        if len({use.help for use in same}) > 1:
            yield name, "help"
        if len({use.type for use in same}) > 1:
            yield name, "type"
        if name not in OTHER_DEFAULT and len({(use.default, use.default_text) for use in same}) > 1:
            yield name, "default"


def test_one_name_has_one_meaning_default_and_help():
    assert list(disagreements(options())) == []


def test_a_disagreement_is_seen():
    one, two = Use("sweep", "a", None, "1", None), Use("find", "b", None, "2", int)
    assert list(disagreements({"--new": [one, two]})) == [("--new", "help"), ("--new", "type"), ("--new", "default")]
    assert list(disagreements({"--new": [one, one]})) == []


def test_every_exception_is_needed():
    found = options()
    for name, command in OTHER_MEANING:
        assert command in {use.command for use in found[name]}, (name, command)
    for name in OTHER_DEFAULT:
        same = [use for use in found[name] if (name, use.command) not in OTHER_MEANING]
        assert len({(use.default, use.default_text) for use in same}) > 1, name


def test_shared_options_are_used_by_several_commands():
    assert {name for name in SHARED_OPTIONS if len(options()[name]) < 2} == set()


def test_help_loads_few_modules_and_no_entry_points():
    """Run the help of all commands in one process. Unload the modules of a command before the next command."""
    ran = subprocess.run([sys.executable, "-c", _COUNT_MODULES, *MODULES], capture_output=True, text=True, check=True)
    lines = [line.split(",") for line in ran.stdout.splitlines()]
    assert [line[0] for line in lines] == list(MODULES)
    for name, count, has_help, *others in lines:
        assert int(count) <= MOST_MODULES, name
        # --operation loads an operation by its entry point, so it needs importlib.metadata.
        assert (has_help, others) == ("True", ["importlib.metadata"] if "--operation" in name else []), name


def needed_beside_several():
    """Yield each positional argument that a command needs, with each option that might take it as one of its values."""
    for name, parser in parsers().items():
        for positional in (each for each in parser._actions if not each.option_strings):
            alternatives = getattr(positional, "alternatives", ())
            for option in (each for each in parser._actions if each.option_strings and each.nargs in ("?", "+")):
                is_needed = alternatives or positional.nargs in (None, "+")
                if is_needed and option.option_strings[0] not in alternatives:
                    yield pytest.param(parser, positional.dest, option, id=f"{name} {option.option_strings[0]}")


@pytest.mark.parametrize(("parser", "positional", "option"), list(needed_beside_several()))
def test_an_option_with_several_values_leaves_the_word_that_a_command_needs(parser, positional, option):
    value = option.choices[-1] if option.choices else {"shape": "8x8x8"}.get(option.dest, "1")
    typed = [option.option_strings[0], value]
    last, first = parser.parse_args([*typed, "WORD"]), parser.parse_args(["WORD", *typed])
    assert "WORD" in str(getattr(last, positional))
    assert vars(last) == vars(first)


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
def test_who_has_the_last_word(line, positional, option):
    name, *words = line.split()
    read = parser_of(MODULES[name], line.split()).parse_args(words)
    for dest, *values in (positional.split(), option.split()):
        found = getattr(read, dest)
        assert list(map(str, found if isinstance(found, list) else [found] if found else [])) == values


def test_formats_are_those_that_can_be_rendered():
    assert tuple(formats.FORMATTERS) == REPORT_FORMATS
