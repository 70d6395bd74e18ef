"""Sorts events into classes: first by the operation that launched the kernel, then by the kernel's name.

The rules are in classes.csv. A rule must match a whole name or whole words of it, never a part of a word.

The share of a class in a training step is the length of the union of its intervals. Each instant counts once, so the
shares add up to 1; sums of durations would count concurrent work twice. While several classes run, time counts for the
first of them in CLASSES. Communication is last, because it costs time only where no computation hides it.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from mamf.files import read_packaged_rows
from mamf.profiling.traces import DEVICE_EVENT_KINDS, Event, Intervals, merge_intervals, sum_interval_seconds

UNCLASSIFIED = "unclassified"
COMMUNICATION = "communication"
COPIES, OPTIMIZER = "memory copies", "optimizer"
#: The beginning of the names that mamf gives to ranges around modules.
MODULE_PREFIX = "mamf: module "
#: Classes in the order of reports. While several run at the same time, the time counts for the first of them.
WORK_CLASSES = (
    "attention",
    "matmul",
    "convolution",
    "normalization",
    "elementwise",
    "reduction and softmax",
    "embedding",
    OPTIMIZER,
    COPIES,
    "other",
    UNCLASSIFIED,
    COMMUNICATION,
)
#: How deep kernels may be nested: a kernel may be a template argument of another kernel that only launches it.
_MAX_WRAPPER_DEPTH = 4


@functools.cache
def read_class_rules() -> Mapping[str, Sequence[tuple[re.Pattern[str], str]]]:
    """Return the patterns and classes in classes.csv, by their column ``by``. The first pattern that matches decides.

    - ``caller``: operations and annotations. Their class applies to all that they call: matmuls within attention are
      attention.
    - ``operation``: other operations. The innermost one decides.
    - ``wrapper``: kernels that only launch a kernel in their template arguments. The class is for those in which no
      argument is known.
    - ``kernel``: kernels, by namespaces and function, without template arguments and parameters.
    - ``word``: kernels, and operations of other libraries, by whole words of the function, or else of a namespace.
    - ``framework``: torch's own work, if no other rule gives a class.
    """
    rules_by_kind: dict[str, list[tuple[re.Pattern[str], str]]] = defaultdict(list)
    for row in read_packaged_rows("profiling/classes.csv"):
        pattern = rf".*_({row['pattern']})_.*" if row["by"] == "word" else row["pattern"]
        rules_by_kind[row["by"]].append((re.compile(pattern), row["class"]))
    return rules_by_kind


def classify_event(event: Event) -> str:
    """Return the class of an event, one of CLASSES."""
    callers = [each for each in event.yield_callers() if each.kind in ("operation", "annotation")]
    # In the backward pass, operations of attention run outside of it. Look at the callers in the forward pass too.
    forward = [
        each for caller in callers if caller.forward_operation for each in caller.forward_operation.yield_callers()
    ]
    # An annotation around a collective lasts until the collective ends, so it may not have called all events within it.
    enclosing = {
        _find_class_by_rules("caller", each.name)
        for each in (*callers, *forward)
        if not _is_asynchronous_collective(each, callers[0])
    }
    if forward or any(each.name.startswith((MODULE_PREFIX, "nn.Module: ")) for each in callers):
        enclosing.discard(OPTIMIZER)  # in Lightning, the optimizer calls the forward and the backward pass
    return (
        next((name for _, name in read_class_rules()["caller"] if name in enclosing), None)
        or next(filter(None, (_classify_operation(each.name) for each in callers if each.kind == "operation")), None)
        or (COPIES if event.kind == "copy" else None)
        or (classify_kernel_name(event.name) if event.kind in DEVICE_EVENT_KINDS else None)
        or _find_class_by_rules("framework", event.name)
        or UNCLASSIFIED
    )


def _is_asynchronous_collective(caller: Event, innermost: Event) -> bool:
    is_inner = caller.kind == "operation" or caller is innermost
    return not is_inner and _find_class_by_rules("caller", caller.name) == COMMUNICATION


def classify_kernel_name(kernel: str) -> str | None:
    """Return the class of a kernel by its name alone; None if no rule matches."""
    return _classify_kernel_in_wrappers(kernel, _MAX_WRAPPER_DEPTH)


@functools.cache
def _classify_kernel_in_wrappers(kernel: str, wrappers: int) -> str | None:
    name = split_kernel_name(kernel)
    if wrappers and (wrapper_class := _find_class_by_rules("wrapper", name.qualified_function)) is not None:
        known = (_classify_kernel_in_wrappers(each, wrappers - 1) for each in name.template_arguments)
        return next(filter(None, known), None) or wrapper_class or None
    by_words = (_find_class_by_rules("word", underscored_names) for underscored_names in name.underscored_names)
    return _find_class_by_rules("kernel", name.qualified_function) or next(filter(None, by_words), None)


@functools.cache
def _classify_operation(name: str) -> str | None:
    """Return the class of an operation. If it belongs to a library and has no rule, the words in its name decide."""
    is_of_library = "::" in name and not _find_class_by_rules("framework", name)
    return _find_class_by_rules("operation", name) or (classify_kernel_name(name) if is_of_library else None)


@functools.cache
def _find_class_by_rules(rule_kind: str, name: str) -> str | None:
    return next((class_name for pattern, class_name in read_class_rules()[rule_kind] if pattern.fullmatch(name)), None)


# -- shares of a training step -----------------------------------------------------------------------------------------


class ClassSeconds(NamedTuple):
    """How long events of a class ran, in seconds.

    While events of several classes run, the time is ``visible`` for the first of them in CLASSES and ``hidden`` for the
    others.
    """

    visible: float
    hidden: float


def compute_class_seconds(by_class: Mapping[str, Iterable[tuple[float, float]]]) -> dict[str, ClassSeconds]:
    """Return the share of each class that has events, in the order of CLASSES. ``by_class``: (begin, end) of events."""
    shares: dict[str, ClassSeconds] = {}
    covered: Intervals = []
    for name in WORK_CLASSES:
        intervals = merge_intervals(by_class.get(name, ()))
        if not intervals:
            continue
        covered_with_class = merge_intervals([*covered, *intervals])
        visible = sum_interval_seconds(covered_with_class) - sum_interval_seconds(covered)
        shares[name] = ClassSeconds(visible, max(0.0, sum_interval_seconds(intervals) - visible))
        covered = covered_with_class
    return shares


# -- names of kernels --------------------------------------------------------------------------------------------------


_OPENING_BRACKETS = {")": "(", "]": "[", "}": "{", ">": "<"}
#: ROCm reports the name of a kernel's descriptor, which is the kernel's name with this suffix.
_DESCRIPTOR_SUFFIX = ".kd"
_MANGLED_PREFIX = re.compile(r"_Z(TS)?(?=[NL\d])")
#: Tokens of a mangled name. The digits in literals, types and substitutions are not lengths of identifiers.
_MANGLED_TOKEN = re.compile(r"L[a-z]n?\d+E|DF\d+[b_x]?|[ST][0-9A-Z]*_|A\d+_|(?P<length>\d+)(?=[A-Za-z_])|.", re.DOTALL)
#: The boundaries of words in a name: inside camelCase, and characters that are not letters or digits.
_WORD_BOUNDARY = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W+")


class KernelName(NamedTuple):
    """A kernel's name in parts.

    ``function``: with its namespaces, without return type, template arguments and parameters. ``arguments``: the
    template arguments as text.
    """

    qualified_function: str
    template_arguments: tuple[str, ...]

    @property
    def underscored_names(self) -> Iterator[str]:
        """The words of the function, then the words of each namespace around it, written _like_this_."""
        return (f"_{_WORD_BOUNDARY.sub('_', part).lower()}_" for part in reversed(self.qualified_function.split("::")))


@functools.cache
def split_kernel_name(name: str) -> KernelName:
    """Split a kernel's name into parts, even if it was cut off. The time is linear in its length."""
    name = name.replace("(anonymous namespace)", "anonymous")
    if mangled := _MANGLED_PREFIX.match(name):
        qualified_function, *template_arguments = _list_mangled_identifiers(name[mangled.end() :]) or [name]
        return KernelName(qualified_function, tuple(template_arguments))
    qualified_function, inner = _split_demangled_name(name.removesuffix(_DESCRIPTOR_SUFFIX))
    return KernelName(qualified_function, tuple(each.strip() for each in inner if each.strip()))


def _split_demangled_name(name: str) -> tuple[str, list[str]]:
    """Return the function and the arguments of its last template."""
    brackets: list[str] = []
    qualified_function: list[str] = []
    template_arguments: list[str] = []
    start = 0
    for position, character in enumerate(name):
        if not brackets and character == "(":
            break
        if character in "([{<":
            if not brackets:
                template_arguments, start = [], position + 1
            brackets.append(character)
        elif character in _OPENING_BRACKETS:
            # Within parentheses, > is a comparison or part of an arrow.
            if brackets and brackets[-1] == _OPENING_BRACKETS[character]:
                brackets.pop()
                if not brackets:
                    template_arguments.append(name[start:position])
        elif not brackets:
            qualified_function.append(character)
        elif character == "," and len(brackets) == 1:
            template_arguments.append(name[start:position])
            start = position + 1
    if brackets:
        template_arguments.append(name[start:])
    words = "".join(qualified_function).split()
    return words[-1] if words else name, template_arguments


def _list_mangled_identifiers(mangled: str) -> list[str]:
    """Return the identifiers in a mangled name, in order. The identifiers of one nested name are joined with ``::``."""
    identifiers: list[str] = []
    position, last = 0, -1
    while token := _MANGLED_TOKEN.match(mangled, position):
        position = token.end()
        if length := token["length"]:
            start, position = position, position + int(length)
            identifier = mangled[start:position].replace("_GLOBAL__N_1", "anonymous")
            if token.start() == last:
                identifiers[-1] += f"::{identifier}"
            else:
                identifiers.append(identifier)
            last = position
    return identifiers
