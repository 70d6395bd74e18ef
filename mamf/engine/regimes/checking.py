"""Verifies the results of timed launches.

A kernel that is right once may later do nothing, overwrite its operands, or compute only one of many operand sets. So:

- Before timing, every set is launched and its whole output verified. This also triggers late compilation.
- Before a launch that will be verified, operands change at random and outputs are poisoned.
- After it, the output is verified without another launch: sampled entries after each train, all after the last one.
- At the end, the operands must be unchanged.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mamf.backend import Backend
from mamf.errors import MamfError, plugin_errors
from mamf.kernel import Prepared, Verdict
from mamf.measurement import WRONG_TILES
from mamf.wrong_tiles import describe

#: If checked launches take this many times as long as the others, the others skip work.
_EQUAL_WORK = 2.0
#: This many checked launches are not all slow by chance.
_MIN_CHECKED = 4
#: A device may work this long after the end mark of an honest launch: seconds, and a share of the launch.
_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE = 2e-6, 0.01


class WrongResultError(MamfError):
    """A launch gave a wrong result or changed its operands."""

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(describe_wrong_result(verdict))
        self.verdict = verdict


def describe_wrong_result(verdict: Verdict) -> str:
    """Say in one line why a result is wrong."""
    if "changed operands" in verdict.details:
        return f"a launch changed its operands: {verdict.details['changed operands']}"
    if verdict.reason:
        return verdict.reason
    return f"relative error {verdict.error:.2g} against {verdict.reference}; the limit is {verdict.tolerance:.2g}"


def skipped_work(checked: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long the checked launches took as the others, if that shows that the others skip work; else 0.
    Both are given as seconds per launch.
    """
    if len(checked) < _MIN_CHECKED or not others:
        return 0.0
    times = min(checked) / max(statistics.median(others), 1e-9)
    return times if times > _EQUAL_WORK else 0.0


def refuse_skipped_work(times: float) -> None:
    """Raises WrongResultError unless ``times``, from ``skipped_work``, is 0."""
    if times:
        reason = f"launches take {times:.3g} times as long after their operands change: the others skip the work"
        raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))


def refuse_unseen_work(seconds: float) -> None:
    """Raises WrongResultError unless ``seconds``, from ``Checked.unseen_work``, is 0."""
    if seconds:
        reason = f"the launch continues {seconds * 1e6:.3g} us past its end mark: it works in a queue that is not timed"
        raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))


class Checked:
    """A prepared kernel whose ``launches`` keep their results until verified. ``verdict``: the worst so far."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self._returned: list[object] = [None] * len(prepared.launches)
        self._launched: set[int] = set()
        self._unseen: list[float] = []
        self.launches: Sequence[Callable[[], object]] = tuple(map(self._remembering, range(len(prepared.launches))))
        self.verdict = Verdict(0.0, math.inf)

    @property
    def rewrite_output(self) -> Callable[[], object] | None:
        return self.prepared.rewrite_output

    @property
    def held_bytes(self) -> int:
        return self.prepared.held_bytes

    def _remembering(self, index: int) -> Callable[[], object]:
        launch, returned, launched = self.prepared.launches[index], self._returned, self._launched

        def remembering() -> object:
            returned[index] = None  # its memory is free for this launch
            result = returned[index] = launch()
            launched.add(index)
            return result

        return remembering

    def rehearse(self, backend: Backend) -> float:
        """Launch and verify every operand set. Returns the host seconds of the last launch.

        Raises WrongResultError, and whatever a launch raises.
        """
        self.prepare_check()
        seconds = [self.seconds_of(index, backend) for index in range(len(self.launches))]
        self.verify(whole=True)
        self.require_unchanged_operands()
        return seconds[-1]

    def seconds_of(self, index: int, backend: Backend) -> float:
        """Host seconds of a single launch."""
        begun = backend.now()
        self.launches[index]()
        backend.submit()
        backend.synchronize()
        return backend.now() - begun

    def note_unseen(self, seconds: float) -> None:
        """Note how many seconds the device worked after the end mark of a launch."""
        self._unseen.append(seconds)

    def unseen_work(self, seconds: float) -> float:
        """Device seconds that a launch works past its end mark; 0 if negligible. ``seconds``: its measured time.

        Work in another queue is there after each train. A busy host or another process delays only some of the marks,
        so the least delay counts.
        """
        unseen = min(self._unseen, default=0.0)
        return unseen if unseen > max(_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE * seconds) else 0.0

    def prepare_check(self) -> None:
        """Change the operands if the kernel can, and poison the outputs: only later launches can give right results."""
        if self.prepared.change_operands is not None:
            self.prepared.change_operands()
        self.poison()

    def poison(self) -> None:
        """Overwrite every output with wrong values, and forget all launches so far."""
        self.prepared.poison(tuple(self._returned))
        self._returned[:] = [None] * len(self._returned)
        self._launched.clear()

    def verify(self, whole: bool = False) -> None:
        """Compare the output of each set's last launch with its reference: sampled entries, and if ``whole`` all of
        them. Raises WrongResultError.
        """
        checks = [self.prepared.verify]
        if whole and self.prepared.verify_whole is not None:
            checks.append(self.prepared.verify_whole)
        for index in sorted(self._launched):
            for check in checks:
                self._take(check(index, self._returned[index]), index)

    def _take(self, verdict: Verdict, index: int) -> None:
        if not verdict.ok:
            located = self._located(index)  # before require_unchanged_operands undoes the change of operands
            self.require_unchanged_operands()  # raises first, because it explains more
            raise WrongResultError(replace(verdict, details={**verdict.details, **located}))
        worst = max(verdict, self.verdict, key=lambda each: each.error)
        self.verdict = replace(worst, details={**self.verdict.details, **verdict.details})

    def _located(self, index: int) -> Mapping[str, str]:
        """Where the output of a set is wrong, if the kernel can locate it."""
        try:
            wrong = self.prepared.locate and self.prepared.locate(index, self._returned[index])
        except plugin_errors():  # the result is wrong in any case
            wrong = None
        return {WRONG_TILES: describe(wrong)} if wrong and wrong.cells else {}

    def require_unchanged_operands(self) -> None:
        """Raises WrongResultError that names the operands which launches changed."""
        changed = self.prepared.changed_operands()
        if changed:
            raise WrongResultError(Verdict(math.inf, 0.0, {"changed operands": " ".join(changed)}))
