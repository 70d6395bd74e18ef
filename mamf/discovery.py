"""Entry points -> backends and kernels by name, loaded only when asked for.

A third party adds an adapter by declaring an entry point in its own distribution (groups ``mamf.backends`` and
``mamf.kernels``); ``package.module:Class`` in place of a name tries one without installing it.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from mamf.backend import Backend, Unavailable
from mamf.errors import MamfError, UnavailableError, UnknownNameError, UsageError
from mamf.kernel import AnyKernel
from mamf.operation import Operation
from mamf.operations.attention.kernel import AttentionKernel
from mamf.operations.matmul.kernel import MatmulKernel, MatmulProblem

BACKENDS = "mamf.backends"
OPERATIONS = "mamf.operations"
KERNELS = "mamf.kernels"
ATTENTION_KERNELS = "mamf.attention_kernels"
_ALGORITHM = re.compile(r"(.+)\[(\d+)\]")
_INSTALL = "run 'pip install -e .' in mamf's checkout"
Contract = TypeVar("Contract")


@dataclass(frozen=True)
class BackendStatus:
    """A backend as ``mamf backends`` lists it: its devices' names, or why there are none."""

    name: str
    devices: tuple[str, ...] = ()
    unavailable: Unavailable | None = None
    is_accelerator: bool = True


def registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name. Raises UsageError when there are none, or when two distributions claim one."""
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=group):
        known = found.setdefault(point.name, point)
        if known.value != point.value:
            raise UsageError(
                f"{group} {point.name!r} is claimed by {_origin(known)} and by {_origin(point)}: uninstall one of them"
            )
    if not found:
        raise UsageError(f"mamf is not installed, so it finds no {group.removeprefix('mamf.')}: {_INSTALL}")
    return found


def _origin(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist else "an unknown distribution"
    return f"{distribution} ({point.value})"


def _load(point: EntryPoint, contract: type[Contract]) -> type[Contract]:
    try:
        loaded = point.load()
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"{point.name}: {point.value} cannot be loaded ({error}); if files moved, {_INSTALL} again"
        ) from error
    return _checked(loaded, contract, point.value)


def _checked(loaded: Any, contract: type[Contract], where: str) -> type[Contract]:
    if not (isinstance(loaded, type) and issubclass(loaded, contract)):
        raise UsageError(f"{where} is not a subclass of mamf's {contract.__name__}")
    return loaded


def _by_name(group: str, what: str, name: str, contract: type[Contract]) -> type[Contract]:
    if ":" in name:
        module, _, attribute = name.partition(":")
        try:
            return _checked(getattr(importlib.import_module(module), attribute), contract, name)
        except (ImportError, AttributeError) as error:
            raise UsageError(f"{what} {name!r} cannot be loaded: {error}") from error
    points = registered(group)
    if name not in points:
        raise UnknownNameError(what, name, points)
    return _load(points[name], contract)


def backend_class(name: str) -> type[Backend]:
    """Raises UnknownNameError, or UsageError when its module cannot be loaded."""
    return _by_name(BACKENDS, "backend", name, Backend)  # type: ignore[type-abstract]


def kernel(name: str) -> MatmulKernel:
    """A kernel by name, or one of its algorithms: ``cublaslt[3]``.

    Raises UnknownNameError, or UsageError when its module cannot be loaded or it has no algorithms to choose from.
    """
    algorithm = _ALGORITHM.fullmatch(name)
    base, rank = algorithm.groups() if algorithm else (name, None)
    kind: Any = _by_name(KERNELS, "kernel", base, MatmulKernel)  # type: ignore[type-abstract]
    try:
        return kind() if rank is None else kind(int(rank))  # type: ignore[no-any-return]
    except TypeError:
        raise UsageError(f"kernel {base} has no algorithms to choose from: leave [{rank}] out") from None


def operation(name: str) -> Operation[Any, Any]:
    """A registered operation. Raises UnknownNameError, or UsageError when its module cannot be loaded."""
    points = registered(OPERATIONS)
    if name not in points:
        raise UnknownNameError("operation", name, points)
    return _load(points[name], Operation)()  # type: ignore[type-abstract]


def kernel_of(of: Operation[Any, Any], name: str) -> AnyKernel:
    """A kernel of an operation by name, or ``package.module:Class``. Raises UnknownNameError or UsageError."""
    return _by_name(of.kernel_group, f"{of.name} kernel", name, of.kernel_type)()


def kernel_names(of: Operation[Any, Any]) -> list[str]:
    """The registered kernels of an operation. Raises UsageError when there are none."""
    if not entry_points(group=of.kernel_group):
        raise UsageError(
            f"nobody provides a kernel of {of.name}: declare one in the entry point group {of.kernel_group}"
        )
    return sorted(registered(of.kernel_group))


def attention_kernel(name: str) -> AttentionKernel:
    """Raises UnknownNameError, or UsageError when its module cannot be loaded."""
    return _by_name(ATTENTION_KERNELS, "attention kernel", name, AttentionKernel)()  # type: ignore[type-abstract]


def backend_statuses() -> list[BackendStatus]:
    """Every registered backend, accelerators first, each with its devices or the reason why it has none."""
    statuses = [_status(name) for name in sorted(registered(BACKENDS))]
    return sorted(statuses, key=lambda status: not status.is_accelerator)


def _status(name: str) -> BackendStatus:
    try:
        kind = backend_class(name)
        reason = kind.unavailable()
        if reason is not None:
            return BackendStatus(name, unavailable=reason, is_accelerator=kind.is_accelerator)
        devices = tuple(kind.device_name(index) for index in range(kind.device_count()))
        return BackendStatus(name, devices, is_accelerator=kind.is_accelerator)
    except MamfError as error:
        return BackendStatus(name, unavailable=Unavailable("it cannot be loaded", str(error)))


def open_backend(name: str = "auto", index: int | None = 0) -> Backend:
    """Open a device. ``auto`` takes the first available accelerator, else the CPU; an ``index`` of None the one that
    this process uses. Raises UnavailableError.
    """
    if name != "auto":
        return _opened(backend_class(name), index)
    for status in backend_statuses():
        if status.unavailable is None:
            return _opened(backend_class(status.name), index)
    raise UnavailableError("no backend is available; 'mamf backends' says why")


def _opened(kind: type[Backend], index: int | None) -> Backend:
    # What cannot be used says so itself, before its library is asked anything else.
    if index is None:
        index = 0 if kind.unavailable() else kind.current_index()
    return kind(index)


def kernel_for(backend: Backend, problem: MatmulProblem, name: str = "auto") -> MatmulKernel:
    """The named kernel, or the first that can do this problem. Raises UnavailableError or UnknownNameError."""
    if name != "auto":
        chosen = kernel(name)
        reason = chosen.unavailable(backend)
        if reason is not None:
            raise UnavailableError(f"kernel {name} is not available on {backend.name}: {reason}")
        return chosen
    candidates = [kernel(name) for name in sorted(registered(KERNELS))]
    usable = [candidate for candidate in candidates if candidate.is_default and candidate.unavailable(backend) is None]
    for candidate in usable:
        if candidate.unsupported(backend, problem) is None:
            return candidate
    # None fits: the reason that says most is of the kernel that has the dtype at all.
    reasons = [candidate.unsupported(backend, problem) or "" for candidate in usable]
    telling = [reason for reason in reasons if "has no dtype" not in reason]
    raise UnavailableError((telling or reasons or ["no kernel is available"])[0])
