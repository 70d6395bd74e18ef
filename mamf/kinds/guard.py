"""Guards: rows compared with a baseline, or the visits that make one."""

from __future__ import annotations

from mamf.kinds.kind import KernelRows
from mamf.plans import GUARD, Plan


class Guard(KernelRows):
    name = GUARD
    noun = "a guard"

    def command(self, plan: Plan) -> str:
        return f"{GUARD} FILE.toml"
