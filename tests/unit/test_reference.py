"""The reference page: it says what the docstrings say, and what they say runs."""

import doctest
import inspect
import re
import sys
from pathlib import Path

import pytest
import reference

import mamf
import mamf.testing

README = Path(__file__).resolve().parents[2] / "README.md"
NAMES = [name for group in reference.GROUPS for name in group.names]
CALLS = [name for name in mamf.__all__ if inspect.isfunction(getattr(mamf, name)) and name != "open_backend"]


def examples_of(name):
    what = reference.exported(name)
    found = doctest.DocTestFinder().find(what, name, sys.modules[what.__module__], globs={"mamf": mamf})
    return [each for each in found if each.examples]


def test_the_page_is_what_the_docstrings_say():
    assert reference.main(["--check"]) == 0, "run 'python tools/reference.py'"


def test_a_stale_page_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(reference, "PAGE", tmp_path / "reference.md")
    assert reference.main([]) == 0
    reference.PAGE.write_text(reference.PAGE.read_text() + "more\n")
    assert reference.main(["--check"]) == 1
    assert "run 'python tools/reference.py'" in capsys.readouterr().err


def test_every_name_stands_on_the_page_once():
    testing = [f"testing.{name}" for name in mamf.testing.__all__]
    assert sorted(NAMES) == sorted([*mamf.__all__, *testing])


def test_every_name_says_what_it_is():
    assert [name for name in NAMES if not reference.docstring(reference.exported(name))] == []


def test_every_call_has_an_example():
    assert [name for name in CALLS if not examples_of(name)] == []


@pytest.mark.parametrize("name", [name for name in NAMES if examples_of(name)])
def test_examples_run(name, machine):
    if name == "plot":
        pytest.importorskip("matplotlib")
    for example in examples_of(name):
        told = []
        result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=told.append)
        assert result.failed == 0, "".join(told)


def test_the_readmes_example_runs(machine, monkeypatch, capsys):
    monkeypatch.setattr("mamf.api.reading.draw", lambda chart: None)  # plot's own example draws
    monkeypatch.setattr("mamf.api.reading.save", lambda figure, path, overwrite: None)
    section = README.read_text().partition("## From Python")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    assert "TFLOPS" in capsys.readouterr().out
