"""Which kernels are measured: those that are named, or all that are registered and can be used on a device.

A registered kernel that is broken is warned of and left out; one that is asked for by name is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mamf.backend import Backend
from mamf.errors import UnavailableError, UnknownNameError, UnsupportedError, UsageError
from mamf.kernel import AnyKernel, Kernel
from mamf.limits import require_some
from mamf.operation import Operation
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem
from mamf.plugins.contracts import guarded_attribute
from mamf.plugins.discovery import (
    OPERATIONS,
    entry_points,
    is_path,
    kernel,
    kernel_class,
    kernel_names,
    kernel_of,
    left_out_if_broken,
    operation,
    registered,
)

AnyOperation = Operation[Any, Any]


def chosen_kernels(
    of: AnyOperation, backend: Backend, names: Sequence[str] | None = None
) -> list[tuple[str, AnyKernel]]:
    """The named kernels of an operation, or all that can be used here, each with the name that it is asked for by.

    A kernel that is named in two ways is there once. Raises UnavailableError when there is none, or a named one cannot
    be used here; PluginError when a named one is broken.
    """
    if names is None:
        return _available(of, backend)
    require_some("kernels", names, str)
    chosen: dict[str, tuple[str, AnyKernel]] = {}
    for name in names:
        each = kernel_of(of, name)
        require_available(name, each, backend)
        chosen.setdefault(each.name, (name, each))
    return list(chosen.values())


def _available(of: AnyOperation, backend: Backend) -> list[tuple[str, AnyKernel]]:
    found, reasons = [], []
    for name, each in _registered(of):
        with left_out_if_broken():
            unavailable = each.unavailable(backend)
            if unavailable is None:
                found.append((name, each))
            else:
                reasons.append(f": {name}: {unavailable}")
    if not found:
        raise UnavailableError(f"no kernel of {of.name} is available on {backend.name}{''.join(reasons[:1])}")
    return found


def _registered(of: AnyOperation) -> Iterator[tuple[str, AnyKernel]]:
    """Every registered kernel that can be loaded."""
    for name in kernel_names(of):
        with left_out_if_broken():
            yield name, kernel_of(of, name)


def operation_of(name: str) -> AnyOperation:
    """The operation that a kernel is of. Raises UnknownNameError for a name that none has, UsageError for one that
    several have, PluginError where it cannot be loaded.
    """
    if is_path(name):
        return operation(guarded_attribute(kernel_class(name), Kernel, "operation", f"kernel {name}"))
    base = name.partition("[")[0]
    kernels: dict[str, set[str]] = {}
    for of in registered(OPERATIONS):
        with left_out_if_broken():
            kernels[of] = {point.name for point in entry_points(operation(of).kernel_group)}
    having = [of for of, names in kernels.items() if base in names]
    if not having:
        raise UnknownNameError("kernel", name, set().union(*kernels.values()))
    if len(having) > 1:
        raise UsageError(f"{name} is a kernel of {' and of '.join(sorted(having))}: say which by --operation")
    return operation(having[0])


def require_available(name: str, chosen: AnyKernel, backend: Backend) -> None:
    """Raises UnavailableError."""
    reason = chosen.unavailable(backend)
    if reason is not None:
        raise UnavailableError(f"kernel {name} is not available on {backend.name}: {reason}")


def kernel_for(backend: Backend, problem: MatmulProblem, name: str = "auto") -> MatmulKernel:
    """The named kernel of a product, or the first that can do this problem. Raises UnavailableError, UnknownNameError
    or PluginError.
    """
    if name != "auto":
        chosen = kernel(name)
        require_available(name, chosen, backend)
        return chosen
    return _default(backend, _usable(backend, problem, lambda each: each.is_default))


def kernels_for(backend: Backend, problem: MatmulProblem, names: Sequence[str] | None = None) -> list[MatmulKernel]:
    """The kernels that a search for a ceiling tries: the named ones, or the default and all that are tried unasked.

    Raises UnavailableError, UnknownNameError, UnsupportedError or PluginError when a named one cannot be used.
    """
    if names is None:
        usable = _usable(backend, problem, lambda each: each.is_default or each.is_tried_unasked)
        default = _default(backend, usable)
        others = (each for each, reason in usable if reason is None and each.is_tried_unasked)
        return [default, *(other for other in others if other.name != default.name)]
    require_some("kernels", names, str)
    chosen = [kernel_for(backend, problem, name) for name in dict.fromkeys(names)]
    for each in chosen:
        reason = each.unsupported(backend, problem)
        if reason:
            raise UnsupportedError(reason)
    return chosen


def _usable(
    backend: Backend, problem: MatmulProblem, is_wanted: Callable[[MatmulKernel], bool]
) -> list[tuple[MatmulKernel, str | None]]:
    """The wanted kernels of a product that run here, each with the reason why it cannot do this problem."""
    found: list[tuple[MatmulKernel, str | None]] = []
    kernels: Any = _registered(operation(MatmulProblem.operation))
    for _, each in kernels:
        with left_out_if_broken():
            if is_wanted(each) and each.unavailable(backend) is None:
                found.append((each, each.unsupported(backend, problem)))
    return found


def _default(backend: Backend, usable: Sequence[tuple[MatmulKernel, str | None]]) -> MatmulKernel:
    reasons = []
    for each, reason in usable:
        if each.is_default:
            if reason is None:
                return each
            reasons.append(reason)
    # None fits: the reason that says most is of the kernel that has the dtype at all.
    telling = [reason for reason in reasons if "has no dtype" not in reason]
    none = f"no kernel of products that is chosen unasked runs on {backend.name}: name one"
    raise UnavailableError((telling or reasons or [none])[0])


def installed_kernel(name: str) -> MatmulKernel:
    """A kernel by the name that a log gives it. Raises UsageError for one that would have to be imported: a log is
    somebody else's, and nothing is imported because it says so.
    """
    if is_path(name):
        raise UsageError(
            f"the log names kernel {name}, which is not installed: install what provides it, or measure a ceiling "
            "here with 'mamf find'"
        )
    return kernel(name)
