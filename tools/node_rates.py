"""How often the verdict of ``mamf node`` is wrong: false alarms and slow cards found, by the spread between cards.

    python tools/node_rates.py                                   # the tables of docs/cluster.md: about 4 minutes
    python tools/node_rates.py --picture docs/node-rates.png     # and both curves, for 4 and 8 cards
    python tools/node_rates.py --nodes 500 --cards 8

It draws nodes of cards at random and calls the real verdict. Burst and sustained have the spread of the column, with
the correlation of 0.83 that 18 H200 have; memory and copies to the next card have 0.3 %, copies to and from the host
5 %. The slow card is one of the node's, so that it may also be one of the faster ones; the others' median never
contains it. A baseline of the same cards is another run of each: 0.3 % from run to run in burst, 0.35 % in sustained.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mamf.node.verdict import (
    BURST,
    COPY,
    CRITICAL,
    OK,
    READ,
    SUSTAINED,
    TO_DEVICE,
    TO_HOST,
    TO_PEER,
    Baseline,
    Device,
    Verdict,
    judge,
)

CARDS, DRAWN_CARDS = (2, 4, 8, 16), (4, 8)
SPREADS = (0.005, 0.012, 0.015, 0.02, 0.025, 0.03, 0.04)
SLOWER, MEMORY_SLOWER, BASELINE_SLOWER = (0.06, 0.1, 0.2), (0.01, 0.02, 0.03, 0.05), (0.0, 0.01, 0.02, 0.03, 0.05)
_USUAL_SPREAD, _CORRELATION = 0.012, 0.83
_TYPICAL = {BURST: 855.0, SUSTAINED: 706.0, COPY: 4.22, READ: 4.24, TO_PEER: 0.388, TO_DEVICE: 0.055, TO_HOST: 0.055}
_OTHER_SPREADS = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
_REPEATS = {BURST: 0.003, SUSTAINED: 0.0035}


def draw_node(chance: random.Random, cards: int, spread: float) -> list[Device]:
    """Draw healthy cards."""
    return [Device(index, 0, "drawn", f"uuid{index}", figures=_figures(chance, spread)) for index in range(cards)]


def _figures(chance: random.Random, spread: float) -> dict[str, float]:
    own, other = chance.gauss(0, 1), chance.gauss(0, 1)
    factors = {figure: chance.gauss(1, each) for figure, each in _OTHER_SPREADS.items()}
    factors[BURST] = 1 + spread * own
    factors[SUSTAINED] = 1 + spread * (_CORRELATION * own + math.sqrt(1 - _CORRELATION**2) * other)
    return {figure: value * factors[figure] for figure, value in _TYPICAL.items()}


def slow_down(devices: Sequence[Device], figures: Iterable[str], share: float) -> list[Device]:
    """Slow down the first card."""
    changed = {figure: devices[0].figures[figure] * (1 - share) for figure in figures}
    return [replace(devices[0], figures={**devices[0].figures, **changed}), *devices[1:]]


def measure_again(chance: random.Random, devices: Sequence[Device]) -> list[Device]:
    """Draw another run of the same cards."""

    def repeat(figures: Mapping[str, float]) -> dict[str, float]:
        return {name: rate * chance.gauss(1, _REPEATS.get(name, 0.003)) for name, rate in figures.items()}

    return [replace(device, figures=repeat(device.figures)) for device in devices]


def judge_nodes(
    nodes: int, cards: int, spread: float, slower: float = 0.0, figures: Sequence[str] = (BURST, SUSTAINED)
) -> list[Verdict]:
    """Judge drawn nodes, the same ones in each call."""
    chance = random.Random(cards)
    return [judge(slow_down(draw_node(chance, cards, spread), figures, slower)) for _ in range(nodes)]


def judge_by_baseline(nodes: int, cards: int, slower: float) -> list[Verdict]:
    """Judge nodes by an earlier run of the same cards, of which one is slower now."""
    chance, verdicts = random.Random(cards), []
    for _ in range(nodes):
        devices = draw_node(chance, cards, _USUAL_SPREAD)
        baseline = Baseline("a log", measure_again(chance, devices))
        verdicts.append(judge(slow_down(measure_again(chance, devices), (BURST, SUSTAINED), slower), baseline))
    return verdicts


def alarm_share(verdicts: Sequence[Verdict]) -> float:
    return sum(each.level != OK for each in verdicts) / len(verdicts)


def critical_share(verdicts: Sequence[Verdict]) -> float:
    return sum(each.level == CRITICAL for each in verdicts) / len(verdicts)


def found_share(verdicts: Sequence[Verdict]) -> float:
    """The share of nodes in which the slow card was named."""
    return sum(any(finding.place == "device 0" for finding in each.findings) for each in verdicts) / len(verdicts)


def percent(share: float) -> str:
    return f"{100 * share:.3g}"


def print_table(title: str, columns: Sequence[float], rows: Mapping[str, Sequence[str]]) -> None:
    """Print a table in markdown."""
    print(f"\n{title}\n\n| | " + " | ".join(f"{percent(each)} %" for each in columns) + " |")
    print("|:--|" + "--:|" * len(columns))
    for name, cells in rows.items():
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


def print_tables(nodes: int, cards: Sequence[int]) -> None:
    healthy = {count: [judge_nodes(nodes, count, spread) for spread in SPREADS] for count in cards}
    rows = {f"{count} cards": [percent(alarm_share(each)) for each in healthy[count]] for count in cards}
    print_table("False alarms in % of healthy nodes, by the spread of burst and sustained", SPREADS, rows)
    rows = {f"{count} cards": [percent(critical_share(each)) for each in healthy[count]] for count in cards}
    print_table("Of these CRITICAL, in % of nodes", SPREADS, rows)
    rows = {
        f"{count} cards, {percent(slower)} % slow": [
            percent(found_share(judge_nodes(nodes, count, spread, slower))) for spread in SPREADS
        ]
        for slower in SLOWER
        for count in cards
    }
    print_table("A slow card is found in % of nodes, by the spread", SPREADS, rows)
    rows = {
        f"{count} cards": [
            percent(found_share(judge_nodes(nodes, count, _USUAL_SPREAD, slower, (COPY, READ))))
            for slower in MEMORY_SLOWER
        ]
        for count in cards
    }
    print_table("Slow memory is found in % of nodes, by how much slower", MEMORY_SLOWER, rows)
    rows = {
        f"{count} cards": [percent(found_share(judge_by_baseline(nodes, count, slower))) for slower in BASELINE_SLOWER]
        for count in (1, *cards)
    }
    print_table("Found in % against a baseline of the same cards, by how much slower", BASELINE_SLOWER, rows)


def draw_curves(path: Path, nodes: int) -> None:
    """Draw false alarms and detection by spread."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    alarms, detection = figure.subplots(1, 2)
    across = [100 * spread for spread in SPREADS]
    for color, cards in enumerate(DRAWN_CARDS):
        style = {"color": f"C{color}", "marker": "o", "markersize": 3}
        shares = [alarm_share(judge_nodes(nodes, cards, spread)) for spread in SPREADS]
        alarms.plot(across, [100 * share for share in shares], label=f"{cards} cards", **style)
        for slower, line in ((0.06, "--"), (0.1, "-")):
            shares = [found_share(judge_nodes(nodes, cards, spread, slower)) for spread in SPREADS]
            label = f"{cards} cards, one {percent(slower)} % slow"
            detection.plot(across, [100 * share for share in shares], line, label=label, **style)
    alarms.set(title="False alarms", ylabel="% of healthy nodes")
    detection.set(title="A slow card is found", ylabel="% of nodes", ylim=(50, 101))
    for axes in (alarms, detection):
        axes.set_xlabel("spread of burst and sustained between cards, %")
        axes.axvline(100 * _USUAL_SPREAD, color="0.6", linewidth=1, label="H200")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=4000)
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    print_tables(options.nodes, options.cards)
    if options.picture:
        draw_curves(options.picture, options.nodes)


if __name__ == "__main__":
    main()
