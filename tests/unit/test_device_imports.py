"""Test that every name that the tests in tests/device import exists.

Those tests are skipped on a machine without an accelerator, where a wrong import would stay unnoticed.
"""

import ast
import importlib
from pathlib import Path

import pytest

DEVICE_TESTS = Path(__file__).resolve().parents[1] / "device"


def find_imported_names(path):
    """Yield each imported module with the name imported from it, or None if the whole module is imported.

    Names from modules in the folder itself are left out.
    """
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not (DEVICE_TESTS / f"{node.module}.py").exists():
            yield from ((node.module, alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted(DEVICE_TESTS.glob("*.py")), ids=lambda path: path.stem)
def test_every_name_that_a_device_test_imports_exists(path):
    names = list(find_imported_names(path))
    missing = [
        f"{module}: {name}" for module, name in names if name and not hasattr(importlib.import_module(module), name)
    ]
    assert names
    assert missing == []
