"""What a resumed run may be asked for: what its log was measured with, once more. Anything else begins a new log.

Free are the budget, the notes and how a run is shown: nothing in these decides a figure.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from mamf.backend import Backend
from mamf.errors import LogMismatchError
from mamf.logs.run_log import RunLog
from mamf.logs.same_device import require_same_device
from mamf.plans import ROWS, FindPlan, KernelsPlan, Plan
from mamf.plugins.discovery import backend_class, is_path, open_backend

AnyPlan = TypeVar("AnyPlan", bound=Plan | FindPlan | KernelsPlan)
#: An option to the sizes that are asked for by it, and what a shape calls them.
Sizes = Mapping[str, tuple[str, Sequence[Any]]]
_A_RUN = {
    "sweep": "a sweep",
    "find": "a find",
    "attention": "attention",
    "roofline": "a roofline",
    "explain": "an explanation",
    "guard": "a guard",
}
_MOST_TOLD = 5


def plan_of(log: RunLog, kind: type[AnyPlan], operation: str | None = None, purpose: str = ROWS) -> AnyPlan:
    """The plan of a log that a command resumes, of kernels of an operation where one is named. Raises LogMismatchError
    for another command's log, with the one to use.
    """
    plan = log.plan
    if isinstance(plan, kind) and (
        not isinstance(plan, KernelsPlan) or (plan.operation, plan.purpose) == (operation, purpose)
    ):
        return plan
    told = log.header["plan"].get("command", "sweep")
    command = told if told in _A_RUN else "sweep"
    of = _A_RUN[command]
    if command in ("sweep", "find") and isinstance(plan, KernelsPlan):
        of, command = plan.operation, f"{command} --operation {shlex.quote(plan.operation)}"
    elif command == "guard":
        command = "guard FILE.toml"
    if log.counter_records:
        command = "counters"
    resumption = f"mamf {command} --resume {shlex.quote(str(log.path))}"
    raise LogMismatchError(f"{log.path} is of {of}: resume it with '{resumption}'")


def require_repeated(
    options: argparse.Namespace, held: Mapping[str, object], read: Mapping[str, Callable[[Any], object]] | None = None
) -> None:
    """Raises LogMismatchError for the first option given that is not what the log was measured with.

    ``held``: the log's values by option, sets where order decides nothing. ``read``: what an option's value means,
    where that is not the value itself (or the set of a list).
    """
    for option, then in held.items():
        given = getattr(options, option)
        if given is not None and (read or {}).get(option, as_set)(given) != then:
            raise contradiction(options, option, then)


def require_repeated_sizes(options: argparse.Namespace, shapes: Iterable[Any], asked: Sizes) -> None:
    """The same for sizes: each is the log's, and so are the combinations of those that are given."""
    shapes = list(shapes)
    for option, (axis, sizes) in asked.items():
        then = frozenset(getattr(shape, axis) for shape in shapes)
        if frozenset(sizes) != then:
            raise contradiction(options, option, then)
    axes = [axis for axis, _ in asked.values()]
    combined = set(itertools.product(*(sizes for _, sizes in asked.values())))
    if combined != {tuple(getattr(shape, axis) for axis in axes) for shape in shapes}:
        names = " ".join(map(flag, asked))
        raise LogMismatchError(
            f"{names}: {options.resume} holds other combinations of these sizes; leave them out, or start a new log"
        )


def as_set(value: object) -> object:
    return frozenset(value) if isinstance(value, list) else value


def contradiction(options: argparse.Namespace, option: str, then: object) -> LogMismatchError:
    """The error for an option that is not what the log was measured with."""
    given = getattr(options, option)
    name = flag(f"no_{option}" if given is False else option)
    asked = name if isinstance(given, bool) else f"{name} {told(given)}"
    return LogMismatchError(
        f"{asked} contradicts {options.resume}, which was measured with {told(then)}: leave {name} out, "
        "or start a new log"
    )


def flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def told(value: object) -> str:
    """A value as one would give it, shortened where it is a long list."""
    if value is None:
        return "the default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, frozenset):
        return told(sorted(value, key=lambda each: (len(told(each)), told(each))))
    if not isinstance(value, (list, tuple)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    texts = [told(each) for each in value]
    if len(texts) > _MOST_TOLD:
        texts[_MOST_TOLD - 2 : -1] = ["..."]
    return " ".join(texts)


def reopened(log: RunLog, options: argparse.Namespace, index: int | None = None) -> Backend:
    """The device that a log was measured on, of several that of an index. Raises LogMismatchError when another is asked
    for, or is there now.
    """
    require_named(log, options)
    then = log.device(index)

    def named(name: str) -> str:
        # What auto stands for is known, and compared, when it is open.
        return then.backend if name == "auto" else backend_class(name).name

    require_repeated(options, {"backend": then.backend}, {"backend": named})
    backend = open_backend(options.backend or then.backend, then.index if options.device is None else options.device)
    if then.uuid_hash is None or backend.info.uuid_hash != then.uuid_hash:  # a card may have got another number
        require_repeated(options, {"device": then.index})
    require_same_device(log, then, backend.info)
    return backend


def require_named(log: RunLog, options: argparse.Namespace) -> None:
    """Raises LogMismatchError for what a log names by ``package.module:Class`` and the command does not name again.

    A log is somebody else's: nothing is imported because it says so.
    """
    plan = log.plan
    kernels = (log.header["kernel"],) if isinstance(plan, Plan) else plan.kernels
    for option, names in (("backend", (log.header["device"]["backend"],)), ("kernel", kernels)):
        given = getattr(options, option)
        trusted = [given] if isinstance(given, str) else given or ()
        if foreign := [name for name in names if is_path(name) and name not in trusted]:
            raise LogMismatchError(
                f"{log.path} names {option} {' '.join(foreign)}, which is not installed: "
                f"add {flag(option)} {' '.join(names)} if you trust it"
            )
    for search in plan.searches if isinstance(plan, KernelsPlan) else ():
        for name in filter(is_path, search.kernels):
            raise LogMismatchError(
                f"{log.path} names kernel {name} of a search, which is not installed: install what provides it, or "
                "start a new log"
            )
