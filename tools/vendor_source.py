"""Reads a distribution's modules from their syntax: names, and what functions take, return and raise."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Found = tuple[str, ast.AST]


class VendorSource:
    """Names are followed through imports, ``import *`` and aliases to where they are declared; nothing is imported."""

    def __init__(self, files: Mapping[str, str]) -> None:
        """``files``: text by path inside the distribution, as "amdsmi/amdsmi_interface.py"."""
        self.packages = {_module(path) for path in files if path.endswith("__init__.py")}
        self.scopes = {_module(path): _scope(ast.parse(text).body) for path, text in files.items()}

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
            case ast.ClassDef(body=body) if "__new__" in _scope(body):
                made_of = _plain(_scope(body)["__new__"].args)
                return {"parameters": made_of.partition(", ")[2], "result": [], "raises": []}
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
