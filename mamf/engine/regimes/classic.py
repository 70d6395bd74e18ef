"""Measure in the regime `classic`: with the loop that mamf-finder published, for comparison with its tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from mamf.backend import MIB, Backend
from mamf.engine.regimes.base import CheckedKernel, Regime, Samples, StoppingRule, launch_between_marks
from mamf.plans import CLASSIC_WARMUP_SECONDS, Plan, SweepOptions


class ClassicRegime(Regime):
    """The regime that repeats mamf-finder's published loop. The device's clock is not controlled: it depends on earlier
    launches.

    A run first warms the device up for 30 s. Then it launches each shape several times to warm up, and several times
    with timing. Before each launch, it overwrites 256 MiB to flush the cache, and it also overwrites the output C.
    """

    name = "classic"
    ranking_statistic = "fastest"
    must_rewrite_output = True
    warmup_seconds = CLASSIC_WARMUP_SECONDS
    flush_bytes: ClassVar[int] = 256 * MIB
    max_queued_launches: ClassVar[int] = 32

    def __init__(
        self,
        backend: Backend,
        warmup_launches: int = 50,
        timed_launches: int = 100,
        warmup_seconds: float = warmup_seconds,
    ) -> None:
        super().__init__(backend)
        self.warmup_launches = warmup_launches
        self.timed_launches = timed_launches
        self._warmup_seconds_left = warmup_seconds

    @classmethod
    def make_from_plan(cls, backend: Backend, plan: Plan) -> ClassicRegime:
        options = plan.options if isinstance(plan.options, SweepOptions) else SweepOptions()
        return cls(backend, options.warmup_launches, options.timed_launches)

    @classmethod
    def estimate_rows_seconds(cls, backend: Backend, plan: Plan, launch_seconds_of_rows: Sequence[float]) -> float:
        regime = cls.make_from_plan(backend, plan)
        return cls.warmup_seconds + sum(launch_seconds_of_rows) * (regime.warmup_launches + regime.timed_launches)

    def take_samples(self, checked: CheckedKernel, rule: StoppingRule, launch_seconds: float) -> Samples:
        start_time, loops = self.backend.now(), 0
        while self.backend.now() - start_time < self._warmup_seconds_left and not rule.is_budget_over(
            self.backend.now()
        ):
            self.require_advancing_clock(loops)
            self._run_classic_loop(checked, rule)
            loops += 1
        self._warmup_seconds_left = 0.0
        return self._run_classic_loop(checked, rule)

    def _run_classic_loop(self, checked: CheckedKernel, rule: StoppingRule) -> Samples:
        backend, start_time = self.backend, self.backend.now()
        launch_marks: list[tuple[object, object]] = []
        samples = Samples()
        checked.change_operands_and_poison_outputs()
        launches = self.warmup_launches + self.timed_launches
        for count in range(1, launches + 1):
            if count == launches:
                checked.change_operands_and_poison_outputs()
            backend.flush_cache(self.flush_bytes)
            if checked.prepared.rewrite_output is not None:
                checked.prepared.rewrite_output()
            launch_marks.append(launch_between_marks(checked.launches[0], backend))
            if count > self.max_queued_launches:
                backend.wait_for_mark(launch_marks[count - self.max_queued_launches][1])
            now = backend.now()
            is_late = (
                rule.max_seconds is not None and now - start_time >= rule.max_seconds and count >= rule.min_samples
            )
            if is_late or rule.is_budget_over(now):
                break
        idle_mark = self.queue_idle_mark(launch_marks[-1][1])
        samples.add_reading(self.read_sensors())
        self.wait_and_record_gap(checked, launch_marks[-1][1], idle_mark)
        checked.verify_last_outputs()
        if len(launch_marks) < launches:
            samples.remarks.append(f"the time limit stopped the loop after {len(launch_marks)} launches")
        # If the loop was cut short, use its last launches, because the device was warmest then.
        timed = launch_marks[min(self.warmup_launches, max(0, len(launch_marks) - rule.min_samples)) :]
        samples.seconds_per_launch = [backend.compute_seconds_between(start, end) for start, end in timed]
        samples.launch_count = len(samples.seconds_per_launch)
        return samples
