"""Selects the kernels to measure: those requested by name, or all registered kernels that are available on a device.

A broken kernel raises an error if it was requested by name. Otherwise it is skipped with a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mamf.backend import Backend
from mamf.errors import UnavailableError, UnknownNameError, UsageError
from mamf.kernel import AnyKernel, Kernel
from mamf.limits import require_some
from mamf.operation import Operation
from mamf.plugins.contracts import check_attribute
from mamf.plugins.discovery import (
    OPERATIONS,
    entry_points,
    find_registered,
    is_path,
    load_kernel_class,
    make_kernel,
    operation,
    registered_kernel_names,
    skip_if_broken,
)

AnyOperation = Operation[Any, Any]


def choose_kernels(
    of: AnyOperation, backend: Backend, names: Sequence[str] | None = None
) -> list[tuple[str, AnyKernel]]:
    """Return the named kernels of an operation, or all available ones, each with the name that was requested.

    A kernel with two names is returned once. Raises UnavailableError if a named kernel is unavailable or none is
    available, and PluginError if a named kernel is broken.
    """
    if names is None:
        return _find_available(of, backend)
    require_some("kernels", names, str)
    chosen: dict[str, tuple[str, AnyKernel]] = {}
    for name in names:
        each = make_kernel(of, name)
        if reason := each.unavailable(backend):
            raise UnavailableError(f"kernel {name} is not available on {backend.name}: {reason}")
        chosen.setdefault(each.name, (name, each))
    return list(chosen.values())


def _find_available(of: AnyOperation, backend: Backend) -> list[tuple[str, AnyKernel]]:
    found, reasons = [], []
    for name, each in registered_kernels(of):
        with skip_if_broken():
            unavailable = each.unavailable(backend)
            if unavailable is None:
                found.append((name, each))
            else:
                reasons.append(f": {name}: {unavailable}")
    if not found:
        raise UnavailableError(f"no kernel of {of.name} is available on {backend.name}{''.join(reasons[:1])}")
    return found


def registered_kernels(of: AnyOperation) -> Iterator[tuple[str, AnyKernel]]:
    """Yield the name and kernel of all registered kernels that can be loaded."""
    for name in registered_kernel_names(of):
        with skip_if_broken():
            yield name, make_kernel(of, name)


def find_operation(name: str) -> AnyOperation:
    """Find the operation of a kernel. Raises UnknownNameError for an unknown name, UsageError if several operations
    have a kernel with this name, and PluginError if the kernel cannot be loaded.
    """
    if is_path(name):
        return operation(check_attribute(load_kernel_class(name), Kernel, "operation", f"kernel {name}"))
    base = name.partition("[")[0]
    kernels: dict[str, set[str]] = {}
    for of in find_registered(OPERATIONS):
        with skip_if_broken():
            kernels[of] = {point.name for point in entry_points(operation(of).kernel_group)}
    having = [of for of, names in kernels.items() if base in names]
    if not having:
        raise UnknownNameError("kernel", name, set().union(*kernels.values()))
    if len(having) > 1:
        raise UsageError(f"{name} is a kernel of {' and '.join(sorted(having))}: choose one with --operation")
    return operation(having[0])
