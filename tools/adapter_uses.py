"""List the names of torch and of the vendors' libraries that the adapters and some kernels use.

This module reads the syntax trees of the files and imports none of them. It knows the names that adapters give a
library (``nvml``, ``smi``, ``hlml``, ``vendor``) and the helpers through which they call it (``call_or_none``,
``get_first_number``). It follows the results of calls through variables. For example, it lists ``rates.gpu`` as
``pynvml.nvmlDeviceGetUtilizationRates().gpu`` if ``rates`` is the result of that call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: The names that have the same meaning in all adapters, as variables or as attributes, and the dotted path of each.
PATHS_BY_NAME = {
    "amdsmi": "amdsmi",
    "hlml": "pyhlml",
    "nvml": "pynvml",
    "properties": "vendor.get_device_properties()",
    "pynvml": "pynvml",
    "smi": "amdsmi",
    "torch": "torch",
    "vendor": "vendor",
}
#: By file: the parameters that contain a function of a library, and the dotted path of that function.
PATHS_BY_PARAMETER = {"mamf/operations/attention/aiter.py": {"function": "aiter.flash_attn_func"}}
#: The helpers through which adapters call a library, and the number of arguments that each puts before the given
#: arguments: 1 for the handle of the device, or 0.
ADDED_ARGUMENTS_BY_HELPER = {"call_or_none": 1, "call_system_or_none": 0}
#: The files to search, and the modules that the name ``vendor`` can mean in each.
VENDORS_BY_FILE = {
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
    """One place where an adapter uses a name of a library.

    - ``path``: the dotted path of the name. ``()`` after a name means the result of calling it.
    - ``place``: the name of the file, and the line number.
    - ``arguments``: the number of positional arguments, if the name is called. None if it is not called, or if the call
      contains ``*arguments``.
    - ``keywords``: the names of the keyword arguments.
    - ``is_optional``: True if the adapter also works when the library lacks the name.
    """

    path: str
    place: str
    arguments: int | None = None
    keywords: tuple[str, ...] = ()
    is_optional: bool = False


def list_uses(file: str, text: str | None = None) -> list[Use]:
    """Return all uses in a file of the repository. ``text``: the content of the file; by default, read it."""
    walker = _Walker(file)
    walker.visit(ast.parse((ROOT / file).read_text() if text is None else text))
    uses = []
    for use in walker.uses:
        is_optional = any(use.path == path or use.path.startswith(f"{path}.") for path in walker.optional_paths)
        for path in _expand_vendor(use.path, VENDORS_BY_FILE[file]):
            uses.append(Use(path, use.place, use.arguments, use.keywords, is_optional))
    return uses


def list_all_uses() -> list[Use]:
    """Return the uses in all files of ``VENDORS_BY_FILE``."""
    return [use for file in VENDORS_BY_FILE for use in list_uses(file)]


def _expand_vendor(path: str, vendors: Iterable[str]) -> list[str]:
    """Return the paths that ``path`` can mean: if it begins with ``vendor``, one for each of ``vendors``."""
    head, _, rest = path.partition(".")
    return [f"{vendor}.{rest}" for vendor in vendors] if head == "vendor" else [path]


class _Walker(ast.NodeVisitor):
    """A visitor that collects the uses in one file, and the paths that are optional there."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.uses: list[Use] = []
        self.optional_paths: set[str] = set()
        # The paths that each variable can mean at the current position in the file.
        self.paths: dict[str, list[str]] = {name: [path] for name, path in PATHS_BY_PARAMETER.get(file, {}).items()}
        self.texts: dict[str, list[str]] = {}  # the strings that each variable can contain

    def list_paths(self, node: ast.expr) -> list[str]:
        """Return the paths that an expression can mean, or an empty list if it does not belong to a library."""
        match node:
            case ast.Name(name):
                return self.paths.get(name) or _look_up_known_name(name)
            case ast.Attribute(owner, name):
                return [f"{path}.{name}" for path in self.list_paths(owner)] or _look_up_known_name(name)
            case ast.Call(ast.Name("getattr"), [owner, name, *_]):
                return [f"{path}.{text}" for path in self.list_paths(owner) for text in self.list_texts(name)]
            case ast.Call(function, arguments):
                is_helper = _get_function_name(function) in ADDED_ARGUMENTS_BY_HELPER and arguments
                called = self.list_paths(arguments[0] if is_helper else function)
                return called if called == ["vendor"] else [f"{path}()" for path in called]
            case ast.IfExp(_, first, second) | ast.BoolOp(_, [first, second]):
                return self.list_paths(first) or self.list_paths(second)
        return []

    def list_texts(self, node: ast.expr) -> list[str]:
        """Return the strings that an expression can contain, as far as the file writes them out."""
        match node:
            case ast.Constant(str(text)):
                return [text]
            case ast.Name(name):
                return self.texts.get(name, [])
            case ast.Tuple(parts):
                return [text for part in parts for text in self.list_texts(part)]
            case ast.Dict(keys):
                return [text for key in keys if key for text in self.list_texts(key)]
            case ast.Call(ast.Attribute(owner, "items")):
                return self.list_texts(owner)
        return []

    def add_uses(
        self, node: ast.expr, paths: Iterable[str], arguments: int | None = None, keywords: Iterable[ast.keyword] = ()
    ) -> None:
        place = f"{Path(self.file).name}:{node.lineno}"
        names = tuple(keyword.arg or "" for keyword in keywords)
        self.uses += [Use(path, place, arguments, names) for path in paths if "." in path]

    def add_field_uses(self, node: ast.expr, result: ast.expr, names: Iterable[ast.expr]) -> list[str]:
        """Record a use of each field in ``names`` if ``result`` is the result of a call. Return their paths."""
        paths = [path for path in self.list_paths(result) if path.endswith("()")]
        fields = [f"{path}.{text}" for path in paths for name in names for text in self.list_texts(name)]
        self.add_uses(node, fields)
        return fields

    def bind_variable(self, target: ast.expr, value: ast.expr) -> None:
        target = target.elts[0] if isinstance(target, ast.Tuple) else target
        if isinstance(target, ast.Name):
            self.paths[target.id], self.texts[target.id] = self.list_paths(value), self.list_texts(value)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.add_uses(node, self.list_paths(node))
        if not isinstance(node.value, ast.Attribute):
            self.visit(node.value)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.add_field_uses(node, node.value, [node.slice])
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name, arguments = _get_function_name(node.func), node.args
        nodes_inside: list[ast.AST] = [*arguments, *node.keywords]
        if name == "getattr":
            self.add_uses(node, self.list_paths(node))
            self.optional_paths |= set(self.list_paths(node)) if len(arguments) > 2 else set()
        elif name in ADDED_ARGUMENTS_BY_HELPER and arguments:
            self.add_call_uses(node, self.list_paths(arguments[0]), ADDED_ARGUMENTS_BY_HELPER[name] - 1)
        elif name == "get_first_number":
            self.optional_paths |= set(self.add_field_uses(node, arguments[0], arguments[1:]))
        elif name == "get" and isinstance(node.func, ast.Attribute):
            self.optional_paths |= set(self.add_field_uses(node, node.func.value, arguments[:1]))
        else:
            self.add_call_uses(node, self.list_paths(node.func), 0)
        if isinstance(node.func, ast.Attribute):
            nodes_inside.append(node.func.value)
        for inner_node in nodes_inside:
            self.visit(inner_node)

    def add_call_uses(self, node: ast.Call, paths: list[str], added_arguments: int) -> None:
        """Record a call of a library.

        ``added_arguments``: by how much the number of its arguments exceeds that of ``node``.
        """
        has_fixed_count = not any(isinstance(argument, ast.Starred) for argument in node.args)
        self.add_uses(node, paths, len(node.args) + added_arguments if has_fixed_count else None, node.keywords)

    def visit_Assign(self, node: ast.Assign | ast.AnnAssign) -> None:
        self.generic_visit(node)
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if node.value is not None and not isinstance(target, ast.Tuple):
            self.bind_variable(target, node.value)

    visit_AnnAssign = visit_Assign

    def visit_For(self, node: ast.For | ast.comprehension) -> None:
        self.bind_variable(node.target, node.iter)
        self.generic_visit(node)

    visit_comprehension = visit_For

    def visit_ListComp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self.visit(generator)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)

    visit_SetComp = visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Visit a function. Forget its variables afterwards."""
        variables_outside = dict(self.paths), dict(self.texts)
        self.generic_visit(node)
        self.paths, self.texts = variables_outside


def _look_up_known_name(name: str) -> list[str]:
    return [PATHS_BY_NAME[name]] if name in PATHS_BY_NAME else []


def _get_function_name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
