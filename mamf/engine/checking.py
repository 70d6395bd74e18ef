"""Launches held to their results: what was timed is verified.

A kernel that is right once may do nothing afterwards, write where it should read, or serve one operand set of many. So
every set is launched and verified before any time is taken (which also compiles what is compiled late), outputs are
poisoned before each train or soak and verified after it without another launch, and operands must be unchanged in the
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mamf.backend import Backend
from mamf.errors import MamfError
from mamf.kernel import Prepared, Verdict


class WrongResultError(MamfError):
    """A launch whose result is wrong, or that changed its operands."""

    exit_code = 1

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(refusal(verdict))
        self.verdict = verdict


def refusal(verdict: Verdict) -> str:
    """Why a result is wrong, in a line."""
    if "changed operands" in verdict.details:
        return f"a launch changed its operands: {verdict.details['changed operands']}"
    return f"relative error {verdict.error:.2g} against {verdict.reference}, at most {verdict.tolerance:.2g} is right"


class Checked:
    """A prepared kernel whose ``launches`` remember what they returned until it is verified.

    ``verdict``: the worst so far.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self._returned: list[object] = [None] * len(prepared.launches)
        self._launched: set[int] = set()
        self.launches: Sequence[Callable[[], object]] = tuple(map(self._remembering, range(len(prepared.launches))))
        self.verdict = Verdict(0.0, math.inf)

    @property
    def rewrite_output(self) -> Callable[[], object] | None:
        return self._prepared.rewrite_output

    @property
    def held_bytes(self) -> int:
        return self._prepared.held_bytes

    def class_seconds(self) -> Mapping[str, float]:
        """Of one more launch, by what was running; empty where the kernel does not measure it."""
        measure = self._prepared.class_seconds
        return {} if measure is None else measure()

    def _remembering(self, index: int) -> Callable[[], object]:
        launch, returned, launched = self._prepared.launches[index], self._returned, self._launched

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
        self.poison()
        seconds = [self.seconds_of(index, backend) for index in range(len(self.launches))]
        self.verify()
        self.require_unchanged_operands()
        return seconds[-1]

    def seconds_of(self, index: int, backend: Backend) -> float:
        """Host seconds of a launch by itself."""
        begun = backend.now()
        self.launches[index]()
        backend.submit()
        backend.synchronize()
        return backend.now() - begun

    def poison(self) -> None:
        """Make every output unlike the answer; nothing launched before counts as verified any more."""
        self._prepared.poison(tuple(self._returned))
        self._returned[:] = [None] * len(self._returned)
        self._launched.clear()

    def verify(self) -> None:
        """Hold the last launch of every set that was launched to its result. Raises WrongResultError."""
        for index in sorted(self._launched):
            verdict = self._prepared.verify(index, self._returned[index])
            if not verdict.ok:
                self.require_unchanged_operands()  # the more telling reason
                raise WrongResultError(verdict)
            if verdict.error >= self.verdict.error:
                self.verdict = Verdict(verdict.error, verdict.tolerance, {**self.verdict.details, **verdict.details})

    def require_unchanged_operands(self) -> None:
        """Raises WrongResultError naming the operands that launches changed."""
        changed = self._prepared.changed_operands()
        if changed:
            raise WrongResultError(Verdict(math.inf, 0.0, {"changed operands": " ".join(changed)}))
