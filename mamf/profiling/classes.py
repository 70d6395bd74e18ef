"""Sort the events of a profiler's trace into classes of work, such as matmul or attention, for ``mamf profile``.

An event is a kernel, a copy or an operation of torch. The operation that launched a kernel decides the kernel's class;
if no rule matches the operation, the kernel's name decides. The rules are in classes.csv. The pattern of a rule must
match a whole name or whole words of a name.

Each instant of a training step counts for only one class, so the shares of all classes and of idle time add up to 1.
While events of several classes run, the time counts for the class that comes first in WORK_CLASSES. Communication is
last in WORK_CLASSES, because it slows down a step only while no computation runs at the same time.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from mamf.files import read_packaged_csv_rows
from mamf.profiling.traces import DEVICE_EVENT_KINDS, Event, Intervals, merge_intervals, sum_interval_seconds

UNCLASSIFIED = "unclassified"
COMMUNICATION = "communication"
MEMORY_COPIES, OPTIMIZER = "memory copies", "optimizer"
#: Prefix of the names of the annotations that mamf adds to a trace around the forward pass of each module.
MODULE_PREFIX = "mamf: module "
#: Maximum number of nested wrappers in a kernel's name. A wrapper is a kernel that only launches another kernel, which
#: is a template argument of the wrapper. The other kernel may be a wrapper too.
_MAX_WRAPPER_DEPTH = 4
#: All classes of work, in the order in which reports list them. While events of several classes run at the same time,
#: the time counts for the class that comes first here.
WORK_CLASSES = (
    "attention",
    "matmul",
    "convolution",
    "normalization",
    "elementwise",
    "reduction and softmax",
    "embedding",
    OPTIMIZER,
    MEMORY_COPIES,
    "other",
    UNCLASSIFIED,
    COMMUNICATION,
)


@functools.cache
def read_class_rules() -> Mapping[str, Sequence[tuple[re.Pattern[str], str]]]:
    """Read classes.csv and return its rules, grouped by their kind (the column ``by``). A rule is a pair of a pattern
    and a class.

    Among rules of the same kind, the first one whose pattern matches decides the class. The kinds of rules are:

    - ``caller``: matches an operation or annotation, and gives its class to all events within it. So a matmul within
      attention is attention.
    - ``operation``: matches an operation, if no ``caller`` rule applies. In nested operations, the innermost match
      decides.
    - ``wrapper``: matches a kernel that only launches another kernel, which is one of its template arguments. Rules
      that match a template argument take precedence.
    - ``kernel``: matches a kernel's namespaces and function, without template arguments and parameters.
    - ``word``: matches whole words in the function of a kernel or, if no word of the function matches, in its
      namespaces.
    - ``framework``: matches an event that torch adds, such as a view or a node of autograd. These rules come last.

    The rules for kernels (``wrapper``, ``kernel`` and ``word``) also apply to operations with a namespace, such as
    ``library::name``, that no ``operation`` or ``framework`` rule matches.
    """
    rules_by_kind: dict[str, list[tuple[re.Pattern[str], str]]] = defaultdict(list)
    for row in read_packaged_csv_rows("profiling/classes.csv"):
        pattern = rf".*_({row['pattern']})_.*" if row["by"] == "word" else row["pattern"]
        rules_by_kind[row["by"]].append((re.compile(pattern), row["class"]))
    return rules_by_kind


def classify_event(event: Event) -> str:
    """Return the class of an event, one of WORK_CLASSES, from its callers, its kind and its name."""
    callers = [each for each in event.yield_event_and_callers() if each.kind in ("operation", "annotation")]
    # In the forward pass, a function such as attention calls an operation. The backward pass of the operation runs
    # outside this function, so look at the callers of the forward operation too.
    forward_callers = [
        each
        for caller in callers
        if caller.forward_operation
        for each in caller.forward_operation.yield_event_and_callers()
    ]
    # An annotation around a collective lasts until the collective ends, but the thread may run other operations in the
    # meantime. So an event within the annotation may be unrelated to the collective.
    enclosing_classes = {
        _find_class_by_rules("caller", each.name)
        for each in (*callers, *forward_callers)
        if each.kind == "operation" or each is callers[0] or _find_class_by_rules("caller", each.name) != COMMUNICATION
    }
    if forward_callers or any(each.name.startswith((MODULE_PREFIX, "nn.Module: ")) for each in callers):
        # In Lightning, the optimizer's step() calls the forward and backward passes, which are not part of the
        # optimizer.
        enclosing_classes.discard(OPTIMIZER)
    return (
        next((name for _, name in read_class_rules()["caller"] if name in enclosing_classes), None)
        or next(filter(None, (_classify_operation(each.name) for each in callers if each.kind == "operation")), None)
        or (MEMORY_COPIES if event.kind == "copy" else None)
        or (classify_kernel_name(event.name) if event.kind in DEVICE_EVENT_KINDS else None)
        or _find_class_by_rules("framework", event.name)
        or UNCLASSIFIED
    )


@functools.cache
def classify_kernel_name(kernel: str, max_depth: int = _MAX_WRAPPER_DEPTH) -> str | None:
    """Return the class of a kernel by its name only, or None if no rule matches the name.

    A wrapper, which only launches the kernel that is its template argument, has the class of this inner kernel.
    ``max_depth``: the maximum number of nested wrappers to look through.
    """
    function, template_arguments = split_kernel_name(kernel)
    if max_depth and (wrapper_class := _find_class_by_rules("wrapper", function)) is not None:
        inner_classes = (classify_kernel_name(each, max_depth - 1) for each in template_arguments)
        return next(filter(None, inner_classes), None) or wrapper_class or None
    # Split camelCase into words for the rules of kind ``word``: softMaxForward becomes _soft_max_forward_.
    names = (f"_{_WORD_BOUNDARY_PATTERN.sub('_', part).lower()}_" for part in reversed(function.split("::")))
    classes_by_word = (_find_class_by_rules("word", name) for name in names)
    return _find_class_by_rules("kernel", function) or next(filter(None, classes_by_word), None)


@functools.cache
def _classify_operation(name: str) -> str | None:
    """Return the class of an operation by its name, or None if no rule matches the name.

    If no ``operation`` or ``framework`` rule matches a name with a namespace (``library::name``), the rules for kernel
    names decide.
    """
    is_from_library = "::" in name and not _find_class_by_rules("framework", name)
    return _find_class_by_rules("operation", name) or (classify_kernel_name(name) if is_from_library else None)


@functools.cache
def _find_class_by_rules(rule_kind: str, name: str) -> str | None:
    return next((class_name for pattern, class_name in read_class_rules()[rule_kind] if pattern.fullmatch(name)), None)


# -- time of each class ------------------------------------------------------------------------------------------------


def compute_visible_and_hidden_seconds(
    intervals_by_class: Mapping[str, Iterable[tuple[float, float]]],
) -> dict[str, tuple[float, float]]:
    """Return the visible and hidden seconds of each class that has events, in the order of WORK_CLASSES.

    While events of several classes run at the same time, the time is attributed to the class that comes first in
    WORK_CLASSES. The visible seconds of a class are the time attributed to it. Its hidden seconds are the rest of the
    time in which its events ran. This rest is attributed to other classes.

    ``intervals_by_class``: the intervals of the events of each class, as (start, end) in seconds.
    """
    seconds_by_class: dict[str, tuple[float, float]] = {}
    covered_intervals: Intervals = []
    for name in WORK_CLASSES:
        if intervals := merge_intervals(intervals_by_class.get(name, ())):
            covered_before = covered_intervals
            covered_intervals = merge_intervals([*covered_intervals, *intervals])
            visible = sum_interval_seconds(covered_intervals) - sum_interval_seconds(covered_before)
            seconds_by_class[name] = visible, max(0.0, sum_interval_seconds(intervals) - visible)
    return seconds_by_class


# -- names of kernels --------------------------------------------------------------------------------------------------


_OPENING_BRACKET_BY_CLOSING = {")": "(", "]": "[", "}": "{", ">": "<"}
#: Suffix that ROCm appends to the name of a kernel, because it reports the name of the kernel's descriptor.
_DESCRIPTOR_SUFFIX = ".kd"
_MANGLED_PREFIX_PATTERN = re.compile(r"_Z(TS)?(?=[NL\d])")
#: Pattern of one token of a mangled C++ name. An identifier starts with its length in digits. Literals, types and
#: substitutions have digits too. The pattern matches each of them as one token, so that their digits are not taken for
#: a length.
_MANGLED_TOKEN_PATTERN = re.compile(
    r"L[a-z]n?\d+E|DF\d+[b_x]?|[ST][0-9A-Z]*_|A\d+_|(?P<length>\d+)(?=[A-Za-z_])|.", re.DOTALL
)
#: Pattern of the boundary between two words of a name: a change of case in camelCase, or characters that are neither
#: letters nor digits.
_WORD_BOUNDARY_PATTERN = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|\W+")


@functools.cache
def split_kernel_name(name: str) -> tuple[str, tuple[str, ...]]:
    """Return the function and the template arguments in a mangled or demangled kernel name, which may be truncated.

    The function includes its namespaces, as in ``at::native::vectorized_kernel``, but not its return type, template
    arguments or parameters. The running time is linear in the length of the name.
    """
    name = name.replace("(anonymous namespace)", "anonymous")
    if mangled := _MANGLED_PREFIX_PATTERN.match(name):
        qualified_function, *template_arguments = _list_mangled_identifiers(name[mangled.end() :]) or [name]
        return qualified_function, tuple(template_arguments)
    qualified_function, raw_arguments = _split_demangled_name(name.removesuffix(_DESCRIPTOR_SUFFIX))
    return qualified_function, tuple(each.strip() for each in raw_arguments if each.strip())


def _split_demangled_name(name: str) -> tuple[str, list[str]]:
    """Return the function in a demangled C++ name, and its template arguments. If the name has several lists of
    template arguments, return the last list.
    """
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
        elif character in _OPENING_BRACKET_BY_CLOSING:
            # Ignore a > that does not close a <. Within parentheses, > is a comparison or a part of an arrow.
            if brackets and brackets[-1] == _OPENING_BRACKET_BY_CLOSING[character]:
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
    """Return the identifiers in a mangled C++ name, in order.

    Adjacent identifiers, which are the namespaces and the function of one name, are joined with ``::``.
    """
    identifiers: list[str] = []
    position, last_identifier_end = 0, -1
    while token := _MANGLED_TOKEN_PATTERN.match(mangled, position):
        position = token.end()
        if length := token["length"]:
            start, position = position, position + int(length)
            identifier = mangled[start:position].replace("_GLOBAL__N_1", "anonymous")
            if token.start() == last_identifier_end:
                identifiers[-1] += f"::{identifier}"
            else:
                identifiers.append(identifier)
            last_identifier_end = position
    return identifiers
