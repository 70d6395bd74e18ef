"""Chooses matmul kernels: named ones, the default for a problem, or those that a search tries."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from mamf.backend import Backend
from mamf.errors import UnavailableError, UnknownNameError, UnsupportedError, UsageError, require_some
from mamf.operations.matmul.operation import Matmul
from mamf.operations.matmul.shapes import MatmulKernel, MatmulProblem
from mamf.plugins.discovery import choose_kernels, is_path, make_kernel, registered_kernels, skip_if_broken


def kernel(name: str) -> MatmulKernel:
    """Return the matmul kernel with this name, such as ``torch.mm``, or one of its algorithms, such as ``cublaslt[3]``.

    Raises UnknownNameError, UsageError if it has no algorithms to choose from, or PluginError if it is broken.
    """
    return make_kernel(Matmul(), name)  # type: ignore[return-value]


def kernel_for(backend: Backend, problem: MatmulProblem, name: str = "auto") -> MatmulKernel:
    """Return the named matmul kernel, or for ``auto`` the first default kernel that supports this problem.

    Raises UnavailableError, UnknownNameError or PluginError.
    """
    if name != "auto":
        return choose_kernels(Matmul(), backend, [name])[0][1]  # type: ignore[return-value]
    return _choose_default(backend, _find_usable(backend, problem, lambda each: each.is_default))


def kernels_for(backend: Backend, problem: MatmulProblem, names: Sequence[str] | None = None) -> list[MatmulKernel]:
    """Return the kernels that a search for a ceiling tries: the named ones, or all that are tried by default.

    Raises UnavailableError, UnknownNameError, UnsupportedError or PluginError if a named kernel cannot be used.
    """
    if names is None:
        usable = _find_usable(backend, problem, lambda each: each.is_default or each.is_tried_unasked)
        others = [each for each, reason in usable if reason is None and each.is_tried_unasked]
        has_default = any(each.is_default and reason is None for each, reason in usable)
        default = others[0] if others and not has_default else _choose_default(backend, usable)
        return [default, *(other for other in others if other.name != default.name)]
    require_some("kernels", names, str)
    chosen = [kernel_for(backend, problem, name) for name in dict.fromkeys(names)]
    for each in chosen:
        reason = each.unsupported(backend, problem)
        if reason:
            raise UnsupportedError(reason)
    return chosen


def _find_usable(
    backend: Backend, problem: MatmulProblem, is_wanted: Callable[[MatmulKernel], bool]
) -> list[tuple[MatmulKernel, str | None]]:
    """Return the available kernels that are wanted, each with why it does not support this problem, or None."""
    found: list[tuple[MatmulKernel, str | None]] = []
    kernels: Any = registered_kernels(Matmul())
    for _, each in kernels:
        with skip_if_broken():
            if is_wanted(each) and each.unavailable(backend) is None:
                found.append((each, each.unsupported(backend, problem)))
    return found


def _choose_default(backend: Backend, usable: Sequence[tuple[MatmulKernel, str | None]]) -> MatmulKernel:
    reasons = []
    for each, reason in usable:
        if each.is_default:
            if reason is None:
                return each
            reasons.append(reason)
    # No kernel supports the problem. The most specific reason comes from a kernel that supports the dtype.
    specific = [reason for reason in reasons if "; it takes" not in reason]
    none = f"no default matmul kernel runs on {backend.name}: name one"
    raise UnavailableError((specific or reasons or [none])[0])


def installed_kernel(name: str) -> MatmulKernel:
    """Return the kernel that a log names. Raises UsageError if it is not installed.

    A log may come from anyone, so nothing is imported only because a log names it.
    """
    if not is_path(name):
        with suppress(UnknownNameError):
            return kernel(name)
    raise UsageError(
        f"the log names kernel {name}, which is not installed: install what provides it, or name its class "
        "(package.module:Class)"
    )


def reference_kernels(
    names: Iterable[str], given: Iterable[str] = (), warn: Callable[[str], object] = lambda remark: None
) -> dict[str, MatmulKernel]:
    """Return the kernels that ceilings were measured with, by their names in logs.

    ``given``: kernels that the caller names, such as ``package.module:Class``, for ``names`` that are not installed.
    ``warn``: called with a remark for each kernel that is neither given nor installed. Its ceiling still gives shares,
    but its matmul is not measured with the rows. Raises UsageError for a given kernel that has no ceiling.
    """
    wanted, found = set(names), {each.name: each for each in map(kernel, given)}
    if unused := found.keys() - wanted:
        raise UsageError(f"no ceiling was measured with {min(unused)}; theirs: {', '.join(sorted(wanted)) or 'none'}")
    for name in sorted(wanted - found.keys()):
        try:
            found[name] = installed_kernel(name)
        except UsageError:
            warn(
                f"kernel {name} of the ceiling is not installed, so the drift of the device is not measured beside the "
                "rows: --ceiling-kernel package.module:Class names it"
            )
    return found
