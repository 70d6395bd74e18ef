"""Show progress on stderr: the number of measured rows, the elapsed and remaining time, and the best row. Show nothing
if stderr is not a terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from tqdm import tqdm

from mamf.measurement import Measurement
from mamf.report.document import format_rate

_PHASE_LISTENERS: list[Callable[[str], object]] = []


@contextmanager
def add_phase_listener(listener: Callable[[str], object]) -> Iterator[None]:
    """While the context is open, call ``listener`` with a text each time a run begins a row or a phase. A phase is a
    part of a run, such as "burst: measuring shapes near the fastest ones".
    """
    _PHASE_LISTENERS.append(listener)
    try:
        yield
    finally:
        _PHASE_LISTENERS.remove(listener)


class ProgressBar(AbstractContextManager["ProgressBar"]):
    """A progress bar that counts the measured rows of a run.

    - ``row_count``: the number of rows that the run will measure, or None if it is unknown.
    - ``shows_best_rows``: whether to show the best row. If False, show the number of wrong results instead.
    - ``logged_rows``: the rows that the log already contains. The bar can show one of them as the best row, but does
      not count them.
    - ``budget_seconds``: the time budget of the run, which the bar then shows instead of the remaining time; None for a
      run without a budget.
    - ``is_steady``: whether rows take about equally long. If not, the bar shows no remaining time.
    """

    def __init__(
        self,
        row_count: int | None,
        logged_rows: Iterable[Measurement] = (),
        shows_best_rows: bool = True,
        budget_seconds: float | None = None,
        is_steady: bool = True,
    ) -> None:
        time_limit = (
            f" of {tqdm.format_interval(budget_seconds)}"
            if budget_seconds is not None
            else "<{remaining}"
            if is_steady and row_count is not None
            else ""
        )
        self._bar: tqdm[Any] = tqdm(
            total=row_count,
            # A narrow terminal cuts off the end of the line, so print the best row before what the run is doing now.
            bar_format=f"{{n_fmt}}{'' if row_count is None else '/{total_fmt}'}"
            f" [{{elapsed}}{time_limit}]{{postfix}}  {{desc}}",
            file=sys.stderr,
            disable=None,
            leave=False,
            dynamic_ncols=True,
        )
        self._shows_best_rows, self._wrong_count, self._phase = shows_best_rows, 0, ""
        self._best_rows: dict[str, Measurement] = {}
        for row in logged_rows:
            self._update_best_row(row)

    def show_phase(self, text: str) -> None:
        self._phase = text
        self._show_text(text, text)

    def show_step(self, step: str, is_prepared: bool) -> None:
        """Show that the run prepares ``step`` (the shape and kernel of a row). If the step is already prepared, show
        the phase of the run instead.
        """
        if is_prepared:
            self._show_text(self._phase, f"measuring {step}")
        else:
            self._show_text(f"preparing {step}", f"preparing {step}")

    def _show_text(self, text: str, listener_text: str) -> None:
        self._bar.set_description_str(text)
        for listener in _PHASE_LISTENERS:
            listener(listener_text)

    def add_row(self, row: Measurement) -> None:
        """Count a measured row, and show the best row so far among the rows of the same regime."""
        for listener in _PHASE_LISTENERS:
            listener(f"{row.regime} {row.shape} {row.kernel}")
        self._update_best_row(row)
        self._wrong_count += row.status == "wrong_result"
        if not self._shows_best_rows:
            self._bar.set_postfix_str(f"{self._wrong_count} wrong", refresh=False)
        elif (best := self._best_rows.get(row.regime)) is not None:
            self._bar.set_postfix_str(
                f"best {best.regime} {format_rate(best.best_rate, best.work.unit)} @ {best.shape}",
                refresh=False,
            )
        self._bar.update()

    def _update_best_row(self, row: Measurement) -> None:
        best = self._best_rows.get(row.regime)
        if row.ok and (best is None or row.rate_sort_key > best.rate_sort_key):
            self._best_rows[row.regime] = row

    def __exit__(self, *exception_info: object) -> None:
        self._bar.close()


class PhaseLines(AbstractContextManager["PhaseLines"]):
    """Lines on stderr, one per device, that show what each device is doing. ``devices``: the indices of the devices."""

    def __init__(self, devices: Iterable[int]) -> None:
        self._bars: dict[int, tqdm[Any]] = {
            device: tqdm(
                total=0,
                bar_format="{desc}",
                desc=f"device {device}",
                position=position,
                file=sys.stderr,
                disable=None,
                leave=False,
            )
            for position, device in enumerate(devices)
        }

    def show_phases(self, phases: Mapping[int, str]) -> None:
        for device, phase in phases.items():
            self._bars[device].set_description_str(f"device {device}: {phase}")

    def __exit__(self, *exception_info: object) -> None:
        for bar in self._bars.values():
            bar.close()
