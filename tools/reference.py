"""docs/reference.md from the signatures and docstrings of what mamf exports.

    python tools/reference.py                # write it
    python tools/reference.py --check        # exit code 1 if it is stale

Its examples are run by tests/unit/test_reference.py.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mamf
import mamf.testing

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference.md"
_WIDTH = 100
_HEAD = """# Reference

Everything that `import mamf` offers. `tools/reference.py` writes this page from the docstrings, and every example in
them runs as a test, on a simulated accelerator in virtual time. `...` stands for what changes.
"""


class Group(NamedTuple):
    """``about``: the module whose docstring introduces it."""

    title: str
    names: tuple[str, ...]
    about: str = ""


GROUPS = (
    Group(
        "Measuring",
        ("find", "search", "CeilingSearch", "sweep", "attention", "bandwidth", "measure_kernels", "open_backend"),
        "mamf.api.measuring",
    ),
    Group(
        "Models against the ceiling",
        ("peak", "KnownPeak", "Meter", "StepFigures", "model_flops", "ModelFlops", "count_flops"),
    ),
    Group("What is measured", ("Measurement", "Ceiling")),
    Group(
        "Problems and shapes",
        (
            *("problem_for", "MatmulProblem", "MatmulShape", "MatmulGrid", "matmul_grid", "parse_range", "find_best"),
            *("AttentionProblem", "AttentionShape", "BandwidthProblem", "BandwidthShape"),
            *("ModelProblem", "ModelShape"),
        ),
    ),
    Group(
        "Logs",
        (
            *("read_log", "load_ceiling", "compare", "check", "import_logs", "write_imported"),
            *("RunLog", "Comparison", "Review", "FinderRun", "Plan", "SearchPlan"),
        ),
        "mamf.api.reading",
    ),
    Group("Figures", ("plot",)),
    Group(
        "Contracts",
        ("Backend", "DeviceInfo", "Kernel", "MatmulKernel", "AttentionKernel", "Operation"),
    ),
    Group("Tests of contracts", tuple(f"testing.{name}" for name in mamf.testing.__all__), "mamf.testing"),
    Group(
        "Errors",
        (
            *("MamfError", "UsageError", "UnknownNameError", "LogMismatchError", "IncomparableError"),
            *("UnavailableError", "UnsupportedError", "RunLogError", "DeviceError", "RunLogWriteError"),
        ),
        "mamf.errors",
    ),
)


def exported(name: str) -> Any:
    """What ``mamf.NAME`` is; NAME may begin with ``testing.``."""
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(f"mamf.{room}" if room else "mamf"), last)


def page() -> str:
    lines = [_HEAD, *_contents(), *(line for group in GROUPS for line in _group(group))]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def _contents() -> Iterator[str]:
    for group in GROUPS:
        names = ", ".join(f"[{name}](#{_anchor(name)})" for name in group.names)
        yield f"- {group.title}: {names}"
    yield ""


def _anchor(name: str) -> str:
    return f"mamf{name}".replace(".", "").lower()


def _group(group: Group) -> Iterator[str]:
    yield f"## {group.title}\n"
    if group.about:
        yield as_markdown(inspect.getdoc(importlib.import_module(group.about)) or "")
    for name in group.names:
        yield from _entry(name)


def _entry(name: str) -> Iterator[str]:
    what = exported(name)
    yield f"### mamf.{name}\n"
    if not _is_error(what):
        yield f"```python\n{signature(name.rpartition('.')[2], what)}\n```\n"
    yield as_markdown(docstring(what))
    if inspect.isclass(what) and not _is_error(what):
        members = list(_members(what))
        yield from members
        if members:
            yield ""


def _is_error(what: Any) -> bool:
    return inspect.isclass(what) and issubclass(what, Exception)


def docstring(what: Any) -> str:
    """Its own; none for what a dataclass makes up, or a base class says."""
    own = vars(what).get("__doc__") or "" if inspect.isclass(what) else inspect.getdoc(what) or ""
    docstring = inspect.cleandoc(own)
    return "" if docstring.startswith(f"{what.__name__}(") else docstring


def signature(name: str, what: Any) -> str:
    """A call as it is written, a line a parameter where one line is too long; of a contract the class alone."""
    if inspect.isclass(what) and (inspect.isabstract(what) or what.__init__ is object.__init__):
        return f"class {name}"
    found = inspect.signature(what)
    returned = (
        "" if inspect.isclass(what) or found.return_annotation is found.empty else f" -> {found.return_annotation}"
    )
    called = _unquoted(str(found.replace(return_annotation=found.empty)))
    if len(name + called + returned) <= _WIDTH:
        return name + called + returned
    parameters = found.parameters.values()
    texts = [_unquoted(str(each)) for each in parameters]
    by_name = [number for number, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY]
    if by_name:
        texts.insert(by_name[0], "*")
    return f"{name}(\n" + "".join(f"    {text},\n" for text in texts) + f"){returned}"


def _unquoted(text: str) -> str:
    """Annotations are text, and shown as what they say."""
    return re.sub(r": '([^']*)'", r": \1", text)


def _members(kind: type) -> Iterator[str]:
    """Its own public methods and properties that say what they are, a line each."""
    for name, value in vars(kind).items():
        what = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if inspect.isfunction(what) and what.__doc__ and not name.startswith(("_", "test_")):
            called = "" if isinstance(value, property) else _unquoted(str(_without_self(what)))
            yield f"- `{name}{called}`: {' '.join(as_markdown(inspect.cleandoc(what.__doc__)).split())}"


def _without_self(what: Any) -> inspect.Signature:
    found = inspect.signature(what)
    own = [each for name, each in found.parameters.items() if name not in ("self", "cls")]
    return found.replace(parameters=own, return_annotation=found.empty)


def as_markdown(text: str) -> str:
    """A docstring's paragraphs, lists and examples. What is indented by four stays code."""
    return "".join(f"{_block(block)}\n\n" for block in re.split(r"\n\s*\n", text.strip("\n")) if block)


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return f"```python\n{block}\n```"
    if block.startswith("    "):
        return block
    parts = re.split(r"``(.+?)``", block, flags=re.DOTALL)
    prose = [part.replace("*", "\\*").replace("<", "&lt;") for part in parts[::2]]
    code = [f"`{part}`" for part in parts[1::2]]
    return "".join(text for pair in zip(prose, [*code, ""], strict=True) for text in pair)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args(arguments)
    if not options.check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE.name} is not what the docstrings say: run 'python tools/reference.py'", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
