"""How often `mamf verify` finds a simulated card that flips a bit in one of so many launches, beside what it states.

    python tools/verify_rates.py                            # one in 10^6 launches, about 10^6 checked: 20 minutes
    python tools/verify_rates.py --rate 1e-4 --budget 3s    # one in 10^4: 20 seconds

Each card has its own seed and is verified in virtual time, by one kernel, until the budget ends.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

from mamf.cli.options import duration
from mamf.engine.strategies.verify import VerifySweep, verify_plan
from mamf.report.verification import counts
from mamf.testing import Physics, SimulatedBackend
from mamf.testing.simulated_kernels import SimulatedMatmul


def verified(rate: float, seed: int, budget: float) -> dict[str, int]:
    """What a verification of one card counts."""
    card, kernel = SimulatedBackend(physics=Physics(flips=rate), seed=seed), SimulatedMatmul()
    plan = verify_plan(card, {kernel.name: kernel}, budget, ["bfloat16"], seed=1000 * seed)
    return counts(list(VerifySweep(plan, [kernel], card).results()))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=1e-6, help="wrong launches of all (default: 1e-6)")
    parser.add_argument("--cards", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the first card (default: 0)")
    parser.add_argument("--budget", type=duration, default=280.0, help="virtual time for each card (default: 280s)")
    options = parser.parse_args(arguments)
    found = [verified(options.rate, seed, options.budget) for seed in range(options.seed, options.seed + options.cards)]
    stated = [1 - (1 - options.rate) ** each["launches"] for each in found]
    expected, caught = math.fsum(stated), sum(each["wrong"] > 0 for each in found)
    error = math.sqrt(math.fsum(each * (1 - each) for each in stated))
    launches = sum(each["launches"] for each in found) / len(found)
    print(f"{len(found)} cards, one wrong launch in {1 / options.rate:.0f}, {launches:.0f} launches checked on each")
    print(f"found: {caught}; stated: {expected:.1f} +- {error:.1f}")
    return 0 if abs(caught - expected) <= 3 * error else 1


if __name__ == "__main__":
    raise SystemExit(main())
