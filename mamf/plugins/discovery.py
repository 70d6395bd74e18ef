"""Finds backends, operations and kernels by entry point, loads them on request and enforces their contracts.

A third party adds a plugin by declaring an entry point in its distribution, in the group ``mamf.backends``,
``mamf.operations``, ``mamf.kernels`` or the kernel group of another operation. ``package.module:Class`` in place of a
name uses a class without an entry point. Errors while a plugin is loaded or created become PluginErrors with its name.
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
    get_catchable_plugin_errors,
    require_known,
    require_values,
)
from mamf.kernel import AnyKernel, Kernel
from mamf.operation import Operation
from mamf.plugins.contracts import CheckedClock, check_attribute, enforce_contract, guard_method, wrap_errors_of

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

BACKENDS = "mamf.backends"
OPERATIONS = "mamf.operations"
KERNELS = "mamf.kernels"
ATTENTION_KERNELS = "mamf.attention_kernels"
_NAME_WITH_BRACKETS = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")
_NAME_WITH_ALGORITHM = re.compile(r"(.+)\[(\d{1,9})\]")
_CLASS_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_INSTALL_ADVICE = "run 'pip install -e .' in mamf's checkout"
Contract = TypeVar("Contract")
#: After this time a warning names the plugin that is still being imported, so that users know why they wait.
_LONG_IMPORT_SECONDS = 15.0
_LOADED_BY_PATH = weakref.WeakSet[type[AnyKernel]]()


@dataclass(frozen=True)
class BackendStatus:
    """A backend as ``mamf backends`` lists it: the names of its devices, or why it is unavailable or broken."""

    name: str
    devices: tuple[str, ...] = ()
    unavailable: Unavailable | None = None
    is_accelerator: bool = True
    is_generic: bool = False
    fault: PluginError | None = None


def find_entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points that installed distributions declare in a group."""
    return _read_entry_points(group, tuple(sys.path))


@functools.lru_cache  # each call reads a file per installed distribution, and a command calls this many times
def _read_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # imported here because --help does not need it

    return tuple(entry_points(group=group))


def find_registered(group: str) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name. Raises UsageError for an empty group or a duplicate name."""
    points: dict[str, EntryPoint] = {}
    for point in find_entry_points(group=group):
        known = points.setdefault(point.name, point)
        if known.value != point.value:
            raise UsageError(
                f"{group} {point.name!r} is claimed by {_describe_origin(known)} and by {_describe_origin(point)}: "
                "uninstall one of them"
            )
    if not points:
        raise UsageError(f"no {group.removeprefix('mamf.')} found, because mamf is not installed: {_INSTALL_ADVICE}")
    return points


def _describe_origin(point: EntryPoint) -> str:
    distribution = point.dist.name if point.dist else "an unknown distribution"
    return f"{distribution} ({point.value})"


def is_loaded_by_path(kernel: AnyKernel) -> bool:
    """Return whether a kernel's class was requested as ``package.module:Class`` and has no entry point."""
    return type(kernel) in _LOADED_BY_PATH


def is_path(name: str) -> bool:
    """Return whether a name is the path of a class (``package.module:Class``), not the name of an entry point."""
    return ":" in name


@contextmanager
def _watch_import(label: str) -> Iterator[None]:
    """Warn if the import within takes long, and raise SystemExit if the imported code calls os._exit."""
    process, end = os.getpid(), os._exit

    def refuse_exit(code: int) -> None:
        """Raise SystemExit in place of os._exit, except in forked processes and in calls by mamf itself."""
        if os.getpid() != process or sys._getframe(1).f_globals.get("__name__", "").startswith("mamf."):
            end(code)
        raise SystemExit(f"os._exit({code}) while it is imported")

    line = f"still importing {label} after {_LONG_IMPORT_SECONDS:.0f} s"
    timer = threading.Timer(_LONG_IMPORT_SECONDS, warnings.warn, (line, PluginWarning))
    timer.daemon = True
    timer.start()
    os._exit = refuse_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = end
        timer.cancel()


def _load_class(what: str, point: EntryPoint, contract: type[Contract]) -> type[Contract]:
    try:
        with _watch_import(f"{what} {point.name}"):
            loaded = point.load()
    except MamfError:
        raise
    except get_catchable_plugin_errors() as error:
        path = is_path(point.name)
        shown = repr(point.name) if path else f"{point.name}: {point.value}"
        package = point.value.partition(":")[0].partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != package:
            hint = f"; install {error.name}"
        else:
            hint = "" if path else f"; if files were moved, {_INSTALL_ADVICE} again"
        raise PluginError(f"{what} {shown} cannot be loaded: {describe_error(error)}{hint}") from error
    if not (isinstance(loaded, type) and issubclass(loaded, contract)):
        raise PluginError(f"{point.value} is not a subclass of mamf's {contract.__name__}")
    if inspect.isabstract(loaded):
        missing = ", ".join(sorted(loaded.__abstractmethods__))  # type: ignore[attr-defined]
        raise PluginError(f"{point.value} is abstract: define {missing}")
    return loaded


def _import_class(what: str, path: str, contract: type[Contract]) -> type[Contract]:
    if not _CLASS_PATH.fullmatch(path):
        listed = "backends" if contract is Backend else "kernels"
        raise UsageError(f"{path!r} is not a {what}: write package.module:Class, or a name from 'mamf {listed}'")
    from importlib.metadata import EntryPoint

    return _load_class(what, EntryPoint(path, path, group=""), contract)


def _load_registered_class(group: str, what: str, name: str, contract: type[Contract]) -> type[Contract]:
    if is_path(name):
        return _import_class(what, name, contract)
    points = find_registered(group)
    require_known((what, name, points))
    return _load_class(what, points[name], contract)


def load_backend_class(name: str) -> type[Backend]:
    """Load the class of a backend by name or path. Raises UnknownNameError for an unknown name, UsageError for an
    invalid path, and PluginError if the class cannot be loaded.
    """
    return _load_registered_class(BACKENDS, "backend", name, Backend)  # type: ignore[type-abstract]


def load_kernel_class(path: str) -> type[AnyKernel]:
    """Load a kernel's class by ``package.module:Class``. Raises UsageError for an invalid path, and PluginError if the
    class cannot be loaded.
    """
    return _import_class("kernel", path, Kernel)  # type: ignore[type-abstract]


def _make_kernel(group: str, what: str, name: str, contract: type[Any]) -> Any:
    """Make the kernel ``NAME``, ``NAME[ALGORITHM]`` or ``NAME[ARGUMENT]``."""
    algorithm, bracketed = _NAME_WITH_ALGORITHM.fullmatch(name), _NAME_WITH_BRACKETS.fullmatch(name)
    parts = algorithm or bracketed
    base, argument = parts.groups() if parts else (name, None)
    kind = _load_registered_class(group, what, base, contract)
    label = f"{what} {name}"
    if argument is None or kind.takes:
        with wrap_errors_of(label, "creating it"):
            kernel = kind() if argument is None else kind(argument)
    elif algorithm is None:
        raise UsageError(f"{what} {base} takes no argument in brackets: remove [{argument}]")
    else:
        try:
            with wrap_errors_of(label, "creating it", passes=(TypeError,)):
                kernel = kind(int(argument))
        except TypeError:
            raise UsageError(f"kernel {base} has no algorithms to choose from: remove [{argument}]") from None
    kernel = enforce_contract(kernel, Kernel, label)
    points = {point.name: point.value for point in find_entry_points(group)}
    kernel_name = kernel.name.partition("[")[0]
    if is_path(base) and points.get(kernel_name, base) != base:
        raise UsageError(f"{label} has the name of a registered kernel, {kernel_name}: give its class another name")
    if is_path(base) and base not in points.values():
        _LOADED_BY_PATH.add(type(kernel))
    return kernel


def make_operation(name: str) -> Operation[Any, Any]:
    """Make a registered operation. Raises UnknownNameError for an unknown name, and PluginError if it is broken."""
    points = find_registered(OPERATIONS)
    require_known(("operation", name, points))
    kind: Any = _load_class("operation", points[name], Operation)  # type: ignore[type-abstract]
    label = f"operation {name}"
    with wrap_errors_of(label, "creating it"):
        operation: Operation[Any, Any] = kind()
    if operation.name != name:  # a log has the class's name, and reading it looks up the entry point
        raise PluginError(f"{label} is broken: its class is named {operation.name!r}, its entry point {name!r}")
    # Contract tests check mamf's own operations. A guard would slow down reading logs, which calls them for each row.
    return operation if name in list_builtin_operations() else enforce_contract(operation, Operation, label)


def list_builtin_operations() -> set[str]:
    """Return the names of the operations that are part of mamf, without importing any."""
    return {point.name for point in find_entry_points(OPERATIONS) if point.module.partition(".")[0] == "mamf"}


def make_kernel(operation: Operation[Any, Any], name: str) -> AnyKernel:
    """Make a kernel of an operation by name or ``package.module:Class``.

    Brackets after the name have the kernel's argument (``torch[sdpa-flash]``) or the number of one of its algorithms
    (``cublaslt[3]``). Raises UnknownNameError for an unknown name, UsageError if the kernel takes nothing in brackets,
    and PluginError if it is broken.
    """
    what = "kernel" if operation.kernel_group == KERNELS else f"{operation.name} kernel"
    return _make_kernel(operation.kernel_group, what, name, operation.kernel_type)  # type: ignore[no-any-return]


def is_builtin_kernel(operation: Operation[Any, Any], name: str) -> bool:
    """Return whether a kernel is part of mamf. Brackets in its name (``cublaslt[3]``) are ignored."""
    base = name.partition("[")[0]
    return any(
        (point.name, point.module.partition(".")[0]) == (base, "mamf")
        for point in find_entry_points(operation.kernel_group)
    )


def list_kernel_names(operation: Operation[Any, Any]) -> list[str]:
    """Return the sorted names of an operation's registered kernels. Raises UsageError if no kernel is registered."""
    if not find_entry_points(group=operation.kernel_group):
        raise UsageError(
            f"no installed package has a kernel for {operation.name}: "
            f"add one to the entry point group {operation.kernel_group}"
        )
    return sorted(find_registered(operation.kernel_group))


def list_backend_statuses() -> list[BackendStatus]:
    """Return the status of all registered backends, accelerators first."""
    statuses = [_read_backend_status(name) for name in sorted(find_registered(BACKENDS))]
    return sorted(statuses, key=lambda status: (not status.is_accelerator, status.is_generic))


def _read_backend_status(name: str) -> BackendStatus:
    try:
        kind = load_backend_class(name)
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


def find_first_backend() -> str:
    """Return the name of the backend that ``auto`` chooses. Raises UnavailableError if no backend is available."""
    name = next((status.name for status in list_backend_statuses() if status.unavailable is None), None)
    if name is None:
        raise UnavailableError("no backend is available; 'mamf backends' says why")
    return name


def open_backend(name: str = "auto", index: int | None = 0) -> Backend:
    """Open a device.

    - ``name``: a backend. ``auto`` is the first available accelerator, or the CPU; it warns about broken backends.
    - ``index``: the device, or None for the one that this process already uses.

    Raises UnavailableError if no backend or device is available, UnknownNameError for an unknown name, and PluginError
    if the named backend is broken.
    """
    if name != "auto":
        return _open_device(name, index)
    statuses = list_backend_statuses()
    lacking = {_find_missing_module(status.fault) for status in statuses}
    if len(lacking) == 1 and (module := lacking.pop()):
        raise UnavailableError(f"no backend can be loaded: install {module}")
    for status in statuses:
        with skip_if_broken():
            if status.fault is not None:
                raise status.fault
            if status.unavailable is None:
                return _open_device(status.name, index)
    raise UnavailableError("no backend is available; 'mamf backends' says why")


def _find_missing_module(fault: PluginError | None) -> str | None:
    """Return the module that a plugin could not import, or None if it failed for another reason."""
    cause = fault and fault.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None


def _open_device(name: str, index: int | None) -> Backend:
    kind, label = load_backend_class(name), f"backend {name}"
    with wrap_errors_of(label, "opening it"):
        if index is None:
            # If the backend is unavailable, opening it raises the reason. Its library must not be called before that.
            index = 0 if kind.unavailable() else guard_method(kind, Backend, "current_index", label)()
        backend = kind(index)
    guard_method(backend, Backend, "now", label)()
    object.__setattr__(backend, "now", CheckedClock(backend.now, label))
    return enforce_contract(backend, Backend, label)


@contextmanager
def skip_if_broken() -> Iterator[None]:
    """Turn a PluginError within into a warning, for plugins that were not requested by name."""
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error}; it is skipped", PluginWarning, stacklevel=3)


AnyOperation = Operation[Any, Any]


def choose_kernels(
    operation: AnyOperation, backend: Backend, names: Sequence[str] | None = None
) -> list[tuple[str, AnyKernel]]:
    """Return the named kernels of an operation, or all available ones, each with the name that was requested.

    A broken kernel raises PluginError if it was named. Otherwise it is skipped with a warning. A kernel with two names
    is returned once. Raises UnavailableError if a named kernel is unavailable, or if none is available.
    """
    if names is None:
        return _find_available(operation, backend)
    require_values("kernels", names, str)
    chosen: dict[str, tuple[str, AnyKernel]] = {}
    for name in names:
        each = make_kernel(operation, name)
        if reason := each.unavailable(backend):
            raise UnavailableError(f"kernel {name} is not available on {backend.name}: {reason}")
        chosen.setdefault(each.name, (name, each))
    return list(chosen.values())


def _find_available(operation: AnyOperation, backend: Backend) -> list[tuple[str, AnyKernel]]:
    available, reasons = [], []
    for name, each in load_registered_kernels(operation):
        with skip_if_broken():
            unavailable = each.unavailable(backend)
            if unavailable is None:
                available.append((name, each))
            else:
                reasons.append(f": {name}: {unavailable}")
    if not available:
        raise UnavailableError(f"no kernel of {operation.name} is available on {backend.name}{''.join(reasons[:1])}")
    return available


def load_registered_kernels(operation: AnyOperation) -> Iterator[tuple[str, AnyKernel]]:
    """Yield the name and kernel of all registered kernels that can be loaded."""
    for name in list_kernel_names(operation):
        with skip_if_broken():
            yield name, make_kernel(operation, name)


def find_operation(name: str) -> AnyOperation:
    """Find the operation of a kernel. Raises UnknownNameError for an unknown name, UsageError if several operations
    have a kernel with this name, and PluginError if the kernel cannot be loaded.
    """
    if is_path(name):
        return make_operation(check_attribute(load_kernel_class(name), Kernel, "operation", f"kernel {name}"))
    base = name.partition("[")[0]
    kernels: dict[str, set[str]] = {}
    for operation in find_registered(OPERATIONS):
        with skip_if_broken():
            kernels[operation] = {point.name for point in find_entry_points(make_operation(operation).kernel_group)}
    matches = [operation for operation, names in kernels.items() if base in names]
    if not matches:
        raise UnknownNameError("kernel", name, set().union(*kernels.values()))
    if len(matches) > 1:
        raise UsageError(f"{name} is a kernel of {', '.join(sorted(matches))}: choose one with --operation")
    return make_operation(matches[0])
