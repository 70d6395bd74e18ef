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

from adapter_uses import ROOT, Use, all_uses

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
REGENERATE = "python tools/check_fakes.py --write"
_REASONS = ("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
#: Constants that the adapters write as numbers, or that the fakes use as default arguments. The snapshot records their
#: values even if no adapter uses their names.
WRITTEN_OUT: dict[str, list[str]] = {
    "pynvml": [f"nvmlClocksEventReason{reason}" for reason in _REASONS],
    "amdsmi": ["AmdSmiInitFlags.INIT_AMD_GPUS"],
    "pyhlml": ["hlml_t.HLML_CLOCK_TYPE.HLML_CLOCK_SOC", "hlml_t.HLML_TEMP_SENS.HLML_TEMPERATURE_ON_AIP"],
}


# -- the declarations of a library ------------------------------------------------------------------------------------

Found = tuple[str, ast.AST]


class VendorSource:
    """The source code of a library. It finds the declaration of a name through imports, ``import *`` and aliases."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """Parse the files of a wheel. ``files``: the text of each, by its path, as in "amdsmi/amdsmi_interface.py"."""
        self.packages = {_module(path) for path in files if path.endswith("__init__.py")}
        self.scopes: dict[str, dict[str, Any]] = {}
        for path, text in files.items():
            with contextlib.suppress(SyntaxError):  # some wheels contain templates, which are not valid Python
                self.scopes[_module(path)] = _scope(ast.parse(text).body)

    def find(self, module: str, path: str) -> Found | None:
        """Return the declaration that a name has in a module: the module that declares it, and the syntax node.

        ``path``: "name" or "name.attribute". Returns None if there is no such name.
        """
        head, _, rest = path.partition(".")
        scope = self.scopes.get(module, {})
        match scope.get(head):
            case ast.ImportFrom(names=names) as statement:
                origin = self._origin(module, statement)
                name = next(alias.name for alias in names if (alias.asname or alias.name) == head)
                if f"{origin}.{name}" in self.scopes:
                    return self.find(f"{origin}.{name}", rest)
                return self.find(origin, _join(name, rest))
            case ast.Import(names=names):
                name = next(alias.name for alias in names if (alias.asname or alias.name) == head)
                return self.find(name, rest)
            case ast.Name() | ast.Attribute() as alias if _dotted(alias):
                return self.find(module, _join(_dotted(alias), rest))
            case ast.ClassDef(body=body) if rest:
                value = _scope(body).get(rest)
                return self.find(module, _dotted(value)) if _dotted(value) else (value and (module, value))
            case None if not head.startswith("_"):
                origins = [self._origin(module, statement) for statement in scope.get("*", [])]
                return next(filter(None, (self.find(origin, path) for origin in origins)), None)
            case None:
                return None
            case node:
                return module, node

    def declared(self, module: str, path: str) -> dict[str, Any] | str | int | None:
        """Describe the declaration of a name.

        - A function: its parameters, the keys and fields of its result, and the exceptions that it raises.
        - A class of exceptions: "exception".
        - Another class with a constructor: the parameters of the constructor. ``result`` has the names of the methods.
        - A constant that is a whole number: the number.
        - Anything else, or a name that does not exist: None.
        """
        found = self.find(module, path)
        if found is None:
            return None
        match found[1]:
            case ast.FunctionDef(args=arguments):
                return {"parameters": _plain(arguments)} | self._behaviour(found)
            case ast.ClassDef() if self._ancestor(found).endswith(("Error", "Exception")):
                return "exception"
            case ast.ClassDef(body=body):
                made = next((each for each in map(_scope(body).get, ("__new__", "__init__")) if each is not None), None)
                methods = sorted(name for name, each in _scope(body).items() if isinstance(each, ast.FunctionDef))
                return made and {"parameters": _plain(made.args).partition(", ")[2], "result": methods, "raises": []}
            case ast.Constant(int(value)):
                return value
        return None

    def _behaviour(self, function: Found) -> dict[str, list[str]]:
        """Return the keys and fields that a function's result may have, and the exceptions that the function may raise.

        Include those of the functions that it calls. An exception is represented by its base class in the library.
        """
        fields, exceptions = set(), set()
        for module, node in self._reached(function):
            match node:
                case ast.Dict(keys=keys):
                    fields |= {key.value for key in keys if isinstance(key, ast.Constant)}
                case ast.ClassDef():
                    fields |= set(_struct_fields(node))
                case ast.Raise(exc=raised) if raised is not None:
                    name = _dotted(raised.func if isinstance(raised, ast.Call) else raised)
                    found = self.find(module, name) if name else None
                    exceptions |= {self._ancestor(found)} if found else set()
        return {"result": sorted(map(str, fields)), "raises": sorted(exceptions)}

    def _reached(self, function: Found) -> Iterator[Found]:
        """Yield the syntax nodes of a function and of all functions that it reaches by name.

        If these functions name a class, yield the class too.
        """
        waiting, seen = [function], [function[1]]
        while waiting:
            module, current = waiting.pop()
            for node in ast.walk(current):
                yield module, node
                name = _dotted(node)
                found = self.find(module, name) if name else None
                if found and found[1] not in seen:
                    seen.append(found[1])
                    if isinstance(found[1], ast.FunctionDef):
                        waiting.append(found)
                    elif isinstance(found[1], ast.ClassDef):
                        yield found

    def _ancestor(self, found: Found) -> str:
        """Return the name of the topmost base class that the library declares, or else the name of the class."""
        module, node = found
        assert isinstance(node, ast.ClassDef)
        base = self.find(module, _dotted(node.bases[0])) if node.bases else None
        return self._ancestor(base) if base and isinstance(base[1], ast.ClassDef) else node.name

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the absolute name of the module from which a statement in ``module`` imports."""
        parts = module.split(".")
        up = statement.level - (module in self.packages)
        package = parts[: len(parts) - up] if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _scope(body: Iterable[ast.stmt]) -> dict[str, Any]:
    """Return the names that the statements of a module or class bind, each with the node of its last binding.

    The key "*" has the list of all ``import *`` statements.
    """
    bound: dict[str, Any] = {}
    for statement in body:
        match statement:
            case ast.FunctionDef(name) | ast.ClassDef(name):
                bound[name] = statement
            case ast.Assign(targets=[ast.Name(name)], value=value):
                bound[name] = value
            case ast.ImportFrom(names=[ast.alias("*")]):
                bound.setdefault("*", []).append(statement)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                bound |= {alias.asname or alias.name: statement for alias in names}
            case ast.Try(body=inner) | ast.If(body=inner):
                bound |= _scope(inner)
    return bound


def _dotted(node: object) -> str:
    """Return a node that consists only of names as text, such as "a.b.c". Return "" for any other node."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(owner, name) if _dotted(owner):
            return f"{_dotted(owner)}.{name}"
    return ""


def _join(name: str, rest: str) -> str:
    return f"{name}.{rest}" if rest else name


def _plain(arguments: ast.arguments) -> str:
    """Return the parameters as text, without annotations."""
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments)


def _struct_fields(node: ast.ClassDef) -> list[str]:
    """Return the names in ``_fields_`` of a ctypes structure, or an empty list for other classes."""
    match _scope(node.body).get("_fields_"):
        case ast.List(elements):
            return [each.elts[0].value for each in elements]  # type: ignore[attr-defined]
    return []


# -- the names that the adapters use ----------------------------------------------------------------------------------


def grouped(uses: Iterable[Use], library: str) -> dict[str, list[tuple[str, Use]]]:
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


def interface(source: VendorSource, library: str, uses: Iterable[Use]) -> dict[str, Any]:
    """Return the declarations of the names that are used. Results contain only the fields that are used."""
    found: dict[str, Any] = {"functions": {}, "values": {}, "exceptions": []}
    names = grouped(uses, library)
    for name in sorted({*names, *WRITTEN_OUT.get(library, [])}):
        declared = source.declared(library, name)
        if isinstance(declared, dict):
            fields = {field for field, _ in names[name]} - {""}
            # If no field is found, the function probably computes the keys of its result. None means unknown.
            is_known = declared["result"] or not fields
            declared["result"] = [field for field in declared["result"] if field in fields] if is_known else None
            found["functions"][name] = declared
        elif declared == "exception":
            found["exceptions"].append(name)
        elif declared is not None:
            found["values"][name] = declared
    return found


def signature(parameters: str) -> inspect.Signature:
    """Return the signature of a function with these parameters, such as "device, clock_type=0"."""
    declared = ast.parse(f"lambda {parameters}: 0", mode="eval").body
    assert isinstance(declared, ast.Lambda)
    kind, missing, taken = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty, declared.args
    names = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    defaults = [missing] * (len(names) - len(taken.defaults)) + [ast.unparse(each) for each in taken.defaults]
    found = [inspect.Parameter(name, kind, default=each) for name, each in zip(names, defaults, strict=True)]
    if taken.kwarg:
        found.append(inspect.Parameter(taken.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def takes(declared: inspect.Signature, use: Use) -> bool:
    """Return whether a function with this signature accepts the arguments of a use."""
    if use.arguments is None:
        return True
    try:
        declared.bind(*[None] * use.arguments, **dict.fromkeys(use.keywords))
    except TypeError:
        return False
    return True


def problems(uses: Iterable[Use], library: str, declared: dict[str, Any]) -> Iterator[str]:
    """Compare the names of the library that the adapters use with their declarations; yield a line per mismatch."""
    names = grouped(uses, library)
    for name, found in sorted(names.items()):
        if name in declared["functions"]:
            function = declared["functions"][name]
            for problem in dict.fromkeys(_misuses(found, function, names)):
                yield f"{name}({function['parameters']}): {problem}"
        elif name not in declared["values"] and name not in declared["exceptions"]:
            yield f"{name}: the library has no such name; {', '.join(dict.fromkeys(use.place for _, use in found))}"


def _misuses(found: Iterable[tuple[str, Use]], function: dict[str, Any], names: Iterable[str]) -> Iterable[str]:
    """Yield the mismatches between a function and its uses. ``names``: all names of the library that are used."""
    for field, use in found:
        if field and function["result"] is not None and field not in function["result"]:
            yield f"{use.place}: its result has no {field}"
        if not takes(signature(function["parameters"]), use):
            yield f"{use.place}: called with {use.arguments} arguments {' '.join(use.keywords)}".rstrip()
    for exception in set(function["raises"]) - set(names):
        yield f"raises {exception}, which no adapter mentions"


def dump(interfaces: dict[str, Any]) -> str:
    """Return the text of the snapshot, with each function on one line."""
    text = json.dumps(interfaces, indent=1)
    for library in DISTRIBUTIONS:
        for function in interfaces.get(library, {}).get("functions", {}).values():
            indented = json.dumps(function, indent=1).replace("\n", "\n   ")
            text = text.replace(indented, json.dumps(function))
    return text + "\n"


def without_versions(interfaces: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot without versions, so that a new release with the same interface counts as equal."""
    return {library: {**interfaces.get(library, {}), "version": None} for library in DISTRIBUTIONS}


def wheel(library: str, folder: Path) -> Path:
    """Download the library's wheel into the folder. Raises OSError with pip's reason."""
    distribution = DISTRIBUTIONS[library]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--dest", str(folder), distribution]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip says nothing"])[-1])
    return next(folder.glob(f"{distribution.replace('-', '_')}-*.whl"))


def read_wheel(path: Path) -> tuple[VendorSource, str]:
    """Return the source and the version of a wheel."""
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if name.endswith(".py")]
        return VendorSource({name: archive.read(name).decode() for name in files}), path.name.split("-")[1]


def check(library: str, folder: Path, uses: list[Use]) -> tuple[dict[str, Any], bool]:
    """Print the mismatches of a library. Return its part of the snapshot, and whether there are no mismatches."""
    source, version = read_wheel(wheel(library, folder))
    declared = interface(source, library, uses)
    wrong = list(problems(uses, library, declared))
    print(f"\n{library}, from {DISTRIBUTIONS[library]} {version}: {len(grouped(uses, library))} names are used")
    print("".join(f"FAIL {problem}\n" for problem in wrong), end="")
    about = {"distribution": DISTRIBUTIONS[library], "version": version}
    return about | declared, not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the snapshot instead of comparing with it")
    options = parser.parse_args()
    before = json.loads(SNAPSHOT.read_text()) if SNAPSHOT.exists() else {}
    after, uses, fits, missing = {**before, "regenerate": REGENERATE}, all_uses(), True, []
    with tempfile.TemporaryDirectory() as temporary:
        for library in DISTRIBUTIONS:
            try:
                after[library], is_right = check(library, Path(temporary), uses)
                fits = fits and is_right
            except OSError as error:
                missing.append(library)
                print(f"\n{library}: no wheel of {DISTRIBUTIONS[library]} to be had, unchecked: {error}")
    if options.write:
        SNAPSHOT.write_text(dump(after))
    elif without_versions(after) != without_versions(before):
        print(f"\nthe snapshot is not what the wheels say; see 'git diff' after {REGENERATE}")
        fits = False
    return 1 if not fits else 2 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
