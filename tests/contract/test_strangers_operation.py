"""Test every command with an operation of a third party, which consists of one module and two entry points."""

import ast
import json
import re
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from types import FunctionType

import pytest

from mamf.backend import Backend, ClockStamps, SecondQueue
from mamf.contribution.review import review_log
from mamf.kernel import Kernel
from mamf.logs.run_log import read_run_log
from mamf.operation import Operation
from mamf.operations import unknown
from mamf.plugins import discovery

STRANGER = Path(__file__).parent / "stranger"
MODULE = "mamf_layer_norm"
ROOT = STRANGER.parents[2]
SWEEP = ["sweep", "--operation", "layer_norm", "--backend", "cpu", "--time-limit", "0.02s", "--precision", "20%"]
SHAPES = ["--shapes", "16x64", "32x256"]


@pytest.fixture
def installed(site):
    """Install the package (its module and entry points), and provide the MonkeyPatch that can undo it."""
    (site / f"{MODULE}.py").write_text((STRANGER / f"{MODULE}.py").read_text())
    unknown._get_installed_operation.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(site)
        yield patch
    sys.modules.pop(MODULE, None)
    unknown._get_installed_operation.cache_clear()


@pytest.fixture
def uninstall(installed):
    """Return a function that uninstalls the package, as for users who receive its logs but do not have it."""

    def remove_package():
        installed.undo()
        sys.modules.pop(MODULE, None)
        unknown._get_installed_operation.cache_clear()

    return remove_package


@pytest.fixture(scope="module")
def log_and_output():
    """Return a list for a log and the output of its run. The first test that needs the log fills the list."""
    return []


@pytest.fixture
def log(installed, run, tmp_path, log_and_output):
    path = tmp_path / "run.jsonl"
    if not log_and_output:
        code, out, err = run(*SWEEP, *SHAPES, "--set", "eps=1e-5,1e-3", "--dtype", "fp32", "--output", "run.jsonl")
        assert code == 0, err
        log_and_output += path.read_bytes(), out
    path.write_bytes(log_and_output[0])
    return path, log_and_output[1]


def test_it_is_discovered_and_listed(installed, run):
    assert discovery.make_operation("layer_norm").name == "layer_norm"
    code, out, _ = run("kernels", "--backend", "cpu")
    assert code == 0
    assert "\nlayer_norm:\nkernel  on this device\ntorch   available\n" in out
    assert out.index("\nmatmul:") < out.index("\nattention:") < out.index("\nlayer_norm:")
    _, out, _ = run("kernels", "--backend", "cpu", "--operation", "layer_norm")
    assert "torch.mm" not in out
    assert "torch   available" in out


def test_it_is_measured_and_its_table_says_what_its_rate_counts(log):
    path, out = log
    assert "counted: X read, Y written, once each" in out
    assert "burst, float32, eps 1e-05" in out
    assert "burst, float32, eps 0.001" in out
    assert "32x256" in out
    rows = read_run_log(path).measurements
    assert [row.ok for row in rows] == [True] * 4
    assert {str(row.shape) for row in rows} == {"16x64", "32x256"}
    summary = json.loads(path.read_text().splitlines()[-1])
    assert summary["status"] == "complete"
    assert (summary["measured"], summary["left"]) == (4, 0)
    assert {best["unit"] for best in summary["best"].values()} == {"TB/s"}


def test_an_operation_without_kernels_says_where_to_add_one(installed, run, monkeypatch):
    find_entry_points = discovery.find_entry_points
    monkeypatch.setattr(
        discovery,
        "find_entry_points",
        lambda group: [] if group == "mamf_layer_norm.kernels" else find_entry_points(group=group),
    )
    code, out, err = run(*SWEEP)
    assert (code, out) == (2, "")
    message = (
        "no installed package has a kernel for layer_norm: add one to the entry point group mamf_layer_norm.kernels"
    )
    assert err == f"mamf: {message}\n"


def test_it_is_compared_with_itself(log, run):
    code, out, _ = run("compare", "run.jsonl", "run.jsonl")
    assert code == 0
    assert re.search("rates in [TGMk]B/s;", out)
    assert "4 rows: " in out


def test_it_is_drawn(log, run, tmp_path):
    pytest.importorskip("matplotlib")
    code, out, err = run("plot", "run.jsonl")
    assert (code, out) == (0, "figure: run.png\n"), err
    assert (tmp_path / "run.png").stat().st_size > 1000


def test_a_review_does_not_import_it(log, monkeypatch):
    """Check that a review imports no plugin: anybody can send a log, so a log must not choose which code runs."""
    monkeypatch.setattr(EntryPoint, "load", lambda point: pytest.fail(f"{point.value} is imported"))
    unknown._get_installed_operation.cache_clear()
    (finding,) = review_log(log[0]).findings
    assert (finding.rule, finding.is_warning) == ("unknown-operation", False)
    assert "layer_norm" in finding.message


def test_its_log_is_shown_and_compared_but_not_resumed_without_the_package(log, uninstall, run):
    uninstall()
    for format in ("table", "csv", "json", "markdown"):
        code, out, err = run("show", "run.jsonl", "--format", format)
        assert (code, err) == (0, ""), err
        assert "rows=32 width=256" in out
    assert run("compare", "run.jsonl", "run.jsonl")[0] == 0
    code, _, err = run(*SWEEP[:5], "--resume", "run.jsonl")
    assert code == 2
    assert "unknown operation 'layer_norm'" in err


def test_its_log_is_drawn_without_the_package(log, uninstall, run):
    pytest.importorskip("matplotlib")
    uninstall()
    assert run("plot", "run.jsonl")[0] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--shapes", "12"], "'12' is not a shape; write ROWSxWIDTH"),
        (["--set", "epz=1"], "unknown field of layer_norm 'epz' (did you mean 'eps'?)"),
        (["--set", "eps=small"], "field eps of layer_norm: 'small' is not a number"),
        (["--set", "eps"], "--set eps: eps has no value; write eps=VALUE"),
        (["--kernel", "tritonn"], "unknown layer_norm kernel 'tritonn'"),
        (["--dtype", "fp33"], "unknown dtype 'fp33'"),
        (["--m", "12"], "--m is an option of batched, matmul, overlap, not of layer_norm"),
    ],
)
def test_a_wrong_option_is_explained_in_one_line(installed, run, options, message):
    code, out, err = run(*SWEEP, *options)
    assert (code, out) == (2, "")
    assert len(err.strip().splitlines()) == 1
    assert message in err


def list_methods_by_class():
    """Return the names of the methods that each class in the module defines, by the name of the class."""
    tree = ast.parse((STRANGER / f"{MODULE}.py").read_text())
    return {
        node.name: [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def test_the_package_defines_only_four_classes_and_nine_methods():
    assert list_methods_by_class() == {
        "Rows": ["parse", "__str__"],
        "LayerNormProblem": ["compute_work", "list_buffers", "count_bytes"],
        "TorchLayerNorm": ["explain_unsupported_problem", "make_operand_set"],
        "LayerNorm": ["choose_default_shapes", "find_axis_position"],
    }
    assert len((STRANGER / f"{MODULE}.py").read_text().splitlines()) <= 120


def yield_code_blocks():
    """Yield the file name and the code of each block in docs/extending.md. Its first line contains the file name."""
    for block in (ROOT / "docs" / "extending.md").read_text().split("```python\n")[1:]:
        name, _, code = block.partition("```")[0].partition("\n")
        yield name.removeprefix("# "), code.rstrip("\n")


@pytest.mark.parametrize(("name", "code"), list(yield_code_blocks()), ids=lambda text: text.splitlines()[0][-40:])
def test_code_in_the_docs_is_in_the_file_that_it_names(name, code):
    text = (ROOT / name).read_text()
    assert [part for part in code.split("\n\n") if part.strip("\n") not in text] == []


@pytest.mark.parametrize("contract", [Backend, SecondQueue, ClockStamps, Kernel, Operation])
def test_the_reference_describes_each_method_of_a_contract(contract):
    members = {name: member for name, member in vars(contract).items() if not name.startswith("_")}
    methods = {name: member for name, member in members.items() if is_method(member)}
    assert [name for name, method in methods.items() if not method.__doc__] == []


def is_method(member):
    return isinstance(member, (FunctionType, classmethod, property))


def test_no_file_of_mamf_mentions_it():
    assert not [path for path in (ROOT / "mamf").rglob("*.py") if "layer_norm" in path.read_text()]
