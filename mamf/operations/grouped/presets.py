"""The experts of known mixture-of-experts models as grouped products. Pure.

Sizes come from the models' published configurations: Mixtral 8x7B (arXiv 2401.04088: 8 experts, 2 per token, hidden
4096, MLP 14336), DeepSeek-V2-Lite (arXiv 2405.04434, appendix B: 64, 6, 2048, 1408), Qwen3-30B-A3B (arXiv 2505.09388:
128, 8, 2048, 768), DeepSeek-V3 (arXiv 2412.19437: 256, 8, 7168, 2048; each of eight devices has 32 experts and
receives as many tokens as it sends).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mamf.operations.grouped.shapes import GroupedShape

#: Tokens per device, each of which goes to several experts.
_TOKENS = 8192
_FEW_TOKENS = 64


@dataclass(frozen=True)
class Experts:
    """``experts`` of a layer on a device, ``active`` of them per token; gate and up are one product."""

    name: str
    experts: int
    active: int
    hidden: int
    inside: int

    def shapes(self, tokens: int) -> dict[GroupedShape, str]:
        """The shapes of both products of the experts, with labels."""
        rows = tokens * self.active
        return {
            GroupedShape(self.experts, rows, 2 * self.inside, self.hidden): f"{self.name} gate+up",
            GroupedShape(self.experts, rows, self.hidden, self.inside): f"{self.name} down",
        }


MIXTURES = (
    Experts("mixtral-8x7b", 8, 2, 4096, 14336),
    Experts("deepseek-v2-lite", 64, 6, 2048, 1408),
    Experts("qwen3-30b-a3b", 128, 8, 2048, 768),
    Experts("deepseek-v3, 32 of 256", 32, 8, 7168, 2048),
)


def _of_all(tokens: int) -> dict[GroupedShape, str]:
    return {shape: name for mixture in MIXTURES for shape, name in mixture.shapes(tokens).items()}


PRESETS: Mapping[str, Mapping[GroupedShape, str]] = {"moe": _of_all(_TOKENS), "moe-decode": _of_all(_FEW_TOKENS)}
