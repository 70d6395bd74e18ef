"""Verifies the results of timed launches.

A kernel that is right once may do nothing afterwards, write where it should read, or serve one operand set of many. So
all output of every set is verified before any time is taken (which also compiles what is compiled late). Before
launches that are verified, operands change at random and outputs are poisoned. Afterwards they are verified without
another launch: samples after each train, all output after the last timed one. In the end operands must be as they were.
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

#: A launch that is checked takes as long as others; one that took so many times as long found other work to do.
_EQUAL_WORK = 2.0
#: Checked launches that are not all slow by chance.
_MIN_CHECKED = 4
#: How long a device works after the mark that ends an honest launch, at most: seconds, and a share of the launch.
_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE = 2e-6, 0.01


class WrongResultError(MamfError):
    """A launch whose result is wrong, or that changed its operands."""

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(describe_wrong_result(verdict))
        self.verdict = verdict


def describe_wrong_result(verdict: Verdict) -> str:
    """Why a result is wrong, in a line."""
    if "changed operands" in verdict.details:
        return f"a launch changed its operands: {verdict.details['changed operands']}"
    if verdict.reason:
        return verdict.reason
    return f"relative error {verdict.error:.2g} against {verdict.reference}, at most {verdict.tolerance:.2g} is right"


def skipped_work(checked: Sequence[float], others: Sequence[float]) -> float:
    """How many times as long as the other launches all those took whose results were checked, given seconds of each, if
    that shows that the others skip the work; else 0.
    """
    if len(checked) < _MIN_CHECKED or not others:
        return 0.0
    times = min(checked) / max(statistics.median(others), 1e-9)
    return times if times > _EQUAL_WORK else 0.0


def refuse_skipped_work(times: float) -> None:
    """Raises WrongResultError unless ``times``, as skipped_work gives it, is 0."""
    if times:
        reason = f"launches take {times:.3g} times as long when operands have changed: the others skip the work"
        raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))


def refuse_unseen_work(seconds: float) -> None:
    """Raises WrongResultError unless ``seconds``, as ``Checked.unseen_work`` gives it, is 0."""
    if seconds:
        reason = (
            f"the device works for {seconds * 1e6:.3g} us more after the marks that time a launch, in another queue"
        )
        raise WrongResultError(Verdict(math.inf, 0.0, reason=reason))


class Checked:
    """A prepared kernel whose ``launches`` remember what they returned until it is verified.

    ``verdict``: the worst so far.
    """

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
        """Launch and verify every operand set; returns the host seconds of the last launch.

        Raises WrongResultError, or what a launch raises.
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
        """Take down how long the device worked after the mark that ends a launch."""
        self._unseen.append(seconds)

    def unseen_work(self, seconds: float) -> float:
        """Device seconds that a launch, which took ``seconds`` between its marks, works after them; 0 if negligible."""
        unseen = statistics.median(self._unseen or [0.0])
        return unseen if unseen > max(_MAX_UNSEEN_SECONDS, _MAX_UNSEEN_SHARE * seconds) else 0.0

    def prepare_check(self) -> None:
        """Queue other operands, if the kernel can change them, and poison: only a launch from now on can be right."""
        if self.prepared.change_operands is not None:
            self.prepared.change_operands()
        self.poison()

    def poison(self) -> None:
        """Make every output unlike the answer; nothing launched before counts as verified any more."""
        self.prepared.poison(tuple(self._returned))
        self._returned[:] = [None] * len(self._returned)
        self._launched.clear()

    def verify(self, whole: bool = False) -> None:
        """Compare what the last launch of every set left with its reference: sampled entries, or the ``whole`` too.

        Raises WrongResultError.
        """
        checks = [self.prepared.verify]
        if whole and self.prepared.verify_whole is not None:
            checks.append(self.prepared.verify_whole)
        for index in sorted(self._launched):
            for check in checks:
                self._take(check(index, self._returned[index]), index)

    def _take(self, verdict: Verdict, index: int) -> None:
        if not verdict.ok:
            located = self._located(index)  # while operands are as they were
            self.require_unchanged_operands()  # the more telling reason
            raise WrongResultError(replace(verdict, details={**verdict.details, **located}))
        if verdict.error >= self.verdict.error:
            self.verdict = Verdict(verdict.error, verdict.tolerance, {**self.verdict.details, **verdict.details})

    def _located(self, index: int) -> Mapping[str, str]:
        """Where the output of a set is wrong, if the kernel knows."""
        try:
            wrong = self.prepared.locate and self.prepared.locate(index, self._returned[index])
        except plugin_errors():  # the result is wrong in any case
            wrong = None
        return {WRONG_TILES: describe(wrong)} if wrong and wrong.cells else {}

    def require_unchanged_operands(self) -> None:
        """Raises WrongResultError naming the operands that launches changed."""
        changed = self.prepared.changed_operands()
        if changed:
            raise WrongResultError(Verdict(math.inf, 0.0, {"changed operands": " ".join(changed)}))
