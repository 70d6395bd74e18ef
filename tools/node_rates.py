"""Rates of false warnings and of detected slow cards of mamf node: its real verdict on drawn nodes.

    python tools/node_rates.py                          # 1,000 nodes for each number: about 3 minutes
    python tools/node_rates.py --nodes 200 --cards 8

Only the figures of cards are drawn, as measured on H200s: standard deviation between cards 1.2 % in burst and 1.0 % in
sustained with a correlation of 0.83, memory and copies to the next card 0.3 %, copies to and from the host 5 %. Where
the spread varies, burst and sustained have it alone ("products"), or one factor for each card is in all of its figures
("all"), beside 0.1 % in burst, 0.5 % in sustained and 0.2 % elsewhere. The slow card is one of the node's. A baseline
of the same cards is another run of each, 0.3 % (burst) and 0.35 % (sustained) from run to run. docs/cluster.md has
some of the tables.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mamf.node.comparing import Baseline
from mamf.node.figures import BURST, COPY, READ, SUSTAINED, TO_DEVICE, TO_HOST, TO_PEER, Device
from mamf.node.verdict import CRITICAL, OK, Verdict, judged

CARDS = (2, 4, 8, 16)
SPREADS = (0.012, 0.017, 0.02, 0.025, 0.03, 0.04)
PRODUCTS_SLOWER = (0.03, 0.04, 0.05, 0.06, 0.08, 0.1, 0.15, 0.2)
MEMORY_SLOWER = (0.01, 0.02, 0.03, 0.05)
SAME_SLOWER = (0.0, 0.01, 0.015, 0.02, 0.03)
WIDE = 0.03
_TYPICAL = {BURST: 855.0, SUSTAINED: 706.0, COPY: 4.22, READ: 4.24, TO_PEER: 0.388, TO_DEVICE: 0.055, TO_HOST: 0.055}
_APART = {COPY: 0.003, READ: 0.003, TO_PEER: 0.003, TO_DEVICE: 0.05, TO_HOST: 0.05}
_MEASURED = (0.012, 0.010)
_CORRELATION = 0.83
_VISITS = {BURST: 0.001, SUSTAINED: 0.005}
_REPEATS = {BURST: 0.003, SUSTAINED: 0.0035}
_NAME = "drawn"
Draw = Callable[[random.Random, int], list[Device]]


def products_apart(burst: float, sustained: float) -> Draw:
    """Nodes of cards whose burst and sustained lie so far apart."""

    def draw(chance: random.Random, count: int) -> list[Device]:
        return [_card(rank, _products(chance, burst, sustained)) for rank in range(count)]

    return draw


def _products(chance: random.Random, burst: float, sustained: float) -> dict[str, float]:
    own, other = chance.gauss(0, 1), chance.gauss(0, 1)
    factors = {figure: chance.gauss(1, apart) for figure, apart in _APART.items()}
    beside = _CORRELATION * own + math.sqrt(1 - _CORRELATION**2) * other
    return {**factors, BURST: 1 + burst * own, SUSTAINED: 1 + sustained * beside}


def all_apart(spread: float) -> Draw:
    """Nodes of cards that are faster or slower in all that they do."""

    def draw(chance: random.Random, count: int) -> list[Device]:
        found = []
        for rank in range(count):
            card = chance.gauss(1, spread)
            found.append(
                _card(rank, {figure: card * chance.gauss(1, _VISITS.get(figure, 0.002)) for figure in _TYPICAL})
            )
        return found

    return draw


def _card(rank: int, factors: Mapping[str, float]) -> Device:
    figures = {figure: value * factors[figure] for figure, value in _TYPICAL.items()}
    return Device(rank, 0, rank, _NAME, f"uuid{rank}", figures=figures)


def slowed(devices: Sequence[Device], figures: Sequence[str], share: float) -> list[Device]:
    """The same with the first card slower."""
    first = {name: value * (1 - share * (name in figures)) for name, value in devices[0].figures.items()}
    return [replace(devices[0], figures=first), *devices[1:]]


def measured_again(chance: random.Random, devices: Sequence[Device]) -> list[Device]:
    """Another run of the same cards."""
    return [
        replace(
            each,
            figures={name: rate * chance.gauss(1, _REPEATS.get(name, 0.003)) for name, rate in each.figures.items()},
        )
        for each in devices
    ]


def verdicts(draw: Draw, cards: int, nodes: int, figures: Sequence[str] = (), slower: float = 0.0) -> list[Verdict]:
    """Of so many nodes, the same ones in each call."""
    chance = random.Random(cards)
    return [judged(slowed(draw(chance, cards), figures, slower)) for _ in range(nodes)]


def against_themselves(cards: int, nodes: int, slower: float) -> list[Verdict]:
    """Verdicts by a baseline of the same cards, of which one got slower. One card has no peers."""
    chance, draw, found = random.Random(cards), products_apart(*_MEASURED), []
    for _ in range(nodes):
        devices = draw(chance, cards)
        baseline = Baseline({}, "a log", cards=measured_again(chance, devices))
        found.append(judged(slowed(measured_again(chance, devices), (BURST, SUSTAINED), slower), {_NAME: baseline}))
    return found


def format_alarms(found: Sequence[Verdict]) -> str:
    """In percent; in brackets how many said that the cards lie farther apart than expected."""
    critical = sum(each.level == CRITICAL for each in found)
    wide = sum(bool(each.notes) for each in found)
    shares = _percent(sum(each.level != OK for each in found), found), _percent(wide, found)
    return f"{shares[0]} ({shares[1]})" + (f", {critical} critical" if critical else "")


def format_finds(found: Sequence[Verdict]) -> str:
    """In percent: the slow card was named."""
    return _percent(sum(any(each.rank == 0 for each in verdict.findings) for verdict in found), found)


def _percent(count: int, found: Sequence[Verdict]) -> str:
    return f"{100 * count / len(found):.3g}"


def print_table(title: str, columns: Sequence[float], rows: Mapping[int, Sequence[str]]) -> None:
    """Print it as markdown."""
    print(
        f"\n{title}\n\n| cards | " + " | ".join(f"{each:.3g} %" for each in (100 * share for share in columns)) + " |"
    )
    print("|--:|" + "--:|" * len(columns))
    for cards, cells in rows.items():
        print(f"| {cards} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--cards", type=int, nargs="+", default=CARDS)
    options = parser.parse_args()
    nodes, every, usual = options.nodes, options.cards, products_apart(*_MEASURED)
    both, memory = (BURST, SUSTAINED), (COPY, READ)
    healthy = {cards: format_alarms(verdicts(usual, cards, nodes)) for cards in every}
    print("Warned of, cards as far apart as measured, in %:", healthy)
    print_table(
        "Warned of in % of nodes (said to be wide), by the spread of burst and sustained",
        SPREADS,
        {
            cards: [format_alarms(verdicts(products_apart(each, each), cards, nodes)) for each in SPREADS]
            for cards in every
        },
    )
    print_table(
        "The same, by the spread of all figures alike",
        SPREADS,
        {cards: [format_alarms(verdicts(all_apart(each), cards, nodes)) for each in SPREADS] for cards in every},
    )
    for title, draw, figures, shares in (
        ("Found in %, by how much slower in burst and sustained", usual, both, PRODUCTS_SLOWER),
        (f"The same on nodes {WIDE:.0%} apart", products_apart(WIDE, WIDE), both, PRODUCTS_SLOWER),
        ("Found in %, by how much slower in memory", usual, memory, MEMORY_SLOWER),
    ):
        rows = {
            cards: [format_finds(verdicts(draw, cards, nodes, figures, each)) for each in shares] for cards in every
        }
        print_table(title, shares, rows)
    rows = {
        cards: [format_finds(against_themselves(cards, nodes, each)) for each in SAME_SLOWER] for cards in (1, *every)
    }
    print_table("Found in %, by how much slower than in a baseline of the same cards", SAME_SLOWER, rows)


if __name__ == "__main__":
    main()
