"""Find plugins by entry point, load them on request, and check that they keep their contracts. Plugins are backends,
operations and kernels, both mamf's own and those of third parties.

A third party adds a plugin by declaring an entry point in its Python package, in the group ``mamf.backends``,
``mamf.operations``, ``mamf.kernels`` or the kernel group of another operation. Users can write ``package.module:Class``
instead of a name to use a class without an entry point. If a plugin cannot be loaded or created, mamf raises a
PluginError that names the plugin.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mamf.backend import Backend, Unavailability
from mamf.errors import (
    MamfError,
    MamfWarning,
    PluginError,
    UnavailableError,
    UnknownNameError,
    UsageError,
    describe_error,
    get_catchable_plugin_errors,
    require_known_names,
    require_nonempty_list,
)
from mamf.kernel import AnyKernel, Kernel
from mamf.operation import Operation
from mamf.plugins.contracts import (
    CheckedClock,
    check_attribute,
    convert_plugin_errors,
    enforce_contract,
    wrap_method_with_checks,
)

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

#: Names of the entry point groups in which packages declare plugins.
BACKEND_GROUP = "mamf.backends"
OPERATION_GROUP = "mamf.operations"
MATMUL_KERNEL_GROUP = "mamf.kernels"
# Matches the name of a kernel that is followed by an argument in brackets, such as ``torch[sdpa-flash]``.
_NAME_WITH_ARGUMENT_PATTERN = re.compile(r"([^\[\]]+)\[([^\[\]]+)\]")
# Matches the name of a kernel that is followed by the number of one of its algorithms, such as ``cublaslt[3]``.
_NAME_WITH_ALGORITHM_PATTERN = re.compile(r"(.+)\[(\d{1,9})\]")
# Matches the path of a class: ``package.module:Class``.
_CLASS_PATH_PATTERN = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*")
_INSTALL_ADVICE = "run 'pip install -e .' in mamf's checkout"
ContractT = TypeVar("ContractT")
# Classes of kernels that were requested as ``package.module:Class`` and have no entry point.
_KERNEL_TYPES_LOADED_BY_PATH = weakref.WeakSet[type[AnyKernel]]()


@dataclass(frozen=True)
class BackendStatus:
    """The status of a backend, which ``mamf backends`` shows.

    - ``device_names``: the names of the backend's devices, by index.
    - ``unavailability``: why the backend cannot be used; None if it can be used.
    - ``is_accelerator``: whether the devices are accelerators, not CPUs.
    - ``is_generic``: whether the backend supports devices of any vendor. ``--backend auto`` prefers backends for one
      vendor.
    - ``load_error``: the error that loading the backend raised; None if it can be loaded.
    """

    name: str
    device_names: tuple[str, ...] = ()
    unavailability: Unavailability | None = None
    is_accelerator: bool = True
    is_generic: bool = False
    load_error: PluginError | None = None


def find_entry_points(group: str) -> Sequence[EntryPoint]:
    """Return the entry points that installed packages declare in a group."""
    return _read_entry_points(group, tuple(sys.path))


@functools.lru_cache  # Cached, because each call reads a file of every installed package.
def _read_entry_points(group: str, path: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    from importlib.metadata import entry_points  # Imported here, because --help does not need it.

    return tuple(entry_points(group=group))


def find_entry_points_by_name(group: str) -> dict[str, EntryPoint]:
    """Return the entry points that installed packages declare in a group, by name. Raises UsageError if the group is
    empty, or if two different entry points have the same name.
    """
    entry_points_by_name: dict[str, EntryPoint] = {}
    for entry_point in find_entry_points(group=group):
        first_entry_point = entry_points_by_name.setdefault(entry_point.name, entry_point)
        if first_entry_point.value != entry_point.value:
            definitions = " and by ".join(
                f"{point.dist.name if point.dist else 'an unknown package'} ({point.value})"
                for point in (first_entry_point, entry_point)
            )
            raise UsageError(
                f"entry point {entry_point.name!r} of {group} is defined by {definitions}: uninstall one of them"
            )
    if not entry_points_by_name:
        raise UsageError(f"no {group.removeprefix('mamf.')} found, because mamf is not installed: {_INSTALL_ADVICE}")
    return entry_points_by_name


def is_loaded_by_path(kernel: AnyKernel) -> bool:
    """Return whether the class of a kernel was requested as ``package.module:Class`` and has no entry point."""
    return type(kernel) in _KERNEL_TYPES_LOADED_BY_PATH


def is_class_path(name: str) -> bool:
    """Return whether the name of a plugin is a class path (``package.module:Class``), not an entry point's name."""
    return ":" in name


@contextmanager
def _refuse_exit_of_imported_code() -> Iterator[None]:
    """Raise SystemExit if code that is imported in the ``with`` block calls os._exit, which would end mamf at once."""
    mamf_process_id, original_exit = os.getpid(), os._exit

    def refuse_exit(code: int) -> None:
        # Let forked processes exit, and let mamf's own code exit.
        if os.getpid() != mamf_process_id or sys._getframe(1).f_globals.get("__name__", "").startswith("mamf."):
            original_exit(code)
        raise SystemExit(f"the import called os._exit({code})")

    os._exit = refuse_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = original_exit


def _load_class(plugin_kind: str, entry_point: EntryPoint, contract: type[ContractT]) -> type[ContractT]:
    try:
        with _refuse_exit_of_imported_code():
            plugin_class = entry_point.load()
    except MamfError:
        raise
    except get_catchable_plugin_errors() as error:
        has_class_path = is_class_path(entry_point.name)
        displayed_name = repr(entry_point.name) if has_class_path else f"{entry_point.name}: {entry_point.value}"
        package = entry_point.value.partition(":")[0].partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name and error.name.partition(".")[0] != package:
            hint = f"; install {error.name}"
        else:
            hint = "" if has_class_path else f"; if files were moved, {_INSTALL_ADVICE} again"
        raise PluginError(f"{plugin_kind} {displayed_name} cannot be loaded: {describe_error(error)}{hint}") from error
    if not (isinstance(plugin_class, type) and issubclass(plugin_class, contract)):
        raise PluginError(
            f"{entry_point.value} is not a subclass of mamf's {contract.__name__}: derive it from this class"
        )
    if missing := getattr(plugin_class, "__abstractmethods__", ()):
        raise PluginError(f"{entry_point.value} is abstract: define {', '.join(sorted(missing))}")
    return plugin_class


def _import_class(plugin_kind: str, path: str, contract: type[ContractT]) -> type[ContractT]:
    if not _CLASS_PATH_PATTERN.fullmatch(path):
        raise UsageError(
            f"{path!r} is not a {plugin_kind}: write package.module:Class, or a name from "
            f"'mamf {'backends' if contract is Backend else 'kernels'}'"
        )
    from importlib.metadata import EntryPoint

    # Find modules in the current folder too, as python -m mamf does. Append the folder, so that its files never replace
    # installed modules.
    if not {"", folder := str(Path.cwd())}.intersection(sys.path):
        sys.path.append(folder)
    return _load_class(plugin_kind, EntryPoint(path, path, group=""), contract)


def _load_registered_class(group: str, plugin_kind: str, name: str, contract: type[ContractT]) -> type[ContractT]:
    if is_class_path(name):
        return _import_class(plugin_kind, name, contract)
    entry_points_by_name = find_entry_points_by_name(group)
    require_known_names((plugin_kind, name, entry_points_by_name))
    return _load_class(plugin_kind, entry_points_by_name[name], contract)


def load_backend_class(name: str) -> type[Backend]:
    """Load the class of a backend by its name or by ``package.module:Class``. Raises UnknownNameError for an unknown
    name, UsageError for an invalid path, and PluginError if the class cannot be loaded.
    """
    return _load_registered_class(BACKEND_GROUP, "backend", name, Backend)  # type: ignore[type-abstract]


def make_operation(name: str) -> Operation[Any, Any]:
    """Make an operation, such as attention, by its registered name. Raises UnknownNameError for an unknown name, and
    PluginError if the operation is broken.
    """
    entry_points_by_name = find_entry_points_by_name(OPERATION_GROUP)
    require_known_names(("operation", name, entry_points_by_name))
    plugin_class: Any = _load_class("operation", entry_points_by_name[name], Operation)  # type: ignore[type-abstract]
    label = f"operation {name}"
    with convert_plugin_errors(label, "creating it"):
        operation: Operation[Any, Any] = plugin_class()
    if operation.name != name:  # Code that reads logs finds the entry point by operation.name.
        raise PluginError(
            f"{label} is broken: its class has the name {operation.name!r}, but its entry point has the name {name!r}: "
            "use one name"
        )
    # Do not check mamf's own operations: contract tests check them already, and checks here would slow down reading
    # logs, which calls methods of the operation for each row.
    return operation if name in list_builtin_names(OPERATION_GROUP) else enforce_contract(operation, Operation, label)


def list_builtin_names(group: str) -> set[str]:
    """Return the names of mamf's own plugins in an entry point group without importing the plugins."""
    return {point.name for point in find_entry_points(group) if point.module.partition(".")[0] == "mamf"}


def make_kernel(operation: Operation[Any, Any], name: str) -> AnyKernel:
    """Make a kernel of an operation by its registered name or by ``package.module:Class``.

    Brackets after the name contain an argument of the kernel (``torch[sdpa-flash]``) or the number of one of its
    algorithms (``cublaslt[3]``).

    Raises UnknownNameError for an unknown name, and PluginError if the kernel is broken. Raises UsageError if the name
    has brackets, but the kernel takes no argument and has no algorithms.
    """
    group = operation.kernel_group
    plugin_kind = "kernel" if group == MATMUL_KERNEL_GROUP else f"{operation.name} kernel"
    algorithm, bracketed = _NAME_WITH_ALGORITHM_PATTERN.fullmatch(name), _NAME_WITH_ARGUMENT_PATTERN.fullmatch(name)
    parts = algorithm or bracketed
    base_name, argument = parts.groups() if parts else (name, None)
    plugin_class: Any = _load_registered_class(group, plugin_kind, base_name, operation.kernel_type)
    label = f"{plugin_kind} {name}"
    if argument is None or plugin_class.argument_description:
        with convert_plugin_errors(label, "creating it"):
            plugin = plugin_class() if argument is None else plugin_class(argument)
    elif algorithm is None:
        raise UsageError(f"{plugin_kind} {base_name} takes no argument in brackets: remove [{argument}]")
    else:
        try:
            with convert_plugin_errors(label, "creating it", unconverted_errors=(TypeError,)):
                plugin = plugin_class(int(argument))
        except TypeError:
            raise UsageError(f"kernel {base_name} has no algorithms to choose from: remove [{argument}]") from None
    kernel: AnyKernel = enforce_contract(plugin, Kernel, label)
    class_paths_by_name = {entry_point.name: entry_point.value for entry_point in find_entry_points(group)}
    kernel_name = kernel.name.partition("[")[0]
    if is_class_path(base_name) and class_paths_by_name.get(kernel_name, base_name) != base_name:
        raise UsageError(f"{label} has the name of a registered kernel, {kernel_name}: give its class another name")
    if is_class_path(base_name) and base_name not in class_paths_by_name.values():
        _KERNEL_TYPES_LOADED_BY_PATH.add(type(kernel))
    return kernel


def list_kernel_names(operation: Operation[Any, Any]) -> list[str]:
    """Return the sorted names of the registered kernels of an operation. Raises UsageError if none is registered."""
    if not find_entry_points(group=operation.kernel_group):
        raise UsageError(
            f"no installed package has a kernel for {operation.name}: "
            f"add one to the entry point group {operation.kernel_group}"
        )
    return sorted(find_entry_points_by_name(operation.kernel_group))


def list_backend_statuses() -> list[BackendStatus]:
    """Return the status of each registered backend, with backends for accelerators before those for CPUs."""
    statuses = map(_read_backend_status, sorted(find_entry_points_by_name(BACKEND_GROUP)))
    return sorted(statuses, key=lambda status: (not status.is_accelerator, status.is_generic))


def _read_backend_status(name: str) -> BackendStatus:
    try:
        plugin_class = load_backend_class(name)
        get_checked_method = functools.partial(wrap_method_with_checks, plugin_class, Backend, label=f"backend {name}")
        reason, is_accelerator = get_checked_method("explain_unavailability")(), bool(plugin_class.is_accelerator)
        if reason is not None:
            return BackendStatus(name, unavailability=reason, is_accelerator=is_accelerator)
        device_names = tuple(map(get_checked_method("read_device_name"), range(get_checked_method("count_devices")())))
        return BackendStatus(name, device_names, is_accelerator=is_accelerator, is_generic=plugin_class.is_generic)
    except PluginError as error:
        return BackendStatus(name, unavailability=Unavailability("the backend is broken", str(error)), load_error=error)
    except MamfError as error:
        return BackendStatus(name, unavailability=Unavailability("the backend cannot be opened", str(error)))


def find_usable_backend_name() -> str:
    """Return the name of the first backend that can be used, which ``--backend auto`` chooses. Raises UnavailableError
    if no backend can be used.
    """
    name = next((status.name for status in list_backend_statuses() if status.unavailability is None), None)
    if name is None:
        raise UnavailableError("no backend is available: run 'mamf backends' to see why")
    return name


def count_devices(backend_name: str) -> int:
    """Return the number of devices of a backend. Raises UnavailableError with the reason if the backend is unavailable,
    PluginError if one of its methods fails, and the errors of ``load_backend_class``.
    """
    plugin_class, label = load_backend_class(backend_name), f"backend {backend_name}"
    if reason := wrap_method_with_checks(plugin_class, Backend, "explain_unavailability", label)():
        raise UnavailableError(f"{label} is not available: {reason}")
    return int(wrap_method_with_checks(plugin_class, Backend, "count_devices", label)())


def open_backend(name: str = "auto", index: int | None = 0) -> Backend:
    """Open a device and return its backend.

    - ``name``: the name of a backend. ``auto`` opens the first available accelerator, or the CPU if there is none, and
      warns about broken backends.
    - ``index``: the index of the device, or None for the device that this process already uses.

    Raises UnavailableError if no backend or device is available, UnknownNameError for an unknown name, and PluginError
    if the named backend is broken.
    """
    if name != "auto":
        return _open_device(name, index)
    statuses = list_backend_statuses()
    missing_modules = {_find_missing_module(status.load_error) for status in statuses}
    if len(missing_modules) == 1 and (module := missing_modules.pop()):
        raise UnavailableError(f"no backend can be loaded: install {module}")
    for status in statuses:
        with warn_if_plugin_broken():
            if status.load_error is not None:
                raise status.load_error
            if status.unavailability is None:
                return _open_device(status.name, index)
    raise UnavailableError("no backend is available: run 'mamf backends' to see why")


def _find_missing_module(load_error: PluginError | None) -> str | None:
    """Return the name of the module that a plugin failed to import; None if loading failed for another reason."""
    cause = load_error and load_error.__cause__
    return cause.name if isinstance(cause, ModuleNotFoundError) else None


def _open_device(name: str, index: int | None) -> Backend:
    plugin_class, label = load_backend_class(name), f"backend {name}"
    with convert_plugin_errors(label, "opening it"):
        if index is None:
            # An unavailable backend may be unable to find its current device. Use index 0 in this case, because opening
            # this device below raises an error that says why the backend is unavailable.
            index = (
                0
                if plugin_class.explain_unavailability()
                else wrap_method_with_checks(plugin_class, Backend, "find_current_index", label)()
            )
        backend = plugin_class(index)
    wrap_method_with_checks(backend, Backend, "now", label)()
    object.__setattr__(backend, "now", CheckedClock(backend.now, label))
    return enforce_contract(backend, Backend, label)


@contextmanager
def warn_if_plugin_broken() -> Iterator[None]:
    """Turn a PluginError in the ``with`` block into a warning. Use this for plugins that the user did not ask for by
    name.
    """
    try:
        yield
    except PluginError as error:
        warnings.warn(f"{error}; mamf skips this plugin", MamfWarning, stacklevel=3)


AnyOperation = Operation[Any, Any]


def choose_kernels(
    operation: AnyOperation, backend: Backend, names: Sequence[str] | None = None
) -> list[tuple[str, AnyKernel]]:
    """Return the kernels called ``names`` as pairs of name and kernel. If ``names`` is None, return all kernels of the
    operation that are available on the backend, and warn about broken kernels.

    If two of the names refer to the same kernel, the result contains the kernel once, with the first of these names.
    Raises PluginError if a named kernel is broken, and UnavailableError if a named kernel or all kernels are
    unavailable.
    """
    if names is None:
        return _list_available_kernels(operation, backend)
    require_nonempty_list("kernels", names, str)
    kernels_by_name: dict[str, tuple[str, AnyKernel]] = {}
    for name in names:
        kernel = make_kernel(operation, name)
        if reason := kernel.explain_unavailability(backend):
            raise UnavailableError(f"kernel {name} is not available on {backend.name}: {reason}")
        kernels_by_name.setdefault(kernel.name, (name, kernel))
    return list(kernels_by_name.values())


def _list_available_kernels(operation: AnyOperation, backend: Backend) -> list[tuple[str, AnyKernel]]:
    available, reasons = [], []
    for name, kernel in load_registered_kernels(operation):
        with warn_if_plugin_broken():
            unavailability = kernel.explain_unavailability(backend)
            if unavailability is None:
                available.append((name, kernel))
            else:
                reasons.append(f": {name}: {unavailability}")
    if not available:
        raise UnavailableError(f"no kernel of {operation.name} is available on {backend.name}{''.join(reasons[:1])}")
    return available


def load_registered_kernels(operation: AnyOperation) -> Iterator[tuple[str, AnyKernel]]:
    """Yield each registered kernel of an operation with its name. Warn about kernels that cannot be loaded."""
    for name in list_kernel_names(operation):
        with warn_if_plugin_broken():
            yield name, make_kernel(operation, name)


def find_operation_of_kernel(name: str) -> AnyOperation:
    """Return the operation that the kernel ``name`` computes. Raises UnknownNameError for an unknown name,
    UsageError if several operations have a kernel with this name, and PluginError if the kernel cannot be loaded.
    """
    if is_class_path(name):
        kernel_class: Any = _import_class("kernel", name, Kernel)  # type: ignore[type-abstract]
        return make_operation(check_attribute(kernel_class, Kernel, "operation", f"kernel {name}"))
    kernel_names_by_operation: dict[str, set[str]] = {}
    for operation in find_entry_points_by_name(OPERATION_GROUP):
        with warn_if_plugin_broken():
            kernel_names_by_operation[operation] = {
                entry_point.name for entry_point in find_entry_points(make_operation(operation).kernel_group)
            }
    matching_operations = [
        operation for operation, names in kernel_names_by_operation.items() if name.partition("[")[0] in names
    ]
    if not matching_operations:
        raise UnknownNameError("kernel", name, set().union(*kernel_names_by_operation.values()))
    if len(matching_operations) > 1:
        raise UsageError(
            f"several operations have a kernel {name} ({', '.join(sorted(matching_operations))}): choose one with "
            "--operation"
        )
    return make_operation(matching_operations[0])
