"""Test adapters and simulated torch modules against the installed torch.

torch.hpu comes with habana_frameworks, which no package index has. So these tests cannot check its simulated module.
"""

import inspect
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from adapter_uses import list_all_uses
from check_fakes import accepts_call
from fake_interfaces import installations, parameters
from simulated_vendors import SimulatedTorch

from mamf.plugins.discovery import load_backend_class

VENDORS = ("cuda", "rocm", "xpu", "hpu", "mps")
USES = [use for use in list_all_uses() if use.path.startswith("torch.")]
IS_NEWEST_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_newest_torch = pytest.mark.skipif(
    not IS_NEWEST_TORCH, reason="a torch older than 2.13 lacks some names that adapters use"
)
NOT_IN_TORCH = {"torch.xpu._sleep"}
PROPERTIES = {
    "torch.cuda.get_device_properties": "_CudaDeviceProperties",
    "torch.xpu.get_device_properties": "_XpuDeviceProperties",
}
# torch's stub does not declare these fields, but torch.numa.binding reads them.
UNDECLARED = {"_CudaDeviceProperties": {"pci_bus_id", "pci_device_id", "pci_domain_id"}}


def resolve_attribute(path):
    """Return the object that a dotted path names. The path begins with torch. Raises AttributeError."""
    value = torch
    for name in path.split(".")[1:]:
        value = getattr(value, name)
    return value


def has_attribute(path):
    try:
        resolve_attribute(path)
    except AttributeError:
        return False
    return True


def get_simulated_torch(vendor):
    (simulated,) = (each for each in installations(vendor).attributes.values() if isinstance(each, SimulatedTorch))
    return simulated


def list_declared_fields(kind):
    """Return the fields of a C++ class: those that torch's stub declares, and those in ``UNDECLARED``."""
    stub = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    body = stub.partition(f"class {kind}:\n")[2].partition("\nclass ")[0]
    fields = {line.partition(":")[0].strip() for line in body.splitlines() if line.startswith("    ")}
    return fields | UNDECLARED.get(kind, set())


def is_supported(use):
    """Return whether torch supports a use, as far as torch shows that without a device."""
    path, _, field = use.path.partition("().")
    if field and path in PROPERTIES:
        return field in list_declared_fields(PROPERTIES[path])
    try:
        value = resolve_attribute(path)
        if field and not isinstance(value, type):
            return True  # the result of the function is known only on a device
        value = getattr(value, field) if field else value
        # A method that is looked up on its class takes the object as an additional argument.
        call = replace(use, arguments=use.arguments + bool(field)) if use.arguments is not None else use
        return accepts_call(inspect.signature(value), call) if callable(value) else True
    except AttributeError:
        return False
    except ValueError:  # written in C, without a signature
        return True


def list_unsupported_uses(uses):
    return [f"{use.place}: {use.path} ({use.arguments} arguments)" for use in uses if not is_supported(use)]


@needs_newest_torch
def test_torch_has_all_names_that_the_adapters_use():
    uses = [use for use in USES if not use.path.startswith("torch.hpu") and use.path not in NOT_IN_TORCH]
    assert len(uses) > 100
    assert list_unsupported_uses(uses) == []


def accepts_only_supported_calls(fake, real):
    """Return whether the real function accepts every call that the fake accepts."""
    offered, declared = parameters(fake), parameters(real)
    has_same_names = [name for name, _ in offered] == [name for name, _ in declared[: len(offered)]]
    return has_same_names and all(
        is_optional or (index < len(offered) and not offered[index][1])
        for index, (_, is_optional) in enumerate(declared)
    )


def yield_simulated_functions(simulated, path="torch"):
    """Yield the dotted path of each function of a simulated torch, and the function."""
    for name, value in vars(simulated).items():
        if isinstance(value, SimpleNamespace):
            yield from yield_simulated_functions(value, f"{path}.{name}")
        elif callable(value):
            yield f"{path}.{name}", value


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "xpu", "mps"])
def test_a_simulated_torch_accepts_only_calls_that_torch_accepts(vendor):
    functions = dict(yield_simulated_functions(get_simulated_torch(vendor)))
    assert len(functions) >= 8
    fakes = {path: fake for path, fake in functions.items() if IS_NEWEST_TORCH or has_attribute(path)}
    for path, fake in fakes.items():
        assert accepts_only_supported_calls(fake, resolve_attribute(path)), path


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_simulated_device_changes_its_adapter_and_nothing_of_torch(vendor):
    adapter = load_backend_class(vendor)
    changed = [(owner, name) for owner, name in installations(vendor).attributes]
    module = sys.modules[adapter.__module__]
    driver = [(module, "_load_driver")] if vendor == "cuda" else []
    assert changed == [(module, "torch"), (adapter, "open_device"), *driver]
