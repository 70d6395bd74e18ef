"""Reads what is to be reproduced: a log, the address of one, or claims in words. Errors are one line."""

from __future__ import annotations

import argparse
import re
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from mamf.cli.commands.kernels_sweep import AnyOperation, asked_for
from mamf.cli.reading import as_file, read_log
from mamf.dtypes import canonical_name
from mamf.errors import MamfError, UnknownNameError, UsageError
from mamf.limits import MOST_BYTES, TOO_LONG, shorten
from mamf.logs.claims import Asked, Source, printed, source_of_finder, source_of_log
from mamf.logs.legacy import read_legacy_or_none
from mamf.operations.attention.shapes import DIRECTIONS
from mamf.plans import Claim
from mamf.plugins.discovery import OPERATIONS, find_registered, is_path, kernel_names, operation
from mamf.regime_names import BURST, NAMES
from mamf.text import visible

#: As it is written in papers: 1613 TFLOPS, 1.6 PFLOP/s, 3.9 TB/s.
_RATE = re.compile(
    r"(?<![\w.])(\d{1,9}(?:\.(\d{1,9}))?)\s*([PTG])(FLOPS?(?:/s)?|B/s)(?![\w/])", re.ASCII | re.IGNORECASE
)
_SCALES = {"P": 1e3, "T": 1.0, "G": 1e-3}
_MOST_CHARACTERS, _AT_ONCE, _PATIENCE_SECONDS = 500, 1 << 20, 30.0


def read_claims(options: argparse.Namespace) -> Source | None:
    """The claims of the options; None if there are none, as with --resume. Raises UsageError or RunLogError."""
    if options.source is not None and options.claim:
        raise UsageError("a log and --claim are reproduced one at a time: leave one out")
    if options.claim:
        return claims_in_words(options.claim)
    if options.source is None:
        return None
    with _found(options.source) as path, as_file(path) as file:
        if run := read_legacy_or_none(file):
            return source_of_finder(path.name, run, options.top)
        return source_of_log(read_log(file), options.top)


@contextmanager
def _found(source: str) -> Iterator[Path]:
    """The file, or a copy of what an https address holds. Raises UsageError if it cannot be fetched, or is too long."""
    if "://" not in source:
        yield Path(source)
        return
    if not source.lower().startswith("https://"):
        raise UsageError(f"{visible(shorten(source))}: only https addresses are read")
    with TemporaryDirectory() as folder:
        name = re.sub(r"[^\w.-]", "_", source.partition("?")[0].rpartition("/")[2], flags=re.ASCII)
        copy = Path(folder, name.lstrip(".") or "log.jsonl")
        try:
            with urllib.request.urlopen(source, timeout=_PATIENCE_SECONDS) as answer, copy.open("wb") as file:
                for piece in iter(lambda: answer.read(_AT_ONCE), b""):
                    if file.tell() + file.write(piece) > 2 * MOST_BYTES:
                        raise UsageError(f"{shorten(source)} {TOO_LONG}")
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read {visible(shorten(source))}: {visible(str(error))}") from None
        yield copy


def claims_in_words(texts: Sequence[str]) -> Source:
    """Claims of one operation. Raises UsageError that names what a text lacks."""
    found = [_claim_in_words(text) for text in texts]
    operations = list(dict.fromkeys(of.name for of, _ in found))
    if len(operations) > 1:
        raise UsageError(f"claims of {' and of '.join(operations)}: reproduce one operation at a time")
    return Source("--claim", operations[0], tuple(claim for _, claim in found))


def _claim_in_words(text: str) -> tuple[AnyOperation, Claim]:
    shown = visible(shorten(text))
    rates = list(_RATE.finditer(text)) if len(text) <= _MOST_CHARACTERS else []
    if len(rates) != 1 or not float(rates[0][1]):
        raise UsageError(f"{shown} names {'no' if not rates else 'not one'} rate: write one, such as 1613 TFLOPS")
    asked = argparse.Namespace(dtype=None, set=[])
    regime, names, by_shape = BURST, list[str](), dict[str, list[AnyOperation]]()
    for word in (text[: rates[0].start()] + text[rates[0].end() :]).split():
        if word in NAMES:
            regime = word
        elif word in DIRECTIONS:
            asked.set.append(f"direction={word}")
        elif "=" in word:
            asked.set.append(word)
        elif _is_dtype(word):
            asked.dtype = [word]
        elif operations := _operations_of_shape(word):
            by_shape[word] = operations
        else:
            names.append(word)
    if len(names) != 1 or len(by_shape) != 1:
        what, given = ("shape", [*by_shape]) if len(by_shape) != 1 else ("kernel", names)
        raise UsageError(f"{shown} names {len(given)} {what}s ({visible(' '.join(given)[:80])}): name one {what}")
    of = _operation_of(names[0], next(iter(by_shape.values())))
    fields = {name: values[0] for name, values in asked_for(of, asked).items()}
    rate, decimals, prefix, unit = rates[0].groups()
    scale, shape = _SCALES[prefix.upper()], of.parse_shape(next(iter(by_shape)))
    problem = of.problem_type(**{**fields, "dtype": of.problem_type.dtype})
    if (counted := problem.work(shape).unit).endswith("B/s") != unit.upper().endswith("B/S"):
        raise UsageError(f"{shown}: the rate of {of.name} is in {counted}")
    half = 0.5 * 10.0 ** -len(decimals or "") * scale
    value = float(rate) * scale
    return of, Claim(regime, Asked(fields), shape, names[0], value, printed(value, half))


def _is_dtype(word: str) -> bool:
    with suppress(UnknownNameError):
        return bool(canonical_name(word))
    return False


def _operations_of_shape(word: str) -> list[AnyOperation]:
    """The operations that read a word as a shape."""
    found = []
    for name in find_registered(OPERATIONS):
        with suppress(MamfError):
            of = operation(name)
            of.parse_shape(word)
            found.append(of)
    return found


def _operation_of(kernel: str, operations: Sequence[AnyOperation]) -> AnyOperation:
    """The one of these operations that has the kernel. Raises UnknownNameError."""
    having = [of for of in operations if is_path(kernel) or matching_kernels(of, kernel)]
    if not having:
        raise UnknownNameError("kernel", kernel, [name for of in operations for name in kernel_names(of)])
    return having[0]


def matching_kernels(of: AnyOperation, name: str) -> list[str]:
    """The kernel of this name, else those whose names begin with it: ``flash-attn`` may be any of three."""
    known = kernel_names(of)
    if name.partition("[")[0] in known:
        return [name]
    return [each for each in known if each.startswith(name)]
