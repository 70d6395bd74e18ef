"""What attention kernels of vendors' and third parties' libraries share: loaded late, and bound once to a shape.

A library may be absent, half installed, built for another card or another CUDA: importing it may raise anything, and
all errors become a reason with the command that fixes it. What it prints on import goes to stderr, because stdout
holds results.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch

from mamf.backend import Backend, Unavailable
from mamf.errors import first_line
from mamf.machine.environment import package_version
from mamf.operations.attention.kernels.torch_attention import ON_ANY_DEVICE, TorchAttention
from mamf.operations.attention.shapes import AttentionProblem, AttentionShape

Capability = tuple[int, int]


class AbsentError(ImportError):
    """A module of the library's name can be imported, but it is something else; says what."""


class LibraryAttention(TorchAttention):
    """Derived kernels supply ``load`` and ``call``.

    ``library`` is its name in a sentence, ``module`` what is imported, ``distribution`` what pip calls it and
    ``install`` the command that installs it. ``cards``: in words, which of NVIDIA's it runs on; ``instead``: the kernel
    to try on the others.
    """

    library: ClassVar[str]
    module: ClassVar[str]
    distribution: ClassVar[str]
    install: ClassVar[str]
    runtimes: ClassVar[tuple[str, ...]] = ("cuda",)
    cards: ClassVar[str] = ""
    instead: ClassVar[str] = "sdpa"
    has_unequal_head_dims: ClassVar[bool] = False

    @abstractmethod
    def load(self) -> Any:
        """The library's function, imported now. May raise anything."""

    @abstractmethod
    def call(
        self,
        function: Any,
        problem: AttentionProblem,
        shape: AttentionShape,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> torch.Tensor:
        """The output, in the kernel's layout, by what ``load`` gave."""

    def runs_on(self, capability: Capability) -> bool:
        """Whether it has code for an NVIDIA card of this compute capability."""
        return True

    def unavailable(self, backend: Backend) -> Unavailable | None:
        if backend.runtime not in self.runtimes:
            return Unavailable(f"{self.library} has no kernels for {backend.name}", ON_ANY_DEVICE)
        if backend.runtime == "cuda":
            major, minor = torch.cuda.get_device_capability(backend.index)
            if not self.runs_on((major, minor)):
                return Unavailable(
                    f"{self.library} runs on {self.cards}, not on sm{major}{minor}",
                    f"mamf attention --kernel {self.instead}",
                )
        try:
            self.loaded()
        except Exception as error:  # a broken library may raise anything
            return self.not_loaded(error)
        return None

    def not_loaded(self, error: Exception) -> Unavailable:
        if isinstance(error, AbsentError):
            return Unavailable(f"{self.library} is not installed: {error}", self.install)
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing and f"{self.module}.".startswith(f"{missing}."):
            return Unavailable(f"{self.library} is not installed", self.install)
        return Unavailable(f"{self.library} is installed but does not load: {first_line(error)}", self.repair(error))

    def repair(self, error: Exception) -> str:
        """The command that fixes an installation that does not load."""
        # --no-deps: a forced reinstallation of all it depends on would replace torch.
        return self.install.replace(" --no-deps", "").replace(
            "pip install", "pip install --force-reinstall --no-deps", 1
        )

    def loaded(self) -> Any:
        with contextlib.redirect_stdout(sys.stderr):
            return self.load()

    def bind(self, backend: Backend, problem: AttentionProblem, shape: AttentionShape) -> Callable[..., torch.Tensor]:
        function = self.loaded()
        return lambda q, k, v: self.call(function, problem, shape, q, k, v)

    def unsupported_shape(self, problem: AttentionProblem, shape: AttentionShape) -> str | None:
        if not self.has_unequal_head_dims and shape.head_dim != shape.head_dim_v:
            return f"{self.name} needs values as wide as keys"
        return super().unsupported_shape(problem, shape)

    def details(
        self, problem: AttentionProblem, shape: AttentionShape, operands: Sequence[torch.Tensor]
    ) -> dict[str, Any]:
        version = package_version(self.distribution)
        return {"library": f"{self.distribution} {version}"} if version else {}


class QuantizedAttention(LibraryAttention):
    """Quantises Q, K and V in every launch: approximate, forward only.

    ``structured_tolerance`` is for inputs with block structure: their scores stand out by 14 and more, and so does what
    int8 rounds off them.
    """

    directions = ("fwd",)
    is_exact = False
    structured_tolerance: ClassVar[float]

    def bound(self, problem: AttentionProblem) -> float:
        return self.structured_tolerance if problem.sparsity else super().bound(problem)


def output_of(result: Any) -> torch.Tensor:
    """The output of a call that may return statistics with it."""
    output: torch.Tensor = result[0] if isinstance(result, tuple) else result
    return output


def window_of(shape: AttentionShape, unlimited: int | None) -> tuple[int | None, int | None]:
    """Keys seen before and after a query; ``unlimited`` is how the library writes that all are."""
    if shape.window is None:
        return unlimited, unlimited
    return shape.window, 0 if shape.causal else shape.window
