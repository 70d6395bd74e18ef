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
MAMF_FILES = sorted(path for path in (ROOT / "mamf").rglob("*.py"))
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
LOWEST_LAYER = ORDER[0]
MAY_IMPORT_TORCH = {"torch_backend.py"}
#: The modules in mamf/operations that declare operations. Reading a log imports them, so they must not import torch.
#: The second line lists the operations without a folder, such as ``batched`` (its kernels are in ``batched_kernels``).
DECLARATIONS = ("__init__", "operation", "shapes", "unknown")
DECLARATIONS += ("batched", "collective", "copies", "grouped", "overlap")
#: The folder of modules that may import the library that they integrate: torch, transformers or lightning.
INTEGRATIONS_FOLDER = "integrations/"
#: The modules in mamf/operations with code that several kernels share. They may import torch.
SHARED_BY_KERNELS = tuple(
    f"operations/{name}.py"
    for name in ("compilation", "freivalds", "isolated", "matmul_operands", "operand_sets", "quantization")
)
#: The modules that run steps of a script, or launches, under torch's profiler.
PROFILER_MODULES = ("profiling/running.py", "profiling/watches.py")
#: The module that connects ranks through torch.distributed.
GROUP_MODULES = ("node/group.py",)
PURE_MODULES = ("operations/matmul/shapes.py", "statistics.py", "dtypes.py", "errors.py", "text.py")


@functools.cache
def walk_syntax_tree(path):
    return tuple(ast.walk(ast.parse(path.read_text())))


def yield_imports(path):
    """Yield the modules that a file imports. For ``from package import name``, yield ``package.name`` if it is a module
    of mamf, and ``package`` if not.
    """
    for node in walk_syntax_tree(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            full_names = (f"{node.module}.{alias.name}" for alias in node.names)
            yield from {name if is_module(name) else node.module or "" for name in full_names}


@functools.cache
def is_module(name):
    """Return whether a dotted name is the name of a module of mamf that is not a package."""
    return name.startswith("mamf.") and (ROOT / name.replace(".", "/")).with_suffix(".py").is_file()


def find_module_strings(path):
    """Return the modules of mamf that a file names in string constants."""
    texts = (
        node.value for node in walk_syntax_tree(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return [text for text in texts if is_module(text)]


def get_module_name(path):
    """Return the dotted name of a file below mamf/, such as ``ceilings.roof`` for mamf/ceilings/roof.py. An __init__.py
    gets the name of its package.
    """
    parts = path.relative_to(ROOT / "mamf").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def get_layer(module):
    """Return the layer of a module. ``module``: its dotted name, with or without ``mamf.`` in front."""
    top_package = module.removeprefix("mamf.").partition(".")[0]
    return top_package if top_package in LAYERS else LOWEST_LAYER


def is_adapter(path):
    """Return whether a file defines kernels. Such a file may import torch, but other modules must not import it: mamf
    loads kernels only through entry points.
    """
    relative_path = path.relative_to(ROOT / "mamf").as_posix()
    return (
        relative_path.startswith("operations/")
        and path.stem not in DECLARATIONS
        and relative_path not in SHARED_BY_KERNELS
    )


def find_violations(find_in_file, paths=MAMF_FILES):
    """Return the violations that ``find_in_file`` finds in each file, by file. Leave out files without violations."""
    violations_by_path = {path.relative_to(ROOT).as_posix(): list(find_in_file(path)) for path in paths}
    return {path: violations for path, violations in violations_by_path.items() if violations}


def may_import_torch(path):
    relative_path = path.relative_to(ROOT / "mamf").as_posix()
    is_listed = relative_path in (*PROFILER_MODULES, *GROUP_MODULES, *SHARED_BY_KERNELS)
    return (
        path.name in MAY_IMPORT_TORCH or is_adapter(path) or is_listed or relative_path.startswith(INTEGRATIONS_FOLDER)
    )


def test_only_adapters_and_listed_modules_import_torch():
    def find_torch_imports(path):
        return [name for name in yield_imports(path) if name.split(".")[0] == "torch"]

    assert find_violations(find_torch_imports, [path for path in MAMF_FILES if not may_import_torch(path)]) == {}


def points_to_a_higher_layer(importer, imported):
    return ORDER.index(get_layer(imported)) > ORDER.index(get_layer(importer))


def test_packages_import_from_the_layers_below_them():
    entry_files = {ROOT / "mamf" / name for name in ("__init__.py", "__main__.py")}

    def find_upward_imports(path):
        mamf_modules = [name for name in (*yield_imports(path), *find_module_strings(path)) if name.startswith("mamf.")]
        return sorted({name for name in mamf_modules if points_to_a_higher_layer(get_module_name(path), name)})

    assert find_violations(find_upward_imports, [path for path in MAMF_FILES if path not in entry_files]) == {}


def test_an_import_from_a_higher_layer_is_detected():
    assert points_to_a_higher_layer("logs.records", "mamf.engine.measure")
    assert points_to_a_higher_layer("plans", "mamf.ceilings.ceiling")
    assert not points_to_a_higher_layer("engine.measure", "mamf.logs.records")
    assert not points_to_a_higher_layer("logs.records", "mamf.operations.unknown")


def test_no_file_is_part_of_an_import_cycle():
    modules = {f"mamf.{get_module_name(path)}": path for path in MAMF_FILES if path.name != "__main__.py"}
    remaining_imports = {
        name: {imported for imported in yield_imports(path) if imported in modules and imported != name}
        for name, path in modules.items()
    }
    while removable := [name for name, imports in remaining_imports.items() if not imports & remaining_imports.keys()]:
        for name in removable:
            del remaining_imports[name]
    assert not remaining_imports


def test_every_folder_is_a_layer_and_every_layer_has_files():
    folders = {path.relative_to(ROOT / "mamf").parts[0] for path in MAMF_FILES if path.parent != ROOT / "mamf"}
    assert folders == set(ORDER[1:])


def format_layers():
    """Return the list of layers as docs/architecture.md shows it, with the highest layer first."""
    width = max(map(len, ORDER))
    return "".join(f"{name:<{width}}  {LAYERS[name]}\n" for name in reversed(ORDER))


def test_the_architecture_page_lists_the_layers():
    assert format_layers() in (ROOT / "docs" / "architecture.md").read_text()


def test_no_module_imports_an_adapter():
    def find_adapter_imports(path):
        yield from (name for name in yield_imports(path) if name.split(".")[0] in ("mamf_backends", "backends"))
        if not is_adapter(path):
            adapter_modules = {f"mamf.{get_module_name(adapter)}" for adapter in MAMF_FILES if is_adapter(adapter)}
            yield from (name for name in yield_imports(path) if name in adapter_modules)

    assert find_violations(find_adapter_imports) == {}


def test_no_code_compares_the_name_of_a_backend():
    def find_compared_names(path):
        comparisons = [each for each in walk_syntax_tree(path) if isinstance(each, ast.Compare)]
        sides = [side for each in comparisons for side in (each.left, *each.comparators)]
        attributes = (ast.unparse(side) for side in sides if isinstance(side, ast.Attribute))
        return [name for name in attributes if name.endswith("backend.name")]

    assert find_violations(find_compared_names, [path for path in MAMF_FILES if "testing" not in path.parts]) == {}


#: Modules that measure. Reading, checking, comparing and drawing logs must not import them.
ENGINE_MODULES = ("mamf.engine.measure", "mamf.engine.regimes.base", "mamf.engine.search.strategy", "torch")


READER_MODULES = (
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
        f"for reader in {READER_MODULES!r}:\n"
        "    importlib.import_module(reader)\n"
        f"    print(reader, [name for name in {ENGINE_MODULES!r} if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines() == [f"{reader} []" for reader in READER_MODULES]


@pytest.mark.parametrize("name", PURE_MODULES)
def test_pure_modules_import_no_clock_and_no_device_library(name):
    assert not {"time", "os", "torch", "numpy"} & set(yield_imports(ROOT / "mamf" / name))


#: The only module that may print. It escapes control characters in texts from plugins and logs.
MAY_PRINT = (ROOT / "mamf" / "cli" / "terminal.py",)


def test_only_the_terminal_prints():
    def find_print_calls(path):
        calls = [node for node in walk_syntax_tree(path) if isinstance(node, ast.Call)]
        return [ast.unparse(call) for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]

    assert find_violations(find_print_calls, [path for path in MAMF_FILES if path not in MAY_PRINT]) == {}


def test_the_command_line_has_no_assertions():
    def find_assertions(path):
        return [ast.unparse(node) for node in walk_syntax_tree(path) if isinstance(node, ast.Assert)]

    assert find_violations(find_assertions, [path for path in MAMF_FILES if path.parent.name == "cli"]) == {}


def test_no_file_is_longer_than_500_lines():
    line_counts = {
        path: len(path.read_text().splitlines()) for path in (*MAMF_FILES, *(ROOT / "backends").glob("*.py"))
    }
    assert {path: count for path, count in line_counts.items() if count > 500} == {}


def test_every_package_has_an_init_file():
    """Check that each folder with modules has an __init__.py, because setup.py leaves out folders without this file."""
    module_folders = {path.parent for path in MAMF_FILES}
    assert not [folder for folder in module_folders if not (folder / "__init__.py").exists()]


def test_pyproject_files_and_discovered_names_agree():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    files = {path.stem for path in (ROOT / "backends").glob("[a-z]*.py")}
    assert set(declared["mamf.backends"]) == files
    for group, declared_points in declared.items():
        installed_points = {point.name: point.value for point in entry_points(group=group) if point.dist.name == "mamf"}
        assert installed_points == declared_points, "the installed metadata is out of date: run 'pip install -e .'"
