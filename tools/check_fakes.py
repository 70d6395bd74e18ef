"""Checks that the vendors' libraries have what the adapters, some kernels and the tests' fakes use.

    python tools/check_fakes.py           # downloads the wheels with pip into a temporary folder
    python tools/check_fakes.py --write   # updates the snapshot

The wheels are read, never imported. Each mismatch is a line: an unknown name, a wrong call, a key or field that a
result lacks, an exception that no adapter mentions. The snapshot is ``tests/contract/vendor_interfaces.json``;
``test_vendor_interfaces.py`` compares adapters and fakes with it, without the network. Exit code 1: a mismatch,
or an outdated snapshot. 2: a wheel is not available, so its library is unchecked.

torch needs no wheel: ``test_torch_interfaces.py`` checks the installed version, and with it how TunableOp is called;
hipBLASLt is called by torch alone. torch_npu's functions are checked against what ``AcceleratorBackend`` asks of any
vendor. torch.hpu is not checked: habana_frameworks is only in Intel's images. intel-extension-for-pytorch is imported
for torch.xpu's sake, and no name of it is used.
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
#: A vendor's torch module: what its functions return is of C++, and what it lacks the adapter does without.
TORCH_MODULES = ("torch_npu.npu",)
SNAPSHOT = ROOT / "tests" / "contract" / "vendor_interfaces.json"
REGENERATE = "python tools/check_fakes.py --write"
_REASONS = ("SwPowerCap", "HwSlowdown", "SyncBoost", "SwThermalSlowdown", "HwThermalSlowdown", "HwPowerBrakeSlowdown")
#: Constants whose values the adapters, or the fakes' default arguments, write out.
WRITTEN_OUT: dict[str, list[str]] = {
    "pynvml": [f"nvmlClocksEventReason{reason}" for reason in _REASONS],
    "amdsmi": ["AmdSmiInitFlags.INIT_AMD_GPUS"],
    "pyhlml": ["hlml_t.HLML_CLOCK_TYPE.HLML_CLOCK_SOC", "hlml_t.HLML_TEMP_SENS.HLML_TEMPERATURE_ON_AIP"],
}


# -- what a library declares ------------------------------------------------------------------------------------------

Found = tuple[str, ast.AST]


class VendorSource:
    """Names are followed through imports, ``import *`` and aliases to where they are declared; nothing is imported."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """``files``: text by path inside the distribution, as "amdsmi/amdsmi_interface.py"."""
        self.packages = {_module(path) for path in files if path.endswith("__init__.py")}
        self.scopes: dict[str, dict[str, Any]] = {}
        for path, text in files.items():
            with contextlib.suppress(SyntaxError):  # a template
                self.scopes[_module(path)] = _scope(ast.parse(text).body)

    def find(self, module: str, path: str) -> Found | None:
        """Where "name" or "name.attribute", as seen from a module, is declared: the module and the node."""
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
        """A function's parameters, result and exceptions; "exception"; a constant's value; None for no such name."""
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
        """Keys and fields of what a function, or one that it calls, makes; the exceptions' bases in the library."""
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
        """The nodes of a function and of the functions it names, and the classes they name."""
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
        """The name of a class's first base that the distribution declares, or its own."""
        module, node = found
        assert isinstance(node, ast.ClassDef)
        base = self.find(module, _dotted(node.bases[0])) if node.bases else None
        return self._ancestor(base) if base and isinstance(base[1], ast.ClassDef) else node.name

    def _origin(self, module: str, statement: ast.ImportFrom) -> str:
        parts = module.split(".")
        up = statement.level - (module in self.packages)
        package = parts[: len(parts) - up] if statement.level else []
        return ".".join([*package, *filter(None, [statement.module])])


def _module(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def _scope(body: Iterable[ast.stmt]) -> dict[str, Any]:
    """What the statements of a module or class bind, the last binding first of all; "*": its ``import *``."""
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
    """ "a.b.c" of names alone; "" of anything else."""
    match node:
        case ast.Name(name):
            return name
        case ast.Attribute(owner, name) if _dotted(owner):
            return f"{_dotted(owner)}.{name}"
    return ""


def _join(name: str, rest: str) -> str:
    return f"{name}.{rest}" if rest else name


def _plain(arguments: ast.arguments) -> str:
    for each in ast.walk(arguments):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(arguments)


def _struct_fields(node: ast.ClassDef) -> list[str]:
    """The names in a ctypes structure's ``_fields_``."""
    match _scope(node.body).get("_fields_"):
        case ast.List(elements):
            return [each.elts[0].value for each in elements]  # type: ignore[attr-defined]
    return []


# -- what the adapters use of it --------------------------------------------------------------------------------------


def grouped(uses: Iterable[Use], library: str) -> dict[str, list[tuple[str, Use]]]:
    """The uses of a library by name, each with the field of the name's result that it takes ("" for none)."""
    names: dict[str, list[tuple[str, Use]]] = {}
    for use in uses:
        if use.path.startswith(f"{library}."):
            name, _, field = use.path.removeprefix(f"{library}.").partition("().")
            if library in TORCH_MODULES and (field or use.is_optional):
                continue
            names.setdefault(name, []).append((field, use))
    return names


def interface(source: VendorSource, library: str, uses: Iterable[Use]) -> dict[str, Any]:
    """Of what the library declares, the part that is used: keys of a result too."""
    found: dict[str, Any] = {"functions": {}, "values": {}, "exceptions": []}
    names = grouped(uses, library)
    for name in sorted({*names, *WRITTEN_OUT.get(library, [])}):
        declared = source.declared(library, name)
        if isinstance(declared, dict):
            fields = {field for field, _ in names[name]} - {""}
            # A function may compute the keys of its result: then the source says nothing of them (None).
            is_known = declared["result"] or not fields
            declared["result"] = [field for field in declared["result"] if field in fields] if is_known else None
            found["functions"][name] = declared
        elif declared == "exception":
            found["exceptions"].append(name)
        elif declared is not None:
            found["values"][name] = declared
    return found


def signature(parameters: str) -> inspect.Signature:
    """Of a function declared with these parameters, annotations left out: "device, clock_type=0"."""
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
    """Whether a function can be called as it is there."""
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
    for field, use in found:
        if field and function["result"] is not None and field not in function["result"]:
            yield f"{use.place}: its result has no {field}"
        if not takes(signature(function["parameters"]), use):
            yield f"{use.place}: called with {use.arguments} arguments {' '.join(use.keywords)}".rstrip()
    for exception in set(function["raises"]) - set(names):
        yield f"raises {exception}, which no adapter mentions"


def dump(interfaces: dict[str, Any]) -> str:
    """The snapshot's text, a line a function."""
    text = json.dumps(interfaces, indent=1)
    for library in DISTRIBUTIONS:
        for function in interfaces.get(library, {}).get("functions", {}).values():
            indented = json.dumps(function, indent=1).replace("\n", "\n   ")
            text = text.replace(indented, json.dumps(function))
    return text + "\n"


def without_versions(interfaces: dict[str, Any]) -> dict[str, Any]:
    """What matters of a snapshot: a new release that changes nothing is no difference."""
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
    with zipfile.ZipFile(path) as archive:
        files = [name for name in archive.namelist() if name.endswith(".py")]
        return VendorSource({name: archive.read(name).decode() for name in files}), path.name.split("-")[1]


def check(library: str, folder: Path, uses: list[Use]) -> tuple[dict[str, Any], bool]:
    """Print mismatches of a library. Return its part of the snapshot, and whether every use fits."""
    source, version = read_wheel(wheel(library, folder))
    declared = interface(source, library, uses)
    wrong = list(problems(uses, library, declared))
    print(f"\n{library}, from {DISTRIBUTIONS[library]} {version}: {len(grouped(uses, library))} names are used")
    print("".join(f"FAIL {problem}\n" for problem in wrong), end="")
    about = {"distribution": DISTRIBUTIONS[library], "version": version}
    return about | declared, not wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the snapshot")
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
