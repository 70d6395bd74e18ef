"""Finds backends, operations and kernels by entry point, loads them on request and enforces their contracts.

A third party adds an adapter by declaring an entry point in its own distribution (groups ``mamf.backends``,
``mamf.operations``, ``mamf.kernels`` and the groups of other operations); ``package.module:Class`` instead of a name
uses one without installing it. All errors while loading or creating a plugin are PluginErrors that name it.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from mamf.backend import Backend, Unavailable
from mamf.errors import (
    MamfError,
    PluginError,
    PluginWarning,
    UnavailableError,
    UnknownNameError,
    UsageError,
    describe_error,
    plugin_errors,
    require_known,
    require_some,
)
from mamf.kernel import AnyKernel, Kernel
from mamf.operation import Operation
from mamf.plugins.contracts import CheckedClock, attribute_errors_to, check_attribute, enforce_contract, guard_method

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = "mamf.backends"
OPERATIONS = "mamf.operations"
KERNELS = "mamf.kernels"
ATTENTION_KERNELS = "mamf.attention_kernels"
_BRACKETED = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")
_ALGORITHM = re.compile(r"(.+)\[(\d{1,9})\]")
_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_INSTALL = "run 'pip install -e .' in mamf's checkout"
Contract = TypeVar("Contract")
#: An import that takes this long is named, because nothing else shows what a command waits for.
_LONG_IMPORT_SECONDS = 15.0
_LOADED_BY_PATH = weakref.WeakSet[type[AnyKernel]]()


@dataclass(frozen=True)
class BackendStatus:
    """A backend as ``mamf backends`` lists it: the names of its devices, or why there are none."""

    name: str
    devices: tuple[str, ...] = ()
    unavailable: Unavailable | None = None
    is_accelerator: bool = True
    is_generic: bool = False
    fault: PluginError | None = None


def entry_points(group: str) -> Sequence[EntryPoint]:
    """The entry points that installed distributions declare in a group."""
    return _read_entry_points(group, tuple(sys.path))


@functools.lru_cache  # read from a file per distribution, and needed many times in a command
def _read_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # --help needs none

    return tuple(entry_points(group=group))


def find_registered(group: str) -> dict[str, EntryPoint]:
    """Entry points of a group by name. Raises UsageError if there are none, or if two distributions claim a name."""
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


def is_loaded_by_path(kernel: AnyKernel) -> bool:
    """Whether a kernel's class was requested as ``package.module:Class`` and is not registered."""
    return type(kernel) in _LOADED_BY_PATH


def is_path(name: str) -> bool:
    """Whether a name is the path of a class (``package.module:Class``) and not a registered name."""
    return ":" in name


@contextmanager
def _watched_import(label: str) -> Iterator[None]:
    """Name a plugin whose import takes long; raise SystemExit if it ends the process by os._exit."""
    process, end = os.getpid(), os._exit

    def refuse(code: int) -> None:
        """Forked processes may end, and so may this one by mamf's own decision."""
        if os.getpid() != process or sys._getframe(1).f_globals.get("__name__", "").startswith("mamf."):
            end(code)
        raise SystemExit(f"os._exit({code}) while it is imported")

    line = f"still importing {label} after {_LONG_IMPORT_SECONDS:.0f} s"
    timer = threading.Timer(_LONG_IMPORT_SECONDS, warnings.warn, (line, PluginWarning))
    timer.daemon = True
    timer.start()
    os._exit = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end
        timer.cancel()


def _load(what: str, point: EntryPoint, contract: type[Contract]) -> type[Contract]:
    try:
        with _watched_import(f"{what} {point.name}"):
            loaded = point.load()
    except MamfError:
        raise
    except plugin_errors() as error:
        path = is_path(point.name)
        shown = repr(point.name) if path else f"{point.name}: {point.value}"
        own = point.value.partition(":")[0].partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != own:
            hint = f"; install {error.name}"
        else:
            hint = "" if path else f"; if files moved, {_INSTALL} again"
        raise PluginError(f"{what} {shown} cannot be loaded: {describe_error(error)}{hint}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, contract)):
        raise PluginError(f"{point.value} is not a subclass of mamf's {contract.__name__}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))  # type: ignore[attr-defined]
        raise PluginError(f"{point.value} is abstract: it does not define {missing}")
    return loaded


def _import(what: str, path: str, contract: type[Contract]) -> type[Contract]:
    if not _PATH.fullmatch(path):
        listed = "backends" if contract is Backend else "kernels"
        raise UsageError(f"{path!r} is not a {what}: write package.module:Class, or a name from 'mamf {listed}'")
    from importlib.metadata import EntryPoint

    return _load(what, EntryPoint(path, path, group=""), contract)


def _load_by_name(group: str, what: str, name: str, contract: type[Contract]) -> type[Contract]:
    if is_path(name):
        return _import(what, name, contract)
    points = find_registered(group)
    require_known((what, name, points))
    return _load(what, points[name], contract)


def backend_class(name: str) -> type[Backend]:
    """The class of a backend, by name or path. Raises UnknownNameError, UsageError for an invalid path, or PluginError
    if it cannot be loaded.
    """
    return _load_by_name(BACKENDS, "backend", name, Backend)  # type: ignore[type-abstract]


def kernel_class(path: str) -> type[AnyKernel]:
    """A kernel's class by ``package.module:Class``. Raises UsageError for an invalid path, or PluginError."""
    return _import("kernel", path, Kernel)  # type: ignore[type-abstract]


def _kernel(group: str, what: str, name: str, contract: type[Any]) -> Any:
    """A kernel, one of its algorithms, or a kernel with its argument in brackets."""
    algorithm, bracketed = _ALGORITHM.fullmatch(name), _BRACKETED.fullmatch(name)
    parts = algorithm or bracketed
    base, taken = parts.groups() if parts else (name, None)
    kind = _load_by_name(group, what, base, contract)
    label = f"{what} {name}"
    if taken is None or kind.takes:
        with attribute_errors_to(label, "creating it"):
            made = kind() if taken is None else kind(taken)
    elif algorithm is None:
        raise UsageError(f"{what} {base} takes no argument in brackets: leave [{taken}] out")
    else:
        try:
            with attribute_errors_to(label, "creating it", passes=(TypeError,)):
                made = kind(int(taken))
        except TypeError:
            raise UsageError(f"kernel {base} has no algorithms to choose from: leave [{taken}] out") from None
    made = enforce_contract(made, Kernel, label)
    points = {point.name: point.value for point in entry_points(group)}
    own = made.name.partition("[")[0]
    if is_path(base) and points.get(own, base) != base:
        raise UsageError(f"{label} calls itself {own}, as a registered kernel does: give its class another name")
    if is_path(base) and base not in points.values():
        _LOADED_BY_PATH.add(type(made))
    return made


def operation(name: str) -> Operation[Any, Any]:
    """A registered operation. Raises UnknownNameError, or PluginError if it is broken."""
    points = find_registered(OPERATIONS)
    require_known(("operation", name, points))
    kind: Any = _load("operation", points[name], Operation)  # type: ignore[type-abstract]
    label = f"operation {name}"
    with attribute_errors_to(label, "creating it"):
        made: Operation[Any, Any] = kind()
    if made.name != name:  # logs are read by this name
        raise PluginError(f"{label} is broken: its class calls it {made.name!r}, its entry point {name!r}")
    # Contract tests hold mamf's own; a guard at each of their calls would cost more than reading a log.
    return made if name in own_operations() else enforce_contract(made, Operation, label)


def own_operations() -> set[str]:
    """The names of mamf's own operations. Nothing is imported."""
    return {point.name for point in entry_points(OPERATIONS) if point.module.partition(".")[0] == "mamf"}


def kernel_of(of: Operation[Any, Any], name: str) -> AnyKernel:
    """A kernel of an operation by name or ``package.module:Class``, with an argument in brackets if it takes one
    (``torch[sdpa-flash]``), or one of its algorithms (``cublaslt[3]``).

    Raises UnknownNameError, UsageError if it has no algorithms to choose from, or PluginError if it is broken.
    """
    what = "kernel" if of.kernel_group == KERNELS else f"{of.name} kernel"
    return _kernel(of.kernel_group, what, name, of.kernel_type)  # type: ignore[no-any-return]


def is_own_kernel(of: Operation[Any, Any], name: str) -> bool:
    """Whether mamf itself has a kernel of this name; one of its algorithms counts too (``cublaslt[3]``)."""
    base = name.partition("[")[0]
    return any(
        (point.name, point.module.partition(".")[0]) == (base, "mamf") for point in entry_points(of.kernel_group)
    )


def kernel_names(of: Operation[Any, Any]) -> list[str]:
    """The registered kernels of an operation. Raises UsageError if there are none."""
    if not entry_points(group=of.kernel_group):
        raise UsageError(
            f"no installed package has a kernel for {of.name}: declare one in the entry point group {of.kernel_group}"
        )
    return sorted(find_registered(of.kernel_group))


def backend_statuses() -> list[BackendStatus]:
    """All registered backends, accelerators first, each with its devices or the reason why it has none."""
    statuses = [_backend_status(name) for name in sorted(find_registered(BACKENDS))]
    return sorted(statuses, key=lambda status: (not status.is_accelerator, status.is_generic))


def _backend_status(name: str) -> BackendStatus:
    try:
        kind = backend_class(name)
        ask = functools.partial(guard_method, kind, Backend, label=f"backend {name}")
        reason, is_accelerator = ask("unavailable")(), bool(kind.is_accelerator)
        if reason is not None:
            return BackendStatus(name, unavailable=reason, is_accelerator=is_accelerator)
        devices = tuple(map(ask("device_name"), range(ask("device_count")())))
        return BackendStatus(name, devices, is_accelerator=is_accelerator, is_generic=kind.is_generic)
    except PluginError as error:
        return BackendStatus(name, unavailable=Unavailable("it is broken", str(error)), fault=error)
    except MamfError as error:
        return BackendStatus(name, unavailable=Unavailable("it cannot be opened", str(error)))


def first_backend() -> str:
    """The backend that 'auto' chooses."""
    name = next((status.name for status in backend_statuses() if status.unavailable is None), None)
    if name is None:
        raise UnavailableError("no backend is available; 'mamf backends' says why")
    return name


def open_backend(name: str = "auto", index: int | None = 0) -> Backend:
    """Open a device. ``auto`` takes the first available accelerator, else the CPU, and warns about broken backends. If
    ``index`` is None, the device that this process already uses is opened.

    Raises UnavailableError if no backend or device is available, UnknownNameError, or PluginError for a named backend
    that is broken.
    """
    if name != "auto":
        return _open(name, index)
    statuses = backend_statuses()
    lacking = {_missing_module(status.fault) for status in statuses}
    if len(lacking) == 1 and (module := lacking.pop()):
        raise UnavailableError(f"no backend can be loaded without {module}: install it")
    for status in statuses:
        with skip_if_broken():
            if status.fault is not None:
                raise status.fault
            if status.unavailable is None:
                return _open(status.name, index)
    raise UnavailableError("no backend is available; 'mamf backends' says why")


def _missing_module(fault: PluginError | None) -> str | None:
    """The module whose absence is the fault of a plugin, or None."""
    cause = fault and fault.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None


def _open(name: str, index: int | None) -> Backend:
    kind, label = backend_class(name), f"backend {name}"
    with attribute_errors_to(label, "opening it"):
        if index is None:
            # Opening an unavailable backend raises its reason; its library must not be called before that.
            index = 0 if kind.unavailable() else guard_method(kind, Backend, "current_index", label)()
        backend = kind(index)
    guard_method(backend, Backend, "now", label)()
    object.__setattr__(backend, "now", CheckedClock(backend.now, label))
    return enforce_contract(backend, Backend, label)


@contextmanager
def skip_if_broken() -> Iterator[None]:
    """Skip a plugin that is broken and was not requested by name, with a warning."""
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error}; it is skipped", PluginWarning, stacklevel=3)


AnyOperation = Operation[Any, Any]


def choose_kernels(
    of: AnyOperation, backend: Backend, names: Sequence[str] | None = None
) -> list[tuple[str, AnyKernel]]:
    """The named kernels of an operation, or all that are available here, each with the name that was requested.

    A kernel that is named in two ways appears once. Raises UnavailableError if there is none or a named kernel is not
    available; PluginError if a named kernel is broken.
    """
    if names is None:
        return _find_available(of, backend)
    require_some("kernels", names, str)
    chosen: dict[str, tuple[str, AnyKernel]] = {}
    for name in names:
        each = kernel_of(of, name)
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
    """All registered kernels that can be loaded."""
    for name in kernel_names(of):
        with skip_if_broken():
            yield name, kernel_of(of, name)


def find_operation(name: str) -> AnyOperation:
    """The operation of a kernel. Raises UnknownNameError for an unknown name, UsageError for a name that several
    operations have, and PluginError if the kernel cannot be loaded.
    """
    if is_path(name):
        return operation(check_attribute(kernel_class(name), Kernel, "operation", f"kernel {name}"))
    base = name.partition("[")[0]
    kernels: dict[str, set[str]] = {}
    for of in find_registered(OPERATIONS):
        with skip_if_broken():
            kernels[of] = {point.name for point in entry_points(operation(of).kernel_group)}
    having = [of for of, names in kernels.items() if base in names]
    if not having:
        raise UnknownNameError("kernel", name, set().union(*kernels.values()))
    if len(having) > 1:
        raise UsageError(f"{name} is a kernel of {' and of '.join(sorted(having))}: choose one with --operation")
    return operation(having[0])
