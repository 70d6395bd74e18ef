"""The house as drawn: who may import whom, and what packaging promises."""

import ast
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).resolve().parents[2]
CORE = sorted(path for path in (ROOT / "mamf").rglob("*.py"))
MAY_IMPORT_TORCH = {"torch_backend.py"}
PURE = ("shapes.py", "statistics.py", "dtypes.py", "errors.py")
# A room and the rooms it may use beside shapes, errors, dtypes, statistics and the two contracts.
ARROWS = {
    "regimes": {"checking"},
    "measure": {"checking", "regimes"},
    "peaks": set(),
    "sweeping": {"measure", "regimes", "peaks"},
    "checking": set(),
    "estimate": {"checking", "sweeping", "regimes"},
    "surrogate": set(),
    "search": {"surrogate"},
    "ceiling": {"measure"},
    "candidates": {"ceiling", "measure"},
    "finding_plan": {"estimate", "regimes"},
    "find_strategy": {"candidates", "ceiling", "finding_plan", "measure", "regimes", "search"},
    "finding": {"ceiling", "find_strategy", "finding_plan", "measure", "peaks", "regimes"},
    "attention_sweep": {"ceiling", "finding_plan", "measure", "peaks", "regimes"},
    "environment": set(),
    "records": {"attention_sweep", "ceiling", "finding_plan", "measure", "sweeping"},
    "run_log": {"attention_sweep", "ceiling", "environment", "finding_plan", "measure", "records", "sweeping"},
    "legacy": {"environment", "run_log"},
    "finder_logs": {"environment", "legacy"},
    "contribution": {
        *("attention_sweep", "ceiling", "environment", "finding_plan", "legacy", "measure", "peaks", "records"),
        *("regimes", "report", "run_log"),
    },
    "comparability": {"attention_sweep", "records"},
    "compare": {"ceiling", "comparability", "finding_plan", "measure", "run_log"},
    "report": {"attention_sweep", "ceiling", "comparability", "compare", "legacy", "measure", "peaks"},
    "charts": {"ceiling", "measure"},
    "attention_charts": {"attention_sweep", "charts", "measure"},
    "plotting": {"charts"},
    "discovery": set(),
    "doctor": set(),
    "api": {"ceiling", "discovery", "finding", "finding_plan", "measure", "run_log", "sweeping"},
    "torch_backend": set(),
}
EVERYONE = {"attention", "attention_kernel", "shapes", "errors", "dtypes", "statistics", "backend", "kernel"}


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_torch_stays_in_its_rooms(path):
    if path.name in MAY_IMPORT_TORCH or path.parent.name == "kernels":
        return
    assert not [name for name in imports(path) if name.split(".")[0] == "torch"]


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_one_imports_an_adapter_by_name(path):
    assert not [name for name in imports(path) if name.split(".")[0] in ("mamf_backends", "backends")]
    if path.parent.name != "kernels":
        assert not [name for name in imports(path) if name.startswith("mamf.kernels")]


@pytest.mark.parametrize("room", ARROWS)
def test_arrows_go_one_way(room):
    files = [ROOT / "mamf" / f"{room}.py", *(ROOT / "mamf" / room).glob("*.py")]
    used = {name.split(".")[1] for path in files if path.exists() for name in imports(path) if name.startswith("mamf.")}
    assert any(path.exists() for path in files)
    assert used <= EVERYONE | ARROWS[room] | {room}


@pytest.mark.parametrize("name", PURE)
def test_pure_rooms_know_no_clock_and_no_device(name):
    assert not {"time", "os", "torch", "numpy"} & set(imports(ROOT / "mamf" / name))


@pytest.mark.parametrize("path", CORE, ids=lambda path: str(path.relative_to(ROOT)))
def test_only_the_command_line_prints(path):
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    printed = [call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert path.parent.name == "cli" or not printed


@pytest.mark.parametrize("path", [path for path in CORE if path.parent.name == "cli"], ids=lambda path: path.name)
def test_no_assertion_judges_what_a_user_gives(path):
    assert not [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assert)]


@pytest.mark.parametrize(
    "path", [*CORE, *(ROOT / "backends").glob("*.py")], ids=lambda path: str(path.relative_to(ROOT))
)
def test_files_stay_readable(path):
    assert len(path.read_text().splitlines()) <= 320


def test_every_package_is_installed():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "mamf").rglob("__init__.py")}
    assert {*declared} == folders | {"mamf_backends"}


def test_pyproject_files_and_discovered_names_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    files = {path.stem for path in (ROOT / "backends").glob("[a-z]*.py")}
    assert set(declared["mamf.backends"]) == files
    for group, points in declared.items():
        found = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "mamf"}
        assert found == points, "stale installation: run 'pip install -e .' again"
