"""Check that the vendors' libraries have the names that the adapters, some kernels and the fakes of the tests use.

    python tools/check_fakes.py           # compare with the newest wheels and with the snapshot
    python tools/check_fakes.py --write   # the same, but write the snapshot instead of comparing with it

The tool downloads the wheels with pip into a temporary folder, and reads their source without importing it. It prints a
line for each mismatch: an unknown name, a call with wrong arguments, a key or field that a result lacks, or an
exception that no adapter mentions.

The snapshot is ``tests/contract/vendor_interfaces.json``. It records how the wheels declare the names that mamf
uses. ``test_vendor_interfaces.py`` compares adapters and fakes with the snapshot, so it needs no network.

Exit code 1: there is a mismatch, or the snapshot is outdated. Exit code 2: a wheel is not available, so the tool could
not check that library.

The tool does not check the following libraries, or checks only a part of them:

- torch: ``test_torch_interfaces.py`` checks the installed version, including the calls of TunableOp. hipBLASLt needs no
  check, because only torch calls it.
- torch_npu: the tool checks only the functions that ``AcceleratorBackend`` calls on every vendor's torch module.
- torch.hpu: it comes with habana_frameworks, which only Intel's images contain.
- intel-extension-for-pytorch: mamf imports it only because it adds torch.xpu, and uses no name of it.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import inspect
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from adapter_uses import ROOT, Use, list_all_uses

DISTRIBUTIONS = {
    "pynvml": "nvidia-ml-py",
    "amdsmi": "amdsmi",
    "pyhlml": "habana-pyhlml",
    "aiter": "amd-aiter",
    "torch_npu.npu": "torch-npu",
}
#: The torch modules of vendors. The tool does not check their optional names, and it does not check fields of results,
#: because C++ code creates these results.
TORCH_MODULES = ("torch_npu.npu",)
SNAPSHOT = ROOT / "tests" / "contract" / "vendor_interfaces.json"
REGENERATE_COMMAND = "python tools/check_fakes.py --write"
_REASONS = ("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
#: Constants that the adapters write as numbers, or that the fakes use as default arguments. The snapshot records their
#: values even if no adapter uses their names.
EXTRA_CONSTANTS: dict[str, list[str]] = {
    "pynvml": [f"nvmlClocksEventReason{reason}" for reason in _REASONS],
    "amdsmi": ["AmdSmiInitFlags.INIT_AMD_GPUS"],
    "pyhlml": ["hlml_t.HLML_CLOCK_TYPE.HLML_CLOCK_SOC", "hlml_t.HLML_TEMP_SENS.HLML_TEMPERATURE_ON_AIP"],
}


# -- the declarations of a library ------------------------------------------------------------------------------------

Declaration = tuple[str, ast.AST]


class VendorSource:
    """The source code of a library. It finds the declaration of a name through imports, ``import *`` and aliases."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Parse the files of a wheel. ``files``: the text of each, by its path, as in "amdsmi/amdsmi_interface.py"."""
        self.packages = {_make_module_name(path) for path in files if path.endswith("__init__.py")}
        self.scopes: dict[str, dict[str, Any]] = {}
        for path, text in files.items():
            with contextlib.suppress(SyntaxError):  # some wheels contain templates, which are not valid Python
                self.scopes[_make_module_name(path)] = _list_bindings(ast.parse(text).body)

    def find_declaration(self, module: str, path: str) -> Declaration | None:
        """Return the declaration that a name has in a module: the module that declares it, and the syntax node.

        ``path``: "name" or "name.attribute". Returns None if there is no such name.
        """
        head, _, rest = path.partition(".")
        scope = self.scopes.get(module, {})
        match scope.get(head):
            case ast.ImportFrom(names=names) as statement:
                origin = self._resolve_origin(module, statement)
                name = next(alias.name for alias in names if (alias.asname or alias.name) == head)
                if f"{origin}.{name}" in self.scopes:
                    return self.find_declaration(f"{origin}.{name}", rest)
                return self.find_declaration(origin, _join_names(name, rest))
            case ast.Import(names=names):
                name = next(alias.name for alias in names if (alias.asname or alias.name) == head)
                return self.find_declaration(name, rest)
            case ast.Name() | ast.Attribute() as alias if _format_dotted_name(alias):
                return self.find_declaration(module, _join_names(_format_dotted_name(alias), rest))
            case ast.ClassDef(body=body) if rest:
                value = _list_bindings(body).get(rest)
                if target := _format_dotted_name(value):
                    return self.find_declaration(module, target)
                return value and (module, value)
            case None if not head.startswith("_"):
                origins = [self._resolve_origin(module, statement) for statement in scope.get("*", [])]
                return next(filter(None, (self.find_declaration(origin, path) for origin in origins)), None)
            case None:
                return None
            case node:
                return module, node

    def describe(self, module: str, path: str) -> dict[str, Any] | type[Exception] | str | int | None:
        """Describe the declaration of a name.

        - A function: its parameters, the keys and fields of its result, and the exceptions that it raises.
        - A class of exceptions: ``Exception``.
        - Another class: the parameters of its constructor. ``result`` has the names of its methods.
        - A constant that is a whole number or a text: its value.
        - Anything else, or a name that does not exist: None.
        """
        declaration = self.find_declaration(module, path)
        if declaration is None:
            return None
        match declaration[1]:
            case ast.FunctionDef(args=arguments):
                return {"parameters": _format_parameters(arguments)} | self._describe_behavior(declaration)
            case ast.ClassDef() if self._get_topmost_base(declaration).endswith(("Error", "Exception")):
                return Exception
            case ast.ClassDef(body=body):
                bindings = _list_bindings(body).items()
                methods = sorted(name for name, node in bindings if isinstance(node, ast.FunctionDef))
                return {"parameters": self._format_constructor(declaration), "result": methods, "raises": []}
            case ast.Constant(int(value) | str(value)):
                return value
        return None

    def _format_constructor(self, declaration: Declaration) -> str:
        """Return the parameters of a class's constructor, which may come from a base class, without ``self``.

        Return "*args, **kwargs" if the library does not declare the base class.
        """
        module, node = declaration
        assert isinstance(node, ast.ClassDef)
        bindings = _list_bindings(node.body)
        for name in ("__new__", "__init__"):
            if isinstance(constructor := bindings.get(name), ast.FunctionDef):
                return _format_parameters(constructor.args).partition(", ")[2]
        for name in filter(None, map(_format_dotted_name, node.bases)):
            base = self.find_declaration(module, name)
            if base and isinstance(base[1], ast.ClassDef):
                return self._format_constructor(base)
        return "*args, **kwargs" if node.bases else ""

    def _describe_behavior(self, function: Declaration) -> dict[str, list[str]]:
        """Return the keys and fields that a function's result may have, and the exceptions that the function may raise.

        Include those of the functions that it calls. An exception is represented by its base class in the library.
        """
        fields, exceptions = set(), set()
        for module, node in self._walk_reached_nodes(function):
            match node:
                case ast.Dict(keys=keys):
                    fields |= {key.value for key in keys if isinstance(key, ast.Constant)}
                case ast.ClassDef():
                    fields |= set(_list_struct_fields(node))
                case ast.Raise(exc=raised) if raised is not None:
                    name = _format_dotted_name(raised.func if isinstance(raised, ast.Call) else raised)
                    declaration = self.find_declaration(module, name) if name else None
                    exceptions |= {self._get_topmost_base(declaration)} if declaration else set()
        return {"result": sorted(map(str, fields)), "raises": sorted(exceptions)}

    def _walk_reached_nodes(self, function: Declaration) -> Iterator[Declaration]:
        """Yield the syntax nodes of a function and of all functions that it reaches by name.

        If these functions name a class, yield the class too.
        """
        waiting, seen_nodes = [function], [function[1]]
        while waiting:
            module, current = waiting.pop()
            for node in ast.walk(current):
                yield module, node
                name = _format_dotted_name(node)
                declaration = self.find_declaration(module, name) if name else None
                if declaration and declaration[1] not in seen_nodes:
                    seen_nodes.append(declaration[1])
                    if isinstance(declaration[1], ast.FunctionDef):
                        waiting.append(declaration)
                    elif isinstance(declaration[1], ast.ClassDef):
                        yield declaration

    def _get_topmost_base(self, declaration: Declaration) -> str:
        """Return the name of the topmost base class that the library declares, or else the name of the class."""
        module, node = declaration
        assert isinstance(node, ast.ClassDef)
        base = self.find_declaration(module, _format_dotted_name(node.bases[0])) if node.bases else None
        return self._get_topmost_base(base) if base and isinstance(base[1], ast.ClassDef) else node.name

    def _resolve_origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module from which a statement in ``module`` imports."""
        parts = module.split(".")
        up = statement.level - (module in self.packages)
        package = parts[: len(parts) - up] if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


def _make_module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _list_bindings(body: Iterable[ast.stmt]) -> dict[str, Any]:
    """Return the names that the statements of a module or class bind, each with the node of its last binding.

    The key "*" has the list of all ``import *`` statements. The branches ``else``, ``except`` and ``finally`` count
    only for names that no other statement binds.
    """
    bindings: dict[str, Any] = {}
    fallbacks: list[ast.stmt] = []
    star_imports: list[ast.ImportFrom] = []
    for statement in body:
        match statement:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                bindings[name] = statement
            case ast.Assign(targets=[ast.Name(name)], value=value):
                bindings[name] = value
            case ast.ImportFrom(names=[ast.alias("*")]):
                star_imports.append(statement)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bindings |= {alias.asname or alias.name: statement for alias in names}
            case ast.Try() | ast.If():
                inner_bindings = _list_bindings(statement.body)
                star_imports += inner_bindings.pop("*", [])
                bindings |= inner_bindings
                fallbacks += statement.orelse
                if isinstance(statement, ast.Try):
                    fallbacks += [inner for handler in statement.handlers for inner in handler.body]
                    fallbacks += statement.finalbody
    if fallbacks:
        fallback_bindings = _list_bindings(fallbacks)
        star_imports += fallback_bindings.pop("*", [])
        bindings = fallback_bindings | bindings
    return bindings | ({"*": star_imports} if star_imports else {})


def _format_dotted_name(node: object) -> str:
    """Return a node that consists only of names as text, such as "a.b.c". Return "" for any other node."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(owner, name) if _format_dotted_name(owner):
            return f"{_format_dotted_name(owner)}.{name}"
    return ""


def _join_names(name: str, rest: str) -> str:
    return f"{name}.{rest}" if rest else name


def _format_parameters(arguments: ast.arguments) -> str:
    """Return the parameters as text, without annotations."""
    for node in ast.walk(arguments):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(arguments)


def _list_struct_fields(node: ast.ClassDef) -> list[str]:
    """Return the names in ``_fields_`` of a ctypes structure, or an empty list for other classes."""
    match _list_bindings(node.body).get("_fields_"):
        case ast.List(elements):
            return [element.elts[0].value for element in elements]  # type: ignore[attr-defined]
    return []


# -- the names that the adapters use ----------------------------------------------------------------------------------


def group_by_name(uses: Iterable[Use], library: str) -> dict[str, list[tuple[str, Use]]]:
    """Return the uses of a library, grouped by name.

    Each use comes with the field that the adapter reads from the result of the name, or "" if it reads no field.
    """
    names: dict[str, list[tuple[str, Use]]] = {}
    for use in uses:
        if use.path.startswith(f"{library}."):
            name, _, field = use.path.removeprefix(f"{library}.").partition("().")
            if library in TORCH_MODULES and (field or use.is_optional):
                continue
            names.setdefault(name, []).append((field, use))
    return names


def describe_library(source: VendorSource, library: str, uses: Iterable[Use]) -> dict[str, Any]:
    """Return the declarations of the names that are used. Results contain only the fields that are used."""
    description: dict[str, Any] = {"functions": {}, "values": {}, "exceptions": []}
    names = group_by_name(uses, library)
    for name in sorted({*names, *EXTRA_CONSTANTS.get(library, [])}):
        declaration = source.describe(library, name)
        if isinstance(declaration, dict):
            fields = {field for field, _ in names[name]} - {""}
            # If no field is found, the function probably computes the keys of its result. None means unknown.
            is_result_known = declaration["result"] or not fields
            result = [field for field in declaration["result"] if field in fields]
            declaration["result"] = result if is_result_known else None
            description["functions"][name] = declaration
        elif declaration is Exception:
            description["exceptions"].append(name)
        elif declaration is not None:
            description["values"][name] = declaration
    return description


def make_signature(parameters: str) -> inspect.Signature:
    """Return the signature of a function with these parameters, such as "device, clock_type=0"."""
    function = ast.parse(f"lambda {parameters}: 0", mode="eval").body
    assert isinstance(function, ast.Lambda)
    kind, no_default, arguments = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty, function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    defaults: list[Any] = [no_default] * (len(names) - len(arguments.defaults)) + list(
        map(ast.unparse, arguments.defaults)
    )
    described = [inspect.Parameter(name, kind, default=value) for name, value in zip(names, defaults, strict=True)]
    if arguments.vararg:
        described.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    if arguments.kwarg:
        described.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(described)


def accepts_call(signature: inspect.Signature, use: Use) -> bool:
    """Return whether a function with this signature accepts the arguments of a use."""
    if use.arguments is None:
        return True
    try:
        signature.bind(*[None] * use.arguments, **dict.fromkeys(use.keywords))
    except TypeError:
        return False
    return True


def find_mismatches(uses: Iterable[Use], library: str, declarations: dict[str, Any]) -> Iterator[str]:
    """Compare the names of the library that the adapters use with their declarations; yield a line per mismatch."""
    names = group_by_name(uses, library)
    for name, fields_and_uses in sorted(names.items()):
        if name in declarations["functions"]:
            function = declarations["functions"][name]
            for problem in dict.fromkeys(_find_misuses(fields_and_uses, function, names)):
                yield f"{name}({function['parameters']}): {problem}"
        elif name not in declarations["values"] and name not in declarations["exceptions"]:
            places = ", ".join(dict.fromkeys(use.place for _, use in fields_and_uses))
            yield f"{name}: the library has no such name, but {places} uses it"


def _find_misuses(
    fields_and_uses: Iterable[tuple[str, Use]], function: dict[str, Any], names: Iterable[str]
) -> Iterable[str]:
    """Yield the mismatches between a function and its uses. ``names``: all names of the library that are used."""
    for field, use in fields_and_uses:
        if field and function["result"] is not None and field not in function["result"]:
            yield f"{use.place} reads {field}, which the result does not have"
        if not accepts_call(make_signature(function["parameters"]), use):
            keywords = f" and the keywords {', '.join(use.keywords)}" if use.keywords else ""
            yield f"{use.place} calls it with {use.arguments} positional arguments{keywords}"
    for exception in set(function["raises"]) - set(names):
        yield f"raises {exception}, which no adapter mentions"


def format_snapshot(interfaces: dict[str, Any]) -> str:
    """Return the text of the snapshot, with each function on one line."""
    text = json.dumps(interfaces, indent=1)
    for library in DISTRIBUTIONS:
        for function in interfaces.get(library, {}).get("functions", {}).values():
            indented = json.dumps(function, indent=1).replace("\n", "\n   ")
            text = text.replace(indented, json.dumps(function))
    return text + "\n"


def remove_versions(interfaces: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot without versions, so that a new release with the same interface counts as equal."""
    return {library: {**interfaces.get(library, {}), "version": None} for library in DISTRIBUTIONS}


def download_wheel(library: str, folder: Path) -> Path:
    """Download the library's wheel into the folder. Raises OSError with pip's reason."""
    distribution = DISTRIBUTIONS[library]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), distribution]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip printed no reason"])[-1])
    return next(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))


def read_wheel(path: Path) -> tuple[VendorSource, str]:
    """Return the source and the version of a wheel."""
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if name.endswith(".py")]
        return VendorSource({name: archive.read(name).decode() for name in files}), path.name.split("-")[1]


def check_library(library: str, folder: Path, uses: list[Use]) -> tuple[dict[str, Any], bool]:
    """Print the mismatches of a library. Return its part of the snapshot, and whether there are no mismatches."""
    source, version = read_wheel(download_wheel(library, folder))
    description = describe_library(source, library, uses)
    mismatches = list(find_mismatches(uses, library, description))
    print(f"\n{library}, from {DISTRIBUTIONS[library]} {version}: {len(group_by_name(uses, library))} names are used")
    print("".join(f"FAIL {mismatch}\n" for mismatch in mismatches), end="")
    return {"distribution": DISTRIBUTIONS[library], "version": version} | description, not mismatches


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the snapshot instead of comparing with it")
    options = parser.parse_args()
    before = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    after, uses = {**before, "regenerate": REGENERATE_COMMAND}, list_all_uses()
    is_up_to_date, unchecked_libraries = True, []
    with tempfile.TemporaryDirectory() as temporary:
        for library in DISTRIBUTIONS:
            try:
                after[library], has_no_mismatch = check_library(library, Path(temporary), uses)
                is_up_to_date = is_up_to_date and has_no_mismatch
            except OSError as error:
                unchecked_libraries.append(library)
                print(f"\n{library}: not checked, because pip cannot download {DISTRIBUTIONS[library]}: {error}")
    if options.write:
        SNAPSHOT.write_text(format_snapshot(after))
    elif remove_versions(after) != remove_versions(before):
        print(f"\nthe snapshot differs from the wheels: run '{REGENERATE_COMMAND}', then look at 'git diff'")
        is_up_to_date = False
    return 1 if not is_up_to_date else 2 if unchecked_libraries else 0


if __name__ == "__main__":
    sys.exit(main())
