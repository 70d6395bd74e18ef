"""Test the documentation: its links, the API reference, examples, commands, and the JSON Schema of run logs."""

import doctest
import importlib
import inspect
import json
import re
import shlex
import sys
from pathlib import Path

import pytest

import mamf
import mamf.testing
from mamf.cli import _build_parser as command_parser
from mamf.cli.parser import normalize_option_names

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NAMES = sorted([*mamf.__all__, *(f"testing.{name}" for name in mamf.testing.__all__)])
FUNCTIONS = [name for name in mamf.__all__ if inspect.isfunction(getattr(mamf, name)) and name != "open_backend"]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(path for path in DOCS.rglob("*.md"))]
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:)([^)\s]+)\)|^\[[^\]]+\]: (?!\w+:)(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#+ (.*)", re.MULTILINE)


def get_exported(name):
    """Return the object ``mamf.NAME``. NAME may begin with ``testing.``."""
    module, _, attribute = name.rpartition(".")
    return getattr(importlib.import_module(f"mamf.{module}" if module else "mamf"), attribute)


def get_docstring(documented):
    """Return the docstring of a function or class. Return "" if a class inherits it or a dataclass generated it."""
    text = (vars(documented).get("__doc__") if inspect.isclass(documented) else inspect.getdoc(documented)) or ""
    return "" if text.startswith(f"{documented.__name__}(") else text


def find_examples(name):
    documented = get_exported(name)
    doctests = doctest.DocTestFinder().find(documented, name, sys.modules[documented.__module__], globs={"mamf": mamf})
    return [test for test in doctests if test.examples]


# -- the reference of the API ------------------------------------------------------------------------------------------


def test_the_reference_lists_every_name_once():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    listed = re.findall(r"^\.\. auto(?:function|class|exception):: mamf\.(\S+)$", text, re.MULTILINE)
    assert sorted(name for name in listed if name in NAMES) == NAMES
    assert len(listed) == len(set(listed))


def test_every_name_has_a_docstring():
    assert [name for name in NAMES if not get_docstring(get_exported(name))] == []


def test_every_function_has_an_example():
    assert [name for name in FUNCTIONS if not find_examples(name)] == []


@pytest.mark.parametrize("name", [name for name in NAMES if find_examples(name)])
def test_examples_run(name, machine):
    if name == "plot":
        pytest.importorskip("matplotlib")
    for example in find_examples(name):
        report = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.append)
        assert result.failed == 0, "".join(report)


def test_the_readmes_example_runs(machine, monkeypatch, capsys):
    # Draw nothing here: the example in the docstring of ``plot`` draws.
    monkeypatch.setattr("mamf.api.reading.draw_figure", lambda chart: None)
    monkeypatch.setattr("mamf.api.reading.save_figure", lambda figure, path, overwrite: None)
    section = (ROOT / "README.md").read_text().partition("## From Python")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "TFLOPS" in capsys.readouterr().out


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("command", "options"), [("find", "--quick --set"), ("results", "--dry-run --results")])
def test_the_page_of_a_command_has_the_options_of_each_operation_and_action(command, options):
    pytest.importorskip("sphinx")
    lines = importlib.import_module("command_pages").page(command).splitlines()
    for option in options.split():
        assert any(line.startswith(f".. option:: {option}") for line in lines)
    assert not any("SUPPRESS" in line for line in lines)


def find_commands(page):
    """Yield the words of each mamf command in the bash blocks of a page.

    Comments, redirections and words in square brackets are left out.
    """
    for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if match := re.match(r"(?:.* )?(?:-m )?(mamf [a-z].*?)(?: \|.*| 2?> .*)?(?:  +#.*)?$", line.strip()):
                yield [word for word in shlex.split(match[1], comments=True)[1:] if word.strip("[]") == word]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_mamf_accepts_the_options_of_each_command_of_a_page(page, capsys):
    for words in find_commands(page):
        if "layer_norm" in words:  # an operation that only a third-party package has
            continue
        try:
            command_parser(words).parse_args(normalize_option_names(words))
        except SystemExit as stop:
            assert not stop.code, f"mamf {' '.join(words)}: {capsys.readouterr().err}"


# -- links -------------------------------------------------------------------------------------------------------------


def make_anchor(heading):
    """Return the anchor that GitHub gives a heading."""
    plain = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return plain.replace(" ", "-")


def find_broken_links(page, text):
    """Yield the relative links of a page whose file or heading does not exist."""
    for groups in LINK.findall(CODE.sub("", text)):
        target, _, heading = "".join(groups).partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists() or (heading and heading not in map(make_anchor, HEADING.findall(path.read_text()))):
            yield "".join(groups)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_and_files_work(page):
    assert list(find_broken_links(page, page.read_text())) == []


# -- JSON Schema -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def validator():
    pytest.importorskip("sphinx")
    pytest.importorskip("tomllib")
    jsonschema = pytest.importorskip("jsonschema")
    schema = importlib.import_module("log_schema").json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(
    "kind", ["sweep-torch", "find", "attention", "bandwidth-roofline", "matmul-explain", "model", "mamf-finder"]
)
def test_lines_of_logs_match_the_json_schema(validator, kind):
    lines = sorted((ROOT / "results").glob(f"*/{kind}-*.jsonl"))[-1].read_text().splitlines()
    for line in (*lines[:5], *lines[-5:]):
        assert [error.message[:200] for error in validator.iter_errors(json.loads(line))] == []


@pytest.mark.parametrize(
    "change",
    [
        {"samples_seconds": ["1"]},
        {"launches": 1.5},
        {"kernel": None},
        {"record": "other"},
        {"samples_seconds": [0.0]},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_wrong_line_does_not_match_the_json_schema(validator, change):
    log = sorted((ROOT / "results").glob("*/sweep-torch-*.jsonl"))[-1]
    row = json.loads(log.read_text().splitlines()[1])
    assert validator.is_valid(row)
    assert not validator.is_valid({**row, **change})
