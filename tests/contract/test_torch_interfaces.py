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
from adapter_uses import all_uses
from check_fakes import takes
from fake_interfaces import installations, parameters
from simulated_vendors import SimulatedTorch

from mamf.plugins.discovery import load_backend_class

VENDORS = ("cuda", "rocm", "xpu", "hpu", "mps")
USES = [use for use in all_uses() if use.path.startswith("torch.")]
IS_NEWEST_TORCH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
needs_newest_torch = pytest.mark.skipif(not IS_NEWEST_TORCH, reason="older than torch 2.13, which has all of it")
NOT_IN_TORCH = {"torch.xpu._sleep"}
PROPERTIES = {
    "torch.cuda.get_device_properties": "_CudaDeviceProperties",
    "torch.xpu.get_device_properties": "_XpuDeviceProperties",
}
# torch's stub does not declare these fields, but torch.numa.binding reads them.
UNDECLARED = {"_CudaDeviceProperties": {"pci_bus_id", "pci_device_id", "pci_domain_id"}}


def attribute(path):
    """Return the object that a dotted path names. The path begins with torch. Raises AttributeError."""
    found = torch
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def has_attribute(path):
    try:
        attribute(path)
    except AttributeError:
        return False
    return True


def simulated_torch(vendor):
    (found,) = (each for each in installations(vendor).attributes.values() if isinstance(each, SimulatedTorch))
    return found


def declared_fields(kind):
    """Return the fields of a C++ class: those that torch's stub declares, and those in ``UNDECLARED``."""
    stub = (Path(torch.__file__).parent / "_C" / "__init__.pyi").read_text()
    body = stub.partition(f"class {kind}:\n")[2].partition("\nclass ")[0]
    fields = {line.partition(":")[0].strip() for line in body.splitlines() if line.startswith("    ")}
    return fields | UNDECLARED.get(kind, set())


def fits(use):
    """Return whether torch supports a use, as far as torch shows that without a device."""
    path, _, field = use.path.partition("().")
    if field and path in PROPERTIES:
        return field in declared_fields(PROPERTIES[path])
    try:
        found = attribute(path)
        if field and not isinstance(found, type):
            return True  # the result of the function is known only on a device
        found = getattr(found, field) if field else found
        # A method that is looked up on its class takes the object as an additional argument.
        call = replace(use, arguments=use.arguments + bool(field)) if use.arguments is not None else use
        return takes(inspect.signature(found), call) if callable(found) else True
    except AttributeError:
        return False
    except ValueError:  # written in C, without a signature
        return True


def misfits(found):
    return [f"{use.place}: {use.path} ({use.arguments} arguments)" for use in found if not fits(use)]


@needs_newest_torch
def test_torch_has_whatever_the_adapters_use():
    used = [use for use in USES if not use.path.startswith("torch.hpu") and use.path not in NOT_IN_TORCH]
    assert len(used) > 100
    assert misfits(used) == []


def only_what_is_taken(fake, real):
    """Return whether the real function accepts every call that the fake accepts."""
    offered, declared = parameters(fake), parameters(real)
    same = [name for name, _ in offered] == [name for name, _ in declared[: len(offered)]]
    return same and all(
        may_be_left_out or (index < len(offered) and not offered[index][1])
        for index, (_, may_be_left_out) in enumerate(declared)
    )


def simulated_functions(simulated, path="torch"):
    """Yield the dotted path of each function of a simulated torch, and the function."""
    for name, found in vars(simulated).items():
        if isinstance(found, SimpleNamespace):
            yield from simulated_functions(found, f"{path}.{name}")
        elif callable(found):
            yield f"{path}.{name}", found


@pytest.mark.parametrize("vendor", ["cuda", "rocm", "xpu", "mps"])
def test_a_simulated_torch_takes_only_what_torch_takes(vendor):
    found = dict(simulated_functions(simulated_torch(vendor)))
    assert len(found) >= 8
    fakes = {path: fake for path, fake in found.items() if IS_NEWEST_TORCH or has_attribute(path)}
    for path, fake in fakes.items():
        assert only_what_is_taken(fake, attribute(path)), path


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_simulated_device_changes_its_adapter_and_nothing_of_torch(vendor):
    adapter = load_backend_class(vendor)
    changed = [(owner, name) for owner, name in installations(vendor).attributes]
    module = sys.modules[adapter.__module__]
    driver = [(module, "_load_driver")] if vendor == "cuda" else []
    assert changed == [(module, "torch"), (adapter, "open_device"), *driver]
