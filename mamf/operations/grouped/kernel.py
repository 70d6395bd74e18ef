"""The contract of a grouped kernel: one implementation of the products of all experts."""

from __future__ import annotations

from mamf.kernel import Kernel
from mamf.operations.grouped.shapes import GroupedProblem, GroupedShape


class GroupedKernel(Kernel[GroupedProblem, GroupedShape]):
    """One implementation of grouped products."""

    operation = "grouped"
