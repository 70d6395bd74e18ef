"""Lists what the adapters use of torch and of the vendors' libraries, from their syntax, without imports.

The names that adapters give a library (``nvml``, ``smi``, ``hlml``, ``vendor``), and the helpers they call it through
(``call_or_none``, ``get_first_number``), are known here. Results of such calls are followed through variables, so that
``rates.gpu`` reads as ``pynvml.nvmlDeviceGetUtilizationRates().gpu``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: What a name stands for wherever the adapters use it, as a variable or as an attribute.
KNOWN = {
    "amdsmi": "amdsmi",
    "hlml": "pyhlml",
    "nvml": "pynvml",
    "properties": "vendor.get_device_properties()",
    "pynvml": "pynvml",
    "smi": "amdsmi",
    "torch": "torch",
    "vendor": "vendor",
}
#: What a parameter stands for in one file.
PARAMETERS = {"mamf/operations/attention/aiter.py": {"function": "aiter.flash_attn_func"}}
#: Arguments that a helper puts before those it was given.
HELPERS = {"call_or_none": 1, "call_system_or_none": 0}
#: The files that use them, and what ``vendor`` is there.
VENDORS = {
    "backends/_card_sharing.py": (),
    "backends/_nvml.py": ("torch.cuda",),
    "backends/cpu.py": (),
    "backends/cuda.py": ("torch.cuda",),
    "backends/hpu.py": ("torch.hpu",),
    "backends/mps.py": (),
    "backends/rocm.py": ("torch.cuda",),
    "backends/xpu.py": ("torch.xpu",),
    "mamf/operations/attention/aiter.py": (),
    "mamf/operations/matmul/torch_kernels.py": (),
    "mamf/torch_backend.py": ("torch.cuda", "torch.xpu", "torch.hpu", "torch_npu.npu"),
}


@dataclass(frozen=True)
class Use:
    """One mention of ``path``. ``arguments``: how many a call gives it; None where nobody calls it or counts them.
    ``is_optional``: the adapter goes on without it.
    """

    path: str
    place: str
    arguments: int | None = None
    keywords: tuple[str, ...] = ()
    is_optional: bool = False


def uses(file: str, text: str | None = None) -> list[Use]:
    """All uses in a file of the repository, or in ``text`` as if it were that file's."""
    walker = _Walker(file)
    walker.visit(ast.parse((ROOT / file).read_text() if text is None else text))
    found = []
    for use in walker.found:
        optional = any(use.path == path or use.path.startswith(f"{path}.") for path in walker.optional)
        for path in _with_vendors(use.path, VENDORS[file]):
            found.append(Use(path, use.place, use.arguments, use.keywords, optional))
    return found


def all_uses() -> list[Use]:
    return [use for file in VENDORS for use in uses(file)]


def _with_vendors(path: str, vendors: Iterable[str]) -> list[str]:
    head, _, rest = path.partition(".")
    return [f"{vendor}.{rest}" for vendor in vendors] if head == "vendor" else [path]


class _Walker(ast.NodeVisitor):
    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Use] = []
        self.optional: set[str] = set()
        # What a variable holds.
        self.paths: dict[str, list[str]] = {name: [path] for name, path in PARAMETERS.get(file, {}).items()}
        self.texts: dict[str, list[str]] = {}  # the strings that a variable holds in turn

    def resolve(self, node: ast.expr) -> list[str]:
        """The paths that an expression may be; none for what is not a library's."""
        match node:
            case ast.Name(name):
                return self.paths.get(name) or _known(name)
            case ast.Attribute(owner, name):
                return [f"{path}.{name}" for path in self.resolve(owner)] or _known(name)
            case ast.Call(ast.Name("getattr"), [owner, name, *_]):
                return [f"{path}.{text}" for path in self.resolve(owner) for text in self.literals(name)]
            case ast.Call(function, arguments):
                called = self.resolve(arguments[0] if _name(function) in HELPERS and arguments else function)
                return called if called == ["vendor"] else [f"{path}()" for path in called]
            case ast.IfExp(_, first, second) | ast.BoolOp(_, [first, second]):
                return self.resolve(first) or self.resolve(second)
        return []

    def literals(self, node: ast.expr) -> list[str]:
        match node:
            case ast.Constant(str(text)):
                return [text]
            case ast.Name(name):
                return self.texts.get(name, [])
            case ast.Tuple(parts):
                return [text for part in parts for text in self.literals(part)]
            case ast.Dict(keys):
                return [text for key in keys if key for text in self.literals(key)]
            case ast.Call(ast.Attribute(owner, "items")):
                return self.literals(owner)
        return []

    def note(self, node: ast.expr, paths: Iterable[str], arguments: int | None = None, keywords: object = ()) -> None:
        place = f"{Path(self.file).name}:{node.lineno}"
        names = tuple(each.arg or "" for each in keywords)  # type: ignore[attr-defined]
        self.found += [Use(path, place, arguments, names) for path in paths if "." in path]

    def note_fields(self, node: ast.expr, answer: ast.expr, names: Iterable[ast.expr]) -> list[str]:
        paths = [path for path in self.resolve(answer) if path.endswith("()")]
        fields = [f"{path}.{text}" for path in paths for name in names for text in self.literals(name)]
        self.note(node, fields)
        return fields

    def bind(self, target: ast.expr, value: ast.expr) -> None:
        target = target.elts[0] if isinstance(target, ast.Tuple) else target
        if isinstance(target, ast.Name):
            self.paths[target.id], self.texts[target.id] = self.resolve(value), self.literals(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.note(node, self.resolve(node))
        if not isinstance(node.value, ast.Attribute):
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.note_fields(node, node.value, [node.slice])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, arguments = _name(node.func), node.args
        inner: list[ast.AST] = [*arguments, *node.keywords]
        if name == "getattr":
            self.note(node, self.resolve(node))
            self.optional |= set(self.resolve(node)) if len(arguments) > 2 else set()
        elif name in HELPERS and arguments:
            self.note_call(node, self.resolve(arguments[0]), HELPERS[name] - 1)
        elif name == "get_first_number":
            self.optional |= set(self.note_fields(node, arguments[0], arguments[1:]))
        elif name == "get" and isinstance(node.func, ast.Attribute):
            self.optional |= set(self.note_fields(node, node.func.value, arguments[:1]))
        else:
            self.note_call(node, self.resolve(node.func), 0)
        if isinstance(node.func, ast.Attribute):
            inner.append(node.func.value)
        for each in inner:
            self.visit(each)

    def note_call(self, node: ast.Call, paths: list[str], more: int) -> None:
        is_countable = not any(isinstance(each, ast.Starred) for each in node.args)
        self.note(node, paths, len(node.args) + more if is_countable else None, node.keywords)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        self.generic_visit(node)
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is not None and not isinstance(target, ast.Tuple):
            self.bind(target, node.value)

    visit_AnnAssign = visit_Assign

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self.bind(node.target, node.iter)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for each in node.generators:
            self.visit(each)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outside = dict(self.paths), dict(self.texts)
        self.generic_visit(node)
        self.paths, self.texts = outside


def _known(name: str) -> list[str]:
    return [KNOWN[name]] if name in KNOWN else []


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
