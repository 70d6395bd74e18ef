"""The house as drawn: who may import whom, and what packaging promises."""

import ast
import functools
import subprocess
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
#: Rooms of adapters: reached through discovery alone, and free to import torch.
ROOMS = ("matmul", "attention", "bandwidth", "batched", "collective", "copies", "grouped", "model")
ADAPTERS = tuple(f"operations/{room}/kernels" for room in ROOMS)
#: What imports a library of its own: torch's counter, transformers, lightning.
INTEGRATIONS = "integrations/"
SHARED_BY_ADAPTERS = (
    "operations/outputs.py",
    "operations/compilation.py",
    "operations/operand_sets.py",
    "operations/products.py",
    "operations/quantization.py",
    "operations/scaled_products.py",
    "operations/variation.py",
    "operations/whole_products.py",
)
#: Runs a script's steps under torch's profiler.
PROFILER = ("profiling/running.py", "profiling/memory.py", "profiling/ranges.py")
#: Where ranks meet, by torch.distributed.
GROUP = ("node/group.py",)
PURE = ("operations/matmul/shapes.py", "statistics.py", "dtypes.py", "errors.py", "limits.py", "work.py", "text.py")
#: Floors from the ground up. A module uses what lies on the floors below its own, and its own room; one that stands on
#: no floor fails.
FLOORS = (
    ("choices", "errors", "statistics", "tabular", "work", "text"),
    ("limits",),
    ("dtypes", "files", "regimes.names", "regimes.calibration", "regimes.traits", "operations.matmul.shapes"),
    ("backend",),
    ("kernel", "machine"),
    ("operations.matmul.kernel", "operations.attention.shapes", "operations.bandwidth.shapes"),
    (
        "operations.attention.kernel",
        "operations.bandwidth.kernel",
        "operations.batched.shapes",
        "operations.collective.shapes",
        "operations.copies.shapes",
        "operations.grouped.shapes",
        "operations.matmul.presets",
        "operations.model.shapes",
        "plans",
    ),
    (
        "operations.batched.kernel",
        "operations.collective.kernel",
        "operations.copies.kernel",
        "operations.grouped.kernel",
        "operations.grouped.presets",
        "operations.model.kernel",
        "measurement",
    ),
    ("operation", "plausibility"),
    ("plugins",),
    (
        "operations.unknown",
        "operations.matmul.operation",
        "operations.attention.operation",
        "operations.bandwidth.operation",
        "operations.collective.operation",
        "operations.copies.operation",
        "operations.model.operation",
    ),
    ("operations.batched.operation", "operations.grouped.operation"),
    ("operations.matmul.selection",),
    ("ceilings.ceiling",),
    ("ceilings.share", "ceilings.known", "ceilings.candidates", "ceilings.roof", "ceilings.explanation"),
    ("operations.attention.rows",),
    ("logs",),
    ("finder_logs",),
    ("report", "charts"),
    ("operations.attention.report", "operations.attention.charts", "operations.model.charts"),
    ("charts.of_log", "report.of_run", "report.notebook"),
    ("contribution",),
    ("models",),
    ("node", "node.places"),
    ("node.figures",),
    ("node.spreads",),
    ("node.comparing",),
    ("node.verdict",),
    ("node.gathering", "node.prometheus"),
    ("node.report", "node.chart", "node.baselines"),
    ("api", "api.reading"),
    ("profiling",),
    ("counters",),
    ("profiling.summary",),
    ("engine", "engine.checking"),
    ("regimes",),
    ("engine.measure",),
    ("engine.runner", "engine.launching", "engine.repeating"),
    ("strategies",),
    ("node.children",),
    ("node.shares", "node.worker"),
    ("node.pool",),
    ("node.sharing",),
    ("engine.estimate",),
    ("ceilings",),
    ("api.measuring",),
    ("integrations",),
    ("node.device", "node.group"),
    ("node.ranks",),
    ("cli",),
)
#: What lies beside the floors: torch's own, adapters, and what is shipped for tests.
BESIDE = (
    "torch_backend",
    "operations.outputs",
    "operations.compilation",
    "operations.operand_sets",
    "operations.triton_driver",
    "operations.products",
    "operations.quantization",
    "operations.scaled_products",
    "operations.variation",
    "operations.whole_products",
    "testing",
    "__init__",
    "__main__",
)


@functools.cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path):
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


def module_of(path):
    """``ceilings.share`` of mamf/ceilings/share.py; a package's own file has the package's name."""
    parts = path.relative_to(ROOT / "mamf").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def is_adapter(path):
    return path.relative_to(ROOT / "mamf").as_posix().startswith(ADAPTERS)


def place_of(module, floors):
    """The floor and the name there that a module lives on: the longest that is its own or its room's, or None."""
    found = [
        (name, floor)
        for floor, names in enumerate(floors)
        for name in names
        if module == name or module.startswith(f"{name}.")
    ]
    return max(found, key=lambda each: len(each[0]), default=None)


def may_use(own, other, floors):
    """Whether a module may import another: below it, or in its own room."""
    (own_name, own_floor), (other_name, other_floor) = place_of(own, floors), place_of(other, floors)
    return other_floor < own_floor or own_name == other_name


CORE_MODULES = [
    path
    for path in CORE
    if not is_adapter(path)
    and path.stem not in ("__main__",)
    and not any(module_of(path) == name or module_of(path).startswith(f"{name}.") for name in BESIDE)
    and module_of(path) not in ("operations", *(f"operations.{room}" for room in ROOMS))
]


def offenders(what_is_wrong, paths=CORE):
    """By file, what is wrong with those that break a rule."""
    found = {path.relative_to(ROOT).as_posix(): list(what_is_wrong(path)) for path in paths}
    return {path: wrong for path, wrong in found.items() if wrong}


def may_import_torch(path):
    inside = path.relative_to(ROOT / "mamf").as_posix()
    shared = (*SHARED_BY_ADAPTERS, *PROFILER, *GROUP)
    return path.name in MAY_IMPORT_TORCH or is_adapter(path) or inside in shared or inside.startswith(INTEGRATIONS)


def test_torch_stays_in_its_rooms():
    outside = [path for path in CORE if not may_import_torch(path)]
    assert offenders(lambda path: [name for name in imports(path) if name.split(".")[0] == "torch"], outside) == {}


def test_no_one_imports_an_adapter_by_name():
    def adapters(path):
        yield from (name for name in imports(path) if name.split(".")[0] in ("mamf_backends", "backends"))
        if not is_adapter(path):
            yield from (name for name in imports(path) if name.startswith("mamf.operations.") and ".kernels" in name)

    assert offenders(adapters) == {}


def test_what_a_device_can_is_asked_of_it_and_not_of_its_name():
    def names_compared(path):
        compared = [each for each in nodes(path) if isinstance(each, ast.Compare)]
        sides = [side for each in compared for side in (each.left, *each.comparators)]
        named = (ast.unparse(side) for side in sides if isinstance(side, ast.Attribute))
        return [name for name in named if name.endswith("backend.name")]

    assert offenders(names_compared, [path for path in CORE if "testing" not in path.parts]) == {}


def test_arrows_point_down():
    def upwards(path):
        own = module_of(path)
        if not place_of(own, FLOORS):
            return [f"{own} stands on no floor: give it one"]
        used = [name.removeprefix("mamf.") for name in imports(path) if name.startswith("mamf.")]
        return [name for name in used if place_of(name, FLOORS) and not may_use(own, name, FLOORS)]

    assert offenders(upwards, CORE_MODULES) == {}


def test_an_arrow_that_points_up_is_seen():
    assert not may_use("logs.records", "engine.measure", FLOORS)
    assert not may_use("plans", "regimes.base", FLOORS)
    assert may_use("logs.records", "logs.known", FLOORS)
    assert place_of("nowhere", FLOORS) is None


def test_every_floor_has_somebody():
    modules = {module_of(path) for path in CORE}
    for names in FLOORS:
        for name in names:
            assert any(each == name or each.startswith(f"{name}.") for each in modules), name


#: What reading, checking, comparing and drawing logs must do without: all that measures.
ENGINE = ("mamf.engine", "mamf.engine.regimes.base", "mamf.engine.search.finding", "torch")


READERS = (
    "mamf.logs.run_log",
    "mamf.logs.compare",
    "mamf.kinds.notebook",
    "mamf.api.reading",
    "mamf.profiling.log",
    "mamf.profiling.counters.report",
    "mamf.node.report",
)


def test_logs_are_read_without_the_engine():
    """What one of them imports stays imported: one process shows it of all."""
    code = (
        "import importlib, sys\n"
        f"for reader in {READERS!r}:\n"
        "    importlib.import_module(reader)\n"
        f"    print(reader, [name for name in {ENGINE!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{reader} []" for reader in READERS]


@pytest.mark.parametrize("name", PURE)
def test_pure_rooms_know_no_clock_and_no_device(name):
    assert not {"time", "os", "torch", "numpy"} & set(imports(ROOT / "mamf" / name))


#: Where foreign text is made harmless.
MAY_PRINT = (ROOT / "mamf" / "cli" / "terminal.py",)


def test_only_the_terminal_prints():
    def printed(path):
        calls = [node for node in nodes(path) if isinstance(node, ast.Call)]
        return [ast.unparse(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]

    assert offenders(printed, [path for path in CORE if path not in MAY_PRINT]) == {}


def test_no_assertion_judges_what_a_user_gives():
    def assertions(path):
        return [ast.unparse(node) for node in nodes(path) if isinstance(node, ast.Assert)]

    assert offenders(assertions, [path for path in CORE if path.parent.name == "cli"]) == {}


def test_files_stay_readable():
    lines = {path: len(path.read_text().splitlines()) for path in (*CORE, *(ROOT / "backends").glob("*.py"))}
    assert {path: count for path, count in lines.items() if count > 320} == {}


def test_every_package_is_found():
    """setup.py finds them: a folder of the core without __init__.py would be left out."""
    with_modules = {path.parent for path in CORE}
    assert not [folder for folder in with_modules if not (folder / "__init__.py").exists()]


def test_pyproject_files_and_discovered_names_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    files = {path.stem for path in (ROOT / "backends").glob("[a-z]*.py")}
    assert set(declared["mamf.backends"]) == files
    for group, points in declared.items():
        found = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "mamf"}
        assert found == points, "stale installation: run 'pip install -e .' again"
