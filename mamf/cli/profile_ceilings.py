"""What the steps of ``mamf profile`` are held to: ceilings, and the rates of single products."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from mamf.api.measuring import sweep
from mamf.backend import Backend
from mamf.ceilings.share import KnownCeiling, given_ceiling
from mamf.cli.terminal import warn
from mamf.contribution.known_ceilings import measured_peak
from mamf.errors import MamfError, RunLogError, UsageError
from mamf.logs.run_log import RunLog, read_run_log
from mamf.measurement import Measurement
from mamf.operations.matmul.operation import Matmul
from mamf.plans import MATMUL
from mamf.profiling.breakdown import ProductRow
from mamf.profiling.folder import LOGS
from mamf.profiling.profile import Profile
from mamf.regime_names import BURST, SUSTAINED

_MOST_PRODUCTS, _LEAST_SHARE, _BUDGET_SECONDS = 8, 0.01, 60.0
#: Rates (1e12 FLOP/s) of products alone by shape, dtype and layout.
Rates = dict[tuple[str, str, str], float]


def given_logs(paths: Iterable[Path]) -> list[list[RunLog]]:
    """The logs of each ``--ceiling``: a file, or all in a folder of ``mamf node`` or ``mamf autoprofile``.

    Raises UsageError for a folder without ceilings, RunLogError for a log with neither a sustained one nor a product.
    """
    sets = []
    for path in paths:
        files = [path / LOGS["ceilings"], *sorted(path.glob("*-find.jsonl"))] if path.is_dir() else [path]
        logs = [read_run_log(file) for file in files if file.exists() or file == path]
        if not logs:
            raise UsageError(f"{path} holds no ceilings: name a log, or a folder of 'mamf node' or 'mamf autoprofile'")
        if SUSTAINED not in logs[0].ceilings and (logs[0].ceilings or not rates_of(logs[0].measurements)):
            held = f"it holds: {', '.join(logs[0].ceilings) or 'none'}"
            raise RunLogError(f"{path} holds no sustained ceiling ({held}); measure one with 'mamf find'")
        sets.append(logs)
    return sets


def of_device(sets: Iterable[Sequence[RunLog]], name: str, uuid_hash: Callable[[], str | None]) -> list[RunLog]:
    """Of logs of several devices those of one: of its name and, as cards of one model differ by percents, its serial
    number, which is asked for if need be. ``name``: empty if it is unknown.
    """
    found = []
    for logs in sets:
        cards = [(log.header["device"]["name"], log.header["device"]["uuid_hash"]) for log in logs]
        own = {card for card in cards if len(set(cards)) == 1 or name in ("", card[0])}
        if len(own) > 1:
            own = {card for card in own if card[1] and card[1] == uuid_hash()}
        if not own:
            warn(f"{logs[0].path.parent} has ceilings of several devices, none surely of this one: name its log")
        found += [log for log, card in zip(logs, cards, strict=True) if card in own]
    return found


def ceiling_in(logs: Iterable[RunLog], regime: str, dtype: str) -> KnownCeiling | None:
    found = [log.all_ceilings.get((dtype, regime)) for log in logs]
    known = [ceiling for ceiling in found if ceiling is not None and ceiling.interval.is_known]
    return given_ceiling(known[-1]) if known else None


@functools.cache
def known_here(device: str | None, regime: str, dtype: str) -> KnownCeiling | None:
    """The ceiling measured here or contributed; a theoretical peak is not a ceiling."""
    try:
        known = measured_peak(device, dtype, regime)
    except MamfError:
        return None
    return KnownCeiling(dtype, regime, known.tflops, known.source, known.description)


def rates_of(rows: Iterable[Measurement], dtype: str = "") -> Rates:
    """Those of products in burst, of the fastest kernel each. ``dtype``: what it is called in place of the rows'."""
    rates: Rates = {}
    for row in rows:
        if row.operation == MATMUL and row.ok and row.regime == BURST and row.problem.data == "normal":
            key = (str(row.shape), dtype or row.problem.dtype, row.problem.layout)
            rates[key] = max(row.best_rate, rates.get(key, 0.0))
    return rates


def with_rates(products: Iterable[ProductRow], rates: Rates) -> tuple[ProductRow, ...]:
    """Products with their rates alone, as far as they are known. Batches are no such products."""
    return tuple(
        row
        if row.batch > 1
        else replace(
            row,
            alone=rates.get((row.shape, row.dtype, row.layout), row.alone),
            alone_padded=rates.get((row.padded, row.dtype, row.layout), row.alone_padded),
        )
        for row in products
    )


def measure_products(profile: Profile, backend: Backend) -> Rates:
    """The rates of the products that take most of a step, and of their padded shapes. Those that cannot be measured are
    left out, with a line.
    """
    single = [row for row in profile.products if row.batch == 1]
    rows = [row for row in single if row.seconds >= _LEAST_SHARE * profile.whole_seconds][:_MOST_PRODUCTS]
    gc.collect()  # what the script left
    backend.release_memory()
    rates: Rates = {}
    for dtype, layout in dict.fromkeys((row.dtype, row.layout) for row in rows):
        same = [row for row in rows if (row.dtype, row.layout) == (dtype, layout)]
        shapes = list(dict.fromkeys(shape for row in same for shape in (row.shape, row.padded)))
        warn(f"measuring products of {dtype}, {layout}: {', '.join(shapes)}")
        # What the script lets torch do with float32.
        is_exact = dtype != "float32" or backend.settings().get("float32_matmul_precision", "highest") == "highest"
        try:
            problem = Matmul().problem_for(backend, {"dtype": dtype if is_exact else "tf32", "layout": layout})
            measured = list(sweep(shapes, problem=problem, backend=backend, budget_seconds=_BUDGET_SECONDS))
        except MamfError as error:
            warn(f"products of {dtype}, {layout} were not measured: {error}")
            continue
        rates |= rates_of(measured, dtype)
        for row in (row for row in measured if not row.ok):
            warn(f"no rate of {row.shape}, {dtype}, {layout}: {row.status}, {row.reason}")
    return rates
