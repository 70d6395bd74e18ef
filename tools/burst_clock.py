"""Measure the clock during the first milliseconds of a burst, with clock stamps and with the driver's sensor.

    python tools/burst_clock.py > docs/burst-clock-h200.csv   # needs an NVIDIA GPU; takes 20 s

Stamps read the cycle counters of the compute units, so they show the actual clock. In each burst, the device first
rests, and then runs one matmul many times, with a stamp after each launch. Meanwhile, a thread reads the sensor. The
tool prints the medians of all bursts as a CSV table, and tools/pictures.py draws a picture of this table. It leaves out
bursts without valid stamps. The column ``bursts`` has the number of bursts that it used.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from mamf.backend import Backend, Unavailability
from mamf.plugins.discovery import make_kernel, make_operation, open_backend
from mamf.report.charts.picture import (
    SMALL_FONT_POINTS,
    TEXT_FONT_POINTS,
    DrawablePanel,
    LegendEntries,
    Picture,
    style_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHAPE, BURST_COUNT, LAUNCHES_PER_BURST, REST_SECONDS = "4096x4096x4096", 20, 99, 0.2
#: The number of cache flushes before the launches. As in mamf's bursts, they keep the device busy while the host queues
#: the launches.
FLUSHES_BEFORE_LAUNCHES = 64
#: The time between two readings of the sensor. Without it, the thread that reads would slow down the thread that queues
#: the launches.
PAUSE_SECONDS = 0.0002
COLUMNS = ("device", "shape", "data", "source", "milliseconds", "mhz", "bursts")
#: The number of bursts in tables without the column ``bursts``, which an earlier version of this tool printed.
_BURSTS_WITHOUT_COLUMN = 20
STAMPS, SENSOR = "compute units", "sensor"


class ClockPoint(NamedTuple):
    """A clock in MHz, and its time in milliseconds since the first launch of the burst began."""

    milliseconds: float
    mhz: float


def measure_bursts(backend: Backend, data: str) -> tuple[list[list[ClockPoint | None]], list[list[ClockPoint]]]:
    """Run the bursts. Return, for each burst, the clocks of its launches from stamps, and the sensor's readings.

    The clock of a launch without valid stamps is None. Leave out bursts without valid stamps at their first or last
    launch, because their readings cannot be assigned to launches. ``data``: the values of the operands, such as
    ``normal`` or ``zeros``. Raises SystemExit if the device has no stamps or no sensors, or no burst has valid stamps.
    """
    sources: tuple[Any, Any] = (backend.clock_stamps, backend.telemetry)
    for source in sources:
        if isinstance(source, Unavailability):
            raise SystemExit(f"{source.reason}: {source.remedy}")
    stamps, sensor = sources
    matmul = make_operation("matmul")
    kernel, problem = make_kernel(matmul, "torch.mm"), matmul.make_problem(backend, {"dtype": "bfloat16", "data": data})
    pool = backend.make_operand_pool(data, 0)
    stamped_clocks: list[list[ClockPoint | None]] = []
    sensor_clocks: list[list[ClockPoint]] = []
    with kernel.apply_settings(backend, problem):
        launch = kernel.prepare(backend, problem, matmul.parse_shape(SHAPE), pool).launches[0]
        for number in range(BURST_COUNT + 1):
            backend.synchronize()
            time.sleep(REST_SECONDS)
            readings: list[tuple[float, float]] = []
            is_over = threading.Event()
            reader = threading.Thread(target=read_sensor, args=(sensor, readings, is_over))
            reader.start()
            for _ in range(FLUSHES_BEFORE_LAUNCHES):
                backend.flush_cache()
            marks = [stamps.record_stamp()]
            for _ in range(LAUNCHES_PER_BURST):
                launch()
                marks.append(stamps.record_stamp())
            backend.synchronize()
            end = time.perf_counter()
            is_over.set()
            reader.join()
            burst = stamps.compute_elapsed(marks[0], marks[-1])
            # Leave out the first burst, which also compiles kernels and allocates memory.
            if burst is None or number == 0:
                continue
            stamped_clocks.append(list(compute_launch_clocks(stamps, marks)))
            begin = end - burst.seconds
            sensor_clocks.append([ClockPoint(1e3 * (time_read - begin), mhz) for time_read, mhz in readings])
    pool.release_buffers()
    if not any(clock for clocks in stamped_clocks for clock in clocks):
        raise SystemExit("no launch has valid clock stamps: end other programs on the device, and run the tool again")
    return stamped_clocks, sensor_clocks


def read_sensor(sensor: Any, readings: list[tuple[float, float]], is_over: threading.Event) -> None:
    """Append the host's time and the clock in MHz to ``readings`` again and again, until ``is_over`` is set."""
    while not is_over.is_set():
        before = time.perf_counter()
        hertz = sensor.read().clock_hz
        if hertz is not None:
            readings.append(((before + time.perf_counter()) / 2, hertz / 1e6))
        time.sleep(PAUSE_SECONDS)


def compute_launch_clocks(stamps: Any, marks: Sequence[Any]) -> Iterator[ClockPoint | None]:
    """Yield the clock of each launch, at the middle of the launch, or None for a launch without valid stamps."""
    for start, end in itertools.pairwise(marks):
        launch, until_end = stamps.compute_elapsed(start, end), stamps.compute_elapsed(marks[0], end)
        if launch is None or not launch.clock_hz or until_end is None:
            yield None
        else:
            yield ClockPoint(1e3 * (until_end.seconds - launch.seconds / 2), launch.clock_hz / 1e6)


def compute_medians_by_launch(all_bursts: Sequence[Sequence[ClockPoint | None]]) -> list[ClockPoint]:
    """Return one point for each launch: the medians over all bursts in which the launch has a clock."""
    clocks_by_launch = ([clock for clock in clocks if clock] for clocks in zip(*all_bursts, strict=True))
    return [ClockPoint(*map(statistics.median, zip(*clocks, strict=True))) for clocks in clocks_by_launch if clocks]


def compute_medians_by_millisecond(all_bursts: Sequence[Sequence[ClockPoint]], last: float) -> list[ClockPoint]:
    """Return one point for each millisecond up to ``last``: the median of the readings of all bursts."""
    readings: dict[int, list[float]] = defaultdict(list)
    for point in itertools.chain.from_iterable(all_bursts):
        if 0 <= point.milliseconds <= last:
            readings[int(point.milliseconds)].append(point.mhz)
    return [ClockPoint(millisecond + 0.5, statistics.median(mhz)) for millisecond, mhz in sorted(readings.items())]


# -- the picture -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BurstClock(Picture):
    """A picture of the clock over time. ``lines``: the name of each line, and its points as (milliseconds, MHz)."""

    lines: tuple[tuple[str, tuple[tuple[float, float], ...]], ...]

    @property
    def height_inches(self) -> float:
        return 5.0

    def make_panel_rows(self) -> Sequence[Sequence[DrawablePanel | None]]:
        return [[DrawablePanel(f"clock over time: {self.title}", functools.partial(_draw, chart=self))]]

    def make_legend(self) -> LegendEntries:
        return [(name, line_style) for (name, _), line_style in zip(self.lines, _LINE_STYLES, strict=False)]


_LINE_STYLES: tuple[dict[str, Any], ...] = (
    {"color": "#1f77b4", "linewidth": 2.5},
    {"color": "#555555", "linewidth": 2.0, "linestyle": "--"},
    {"color": "#ff7f0e", "linewidth": 2.5},
)


def make_picture(path: Path) -> BurstClock:
    """Return the picture of a table that this tool printed. It shows the sensor's clock only for the first data."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    first = rows[0]
    burst_count = first.get("bursts", _BURSTS_WITHOUT_COLUMN)
    lines: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in rows:
        if row["source"] == STAMPS or row["data"] == first["data"]:
            name = f"{STAMPS}, {row['data']} data" if row["source"] == STAMPS else "what the sensor says"
            lines[name].append((float(row["milliseconds"]), float(row["mhz"])))
    (_, stamped_points), (_, sensor_points) = list(lines.items())[:2]
    mhz = [round(statistics.median(clock for _, clock in points)) for points in (sensor_points, stamped_points)]
    return BurstClock(
        f"In a burst the sensor says {mhz[0]} MHz, and the compute units run at {mhz[1]}",
        f"{first['device']}, torch.mm {first['shape']} in bfloat16, launched back to back after a rest",
        tuple((name, tuple(points)) for name, points in lines.items()),
        notes=(f"medians of {burst_count} bursts; compute units: clock stamps around each launch",),
    )


def _draw(axes: Axes, chart: BurstClock) -> None:
    style_axes(axes)
    for (_, points), line_style in zip(chart.lines, _LINE_STYLES, strict=False):
        axes.plot(*zip(*points, strict=True), **line_style)
    axes.set_xlabel("milliseconds since the first launch", fontsize=TEXT_FONT_POINTS)
    axes.set_ylabel("clock (MHz)", fontsize=TEXT_FONT_POINTS)
    axes.tick_params(labelsize=SMALL_FONT_POINTS)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    backend = open_backend("cuda")
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(COLUMNS)
    for data in ("normal", "zeros"):
        stamped_clocks, sensor_clocks = measure_bursts(backend, data)
        launch_points = compute_medians_by_launch(stamped_clocks)
        sensor_points = compute_medians_by_millisecond(sensor_clocks, launch_points[-1].milliseconds)
        for source, points in ((STAMPS, launch_points), (SENSOR, sensor_points)):
            for milliseconds, mhz in points:
                cells = (f"{milliseconds:.3f}", f"{mhz:.1f}", len(stamped_clocks))
                table.writerow((backend.info.name, SHAPE, data, source, *cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
