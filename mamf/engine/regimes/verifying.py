"""Check the whole output of launches for ``mamf verify``, in two regimes: `spaced`, with a rest before each launch, and
`loaded`, back to back at the power limit.

mamf verifies the first output as in any measurement. If a kernel is deterministic, the device compares each later
output with the first one bit by bit. The host queues these comparisons and reads their results later. Otherwise mamf
verifies each output. Finally mamf verifies a launch on operands that include infinities, NaN and subnormal numbers.
"""

from __future__ import annotations

import math
from typing import ClassVar

from mamf.engine.regimes.base import CheckedKernel, Regime, Samples, StoppingRule, WrongResultError
from mamf.kernel import ComparisonFunction, Verdict, describe_wrong_cells
from mamf.measurement import (
    CHECKED_LAUNCHES_KEY,
    CHECKED_VALUES_KEY,
    DIFFERENT_BITS_KEY,
    ERROR_BOUND_KEY,
    WRONG_TILES_KEY,
)

# The number of launches after which the host checks whether any of their outputs differs from the first output.
_LAUNCHES_PER_COMPARISON = 8


class SpacedRegime(Regime):
    """The regime that checks one launch at a time. Each launch follows a rest that is three times as long as the
    launch, at most ``max_rest_seconds``.
    """

    name = "spaced"
    max_rest_seconds: ClassVar[float] = 0.05
    #: Seconds of load before the first checked launch of the first problem.
    first_problem_load_seconds: ClassVar[float] = 0.0
    #: Seconds of load before the first checked launch of each later problem.
    later_problem_load_seconds: ClassVar[float] = 0.0

    def prepare_device(self) -> None:
        self._load_seconds_left = self.first_problem_load_seconds

    def take_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        start_time, samples = self.backend.now(), Samples(details={CHECKED_LAUNCHES_KEY: 1, CHECKED_VALUES_KEY: 0})
        rounds = 0
        while self.backend.now() - start_time < self._load_seconds_left:
            self.require_advancing_clock(rounds)
            self.prepare_device_for_checked_launch(checked, 0.0)
            self.backend.synchronize()
            rounds += 1
        self._load_seconds_left = self.later_problem_load_seconds
        checked.change_operands_and_poison_outputs()
        result = checked.launches[0]()
        self.backend.submit()
        checked.verify_last_outputs(checks_all_elements=True)
        queue_comparison = checked.prepared.remember_output and checked.prepared.remember_output(0, result)
        while not samples.seconds_per_launch or not rule.should_stop(
            samples.seconds_per_launch, self.backend.now() - start_time, self.backend.now(), False
        ):
            self._launch_and_compare_outputs(checked, samples, queue_comparison, rule, launch_seconds)
        if checked.prepared.verify_special_values is not None:
            verdict = checked.prepared.verify_special_values()
            if not verdict.ok:
                raise WrongResultError(verdict)
            samples.details |= verdict.details
            checked.poison_outputs()
        samples.details[ERROR_BOUND_KEY] = checked.verdict.tolerance
        return samples

    def prepare_device_for_checked_launch(self, checked: CheckedKernel, launch_seconds: float) -> None:
        """Bring the device into the state in which the next launch is checked: let it rest in `spaced`, load it in
        `loaded`. ``launch_seconds``: about how many seconds a launch takes.
        """
        self.backend.synchronize()
        self.backend.sleep(min(3 * launch_seconds, self.max_rest_seconds))

    def _launch_and_compare_outputs(
        self,
        checked: CheckedKernel,
        samples: Samples,
        queue_comparison: ComparisonFunction | None,
        rule: StoppingRule,
        launch_seconds: float,
    ) -> None:
        """Launch a few times, compare each output with the output of the first launch, and store the times and counts
        in ``samples``. Raise WrongResultError if an output is wrong, or if a deterministic kernel gives an output that
        differs from the first output.

        ``queue_comparison``: queues the comparison of an output with the first output on the device, and returns a
        function that reads the result; None: verify each output instead.
        """
        marks, read_comparisons = [], []
        for _ in range(_LAUNCHES_PER_COMPARISON):
            self.prepare_device_for_checked_launch(checked, launch_seconds)
            checked.poison_outputs()
            start, result = self.backend.record_mark(), checked.launches[0]()
            self.backend.submit()
            marks.append((start, self.backend.record_mark()))
            read_comparisons += [queue_comparison(result)] if queue_comparison else []
            if not queue_comparison or not checked.prepared.is_deterministic:
                checked.verify_last_outputs(checks_all_elements=True)
        samples.add_reading(self.read_sensors())  # The device is still busy, so the sensors show it under load.
        self.backend.synchronize()
        samples.seconds_per_launch = [
            *samples.seconds_per_launch,
            *(self.backend.compute_seconds_between(*each) for each in marks),
        ][-_LAUNCHES_PER_COMPARISON:]
        comparisons = [read_comparison() for read_comparison in read_comparisons]
        differing = [comparison for comparison in comparisons if comparison.cells]
        samples.launch_count += len(marks)
        launches = int(samples.details[CHECKED_LAUNCHES_KEY]) + len(marks)
        samples.details |= {
            CHECKED_LAUNCHES_KEY: launches,
            CHECKED_VALUES_KEY: launches * comparisons[0].value_count if comparisons else 0,
        }
        if differing and checked.prepared.is_deterministic:
            reason = (
                f"{len(differing)} of {len(marks)} launches gave an output that differs from the output of the first "
                "launch"
            )
            details = {**samples.details, WRONG_TILES_KEY: describe_wrong_cells(differing[0])}
            raise WrongResultError(Verdict(math.inf, 0.0, details, reason=reason))
        if differing:
            samples.details[DIFFERENT_BITS_KEY] = int(samples.details.get(DIFFERENT_BITS_KEY, 0)) + len(differing)


class LoadedRegime(SpacedRegime):
    """The regime that launches back to back, so that the device is at its power limit. It checks only every ninth
    launch, because the device cools during a check.
    """

    name = "loaded"
    first_problem_load_seconds = 2.0
    later_problem_load_seconds = 0.1
    #: The number of unchecked launches ahead of each checked launch.
    unchecked_launches_per_check: ClassVar[int] = 8

    def prepare_device_for_checked_launch(self, checked: CheckedKernel, launch_seconds: float) -> None:
        for _ in range(self.unchecked_launches_per_check):
            checked.launches[0]()
        self.backend.submit()
