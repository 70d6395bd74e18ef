"""Test the structure of the code: which modules may import which, and whether the packaging metadata is complete."""

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
#: The packages (layers) and their content, from the lowest to the highest. A package may import only from itself and
#: from the packages that are listed before it.
LAYERS = {
    "mamf/*.py": "interfaces of backends, kernels and operations; plans, rows, statistics: data and pure code",
    "machine": "what a log says about machine and software, without private data; checks of the machine",
    "plugins": "finds third-party code by entry point, and checks the values that it returns",
    "operations": "for each operation: shapes, FLOP and bytes, kernels, columns of the report",
    "ceilings": "ceilings and roofs, and rates as a share of them",
    "logs": "run logs: schema, reader, writer, comparison; logs of mamf-finder; the cache of ceilings",
    "engine": "measures: regimes, verification, runner; strategies and searches choose the next step",
    "report": "documents and their formats; charts",
    "kinds": "kinds of runs (`sweep`, `find`, `verify`, ...): strategy, report and chart of each; the driver of all",
    "contribution": "results/: its rules, its tables, and which ceilings are known for a device",
    "profiling": "runs a script under torch's profiler; reads traces; reads hardware counters of kernels",
    "node": "runs on all devices of a machine, and the verdict on each",
    "pages": "HTML pages: reports of logs, and the site of results/",
    "integrations": "for training loops: the meter, FLOP of models, transformers, lightning",
    "api": "the functions of `import mamf`",
    "cli": "one file per command: its options and what it does",
    "testing": "simulated devices and contract tests, for third parties too",
}
ORDER = list(LAYERS)
GROUND = ORDER[0]
MAY_IMPORT_TORCH = {"torch_backend.py"}
#: The modules in mamf/operations that declare operations. Reading a log imports them, so they must not import torch.
#: The second line lists the operations without a folder, such as ``batched`` (its kernels are in ``batched_kernels``).
DECLARATIONS = ("__init__", "operation", "shapes", "unknown")
DECLARATIONS += ("batched", "collective", "copies", "grouped", "overlap")
#: The folder of modules that may import the library that they integrate: torch, transformers or lightning.
INTEGRATIONS = "integrations/"
#: The modules in mamf/operations with code that several kernels share. They may import torch.
SHARED_BY_KERNELS = tuple(
    f"operations/{name}.py"
    for name in ("compilation", "freivalds", "isolated", "matmul_operands", "operand_sets", "quantization")
)
#: The modules that run steps of a script, or launches, under torch's profiler.
PROFILER = ("profiling/running.py", "profiling/watches.py")
#: The module that connects ranks through torch.distributed.
GROUP = ("node/group.py",)
PURE = ("operations/matmul/shapes.py", "statistics.py", "dtypes.py", "errors.py", "text.py")


@functools.cache
def nodes(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(path):
    """Yield the modules that a file imports. For ``from package import name``, yield ``package.name`` if it is a module
    of mamf, and ``package`` if not.
    """
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if is_module(name) else node.module or "" for name in full}


@functools.cache
def is_module(name):
    """Return whether a dotted name is the name of a module of mamf that is not a package."""
    return name.startswith("mamf.") and (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def strings(path):
    """Return the modules of mamf that a file names in string constants."""
    texts = (node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return [text for text in texts if is_module(text)]


def module_of(path):
    """Return the dotted name of a file below mamf/, such as ``ceilings.roof`` for mamf/ceilings/roof.py. An __init__.py
    gets the name of its package.
    """
    parts = path.relative_to(ROOT / "mamf").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def package_of(module):
    """Return the layer of a module. ``module``: its dotted name, with or without ``mamf.`` in front."""
    first = module.removeprefix("mamf.").partition(".")[0]
    return first if first in LAYERS else GROUND


def is_adapter(path):
    """Return whether a file defines kernels. Such a file may import torch, but other modules must not import it: mamf
    loads kernels only through entry points.
    """
    inside = path.relative_to(ROOT / "mamf").as_posix()
    return inside.startswith("operations/") and path.stem not in DECLARATIONS and inside not in SHARED_BY_KERNELS


def offenders(what_is_wrong, paths=CORE):
    """Return the violations that ``what_is_wrong`` finds in each file, by file. Leave out files without violations."""
    found = {path.relative_to(ROOT).as_posix(): list(what_is_wrong(path)) for path in paths}
    return {path: wrong for path, wrong in found.items() if wrong}


def may_import_torch(path):
    inside = path.relative_to(ROOT / "mamf").as_posix()
    is_shared = inside in (*PROFILER, *GROUP, *SHARED_BY_KERNELS)
    return path.name in MAY_IMPORT_TORCH or is_adapter(path) or is_shared or inside.startswith(INTEGRATIONS)


def test_torch_is_imported_by_adapters_alone():
    outside = [path for path in CORE if not may_import_torch(path)]
    assert offenders(lambda path: [name for name in imports(path) if name.split(".")[0] == "torch"], outside) == {}


def points_up(own, other):
    return ORDER.index(package_of(other)) > ORDER.index(package_of(own))


def test_packages_import_from_the_layers_below_them():
    facade = {ROOT / "mamf" / name for name in ("__init__.py", "__main__.py")}

    def upwards(path):
        used = [name for name in (*imports(path), *strings(path)) if name.startswith("mamf.")]
        return sorted({name for name in used if points_up(module_of(path), name)})

    assert offenders(upwards, [path for path in CORE if path not in facade]) == {}


def test_an_import_that_points_up_is_seen():
    assert points_up("logs.records", "mamf.engine.measure")
    assert points_up("plans", "mamf.ceilings.ceiling")
    assert not points_up("engine.measure", "mamf.logs.records")
    assert not points_up("logs.records", "mamf.operations.unknown")


def test_no_file_is_part_of_an_import_cycle():
    modules = {f"mamf.{module_of(path)}": path for path in CORE if path.name != "__main__.py"}
    left = {
        name: {each for each in imports(path) if each in modules and each != name} for name, path in modules.items()
    }
    while removable := [name for name, used in left.items() if not used & left.keys()]:
        for name in removable:
            del left[name]
    assert not left


def test_every_folder_is_a_layer_and_every_layer_has_files():
    folders = {path.relative_to(ROOT / "mamf").parts[0] for path in CORE if path.parent != ROOT / "mamf"}
    assert folders == set(ORDER[1:])


def diagram():
    """Return the list of layers as docs/architecture.md shows it, with the highest layer first."""
    width = max(map(len, ORDER))
    return "".join(f"{name:<{width}}  {LAYERS[name]}\n" for name in reversed(ORDER))


def test_the_page_shows_these_layers():
    assert diagram() in (ROOT / "docs" / "architecture.md").read_text()


def test_no_one_imports_an_adapter_by_name():
    def adapters(path):
        yield from (name for name in imports(path) if name.split(".")[0] in ("mamf_backends", "backends"))
        if not is_adapter(path):
            ours = {f"mamf.{module_of(each)}" for each in CORE if is_adapter(each)}
            yield from (name for name in imports(path) if name in ours)

    assert offenders(adapters) == {}


def test_what_a_device_can_is_asked_of_it_and_not_of_its_name():
    def names_compared(path):
        compared = [each for each in nodes(path) if isinstance(each, ast.Compare)]
        sides = [side for each in compared for side in (each.left, *each.comparators)]
        named = (ast.unparse(side) for side in sides if isinstance(side, ast.Attribute))
        return [name for name in named if name.endswith("backend.name")]

    assert offenders(names_compared, [path for path in CORE if "testing" not in path.parts]) == {}


#: Modules that measure. Reading, checking, comparing and drawing logs must not import them.
ENGINE = ("mamf.engine.measure", "mamf.engine.regimes.base", "mamf.engine.search.strategy", "torch")


READERS = (
    "mamf.logs.run_log",
    "mamf.logs.compare",
    "mamf.kinds.notebook",
    "mamf.api.reading",
    "mamf.profiling.log",
    "mamf.profiling.counters.report",
    "mamf.node.report",
    "mamf.node.verdict",
)


def test_logs_are_read_without_the_engine():
    """Check all readers in one process. This is enough, because imported modules stay in ``sys.modules``."""
    code = (
        "import importlib, sys\n"
        f"for reader in {READERS!r}:\n"
        "    importlib.import_module(reader)\n"
        f"    print(reader, [name for name in {ENGINE!r} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{reader} []" for reader in READERS]


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_clock_and_no_device(name):
    assert not {"time", "os", "torch", "numpy"} & set(imports(ROOT / "mamf" / name))


#: The only module that may print. It escapes control characters in texts from plugins and logs.
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
    assert {path: count for path, count in lines.items() if count > 500} == {}


def test_every_package_is_found():
    """Check that each folder with modules has an __init__.py, because setup.py leaves out folders without this file."""
    with_modules = {path.parent for path in CORE}
    assert not [folder for folder in with_modules if not (folder / "__init__.py").exists()]


def test_pyproject_files_and_discovered_names_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    files = {path.stem for path in (ROOT / "backends").glob("[a-z]*.py")}
    assert set(declared["mamf.backends"]) == files
    for group, points in declared.items():
        found = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "mamf"}
        assert found == points, "the installed metadata is out of date: run 'pip install -e .' again"
