"""Who published the figures of results/published, under which license: the text of NOTICE.md, which tools/published.py
writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Source:
    """A licensed source. ``address``: of the repository; figures name the page."""

    address: str
    title: str
    author: str
    license: str
    notices: str


_MIT = """
> Copyright (c) 2025 Advanced Micro Devices, Inc. (AMD)
>
> Permission is hereby granted, free of charge, to any person obtaining a copy
> of this software and associated documentation files (the "Software"), to deal
> in the Software without restriction, including without limitation the rights
> to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
> copies of the Software, and to permit persons to whom the Software is
> furnished to do so, subject to the following conditions:
>
> The above copyright notice and this permission notice shall be included in all
> copies or substantial portions of the Software.
>
> THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
> IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
> FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
> AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
> LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
> OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
> SOFTWARE.
"""
SOURCES = (
    Source(
        "https://github.com/stas00/ml-engineering",
        "Machine Learning Engineering Open Book",
        "Stas Bekman and contributors",
        "CC-BY-SA-4.0",
        "License: https://creativecommons.org/licenses/by-sa/4.0/. These rows are an adaptation, and stay "
        "under CC BY-SA 4.0,\nnot under the license of this repository. The license disclaims warranties.",
    ),
    Source(
        "https://github.com/shisa-ai/mamf-finder",
        "mamf-finder: results of a GPU node",
        "Leonard (lhl), shisa-ai",
        "Apache-2.0",
        "License: https://www.apache.org/licenses/LICENSE-2.0, the text of [LICENSE](../../LICENSE). The source has no "
        "NOTICE file.\nThe figures were read from its logs; its files are not copied.",
    ),
    Source(
        "https://github.com/ROCm/rocm-blogs",
        "Measuring Max-Achievable FLOPs, Part 2",
        "Ben Sander, Evan Masters, Babak Poursartip, Henry Ho (AMD)",
        "MIT",
        f"License, as it stands in the page:\n{_MIT.rstrip()}",
    ),
)

_HEAD = """# Published figures: sources and licenses

Written by `tools/published.py`; a change by hand is lost.

[figures.csv](figures.csv) holds {count} matmul figures that other people published. **This project did not check them,
and never ranks them with measured figures.** Scripts, statistics, sizes, clocks and power limits differ between
sources. The files are not in the wheel and not in the sdist.

Is a figure of yours wrong, or should it not be here? Open an issue: it is corrected or removed.

## Sources with a license

Their rows name the license in the column `license` and the page in `source`. Changes: the figures were selected (see
below) and put into one table; columns were renamed; statistics are described in our words; sizes were reordered so
that `k` is summed over; the versions of torch and of other software share a column; half an MI250X is marked "one
GCD". No author of a source endorses this project.
"""
_UNLICENSED = """## Sources without a stated license

{count} rows come from sources that state no license, or whose license was not checked. They hold only the figure, the
accelerator, its vendor, the dtype and the address of the source, where everything else stands.
"""
_LEFT_OUT = """## What was left out

| rows | reason |
| --: | :-- |
"""


def notice(figures: Sequence[Mapping[str, str]], left_out: Mapping[str, int]) -> str:
    """The text of NOTICE.md for rows of figures.csv, and for the number of rows left out by reason."""
    parts = [_HEAD.format(count=len(figures))]
    for source in SOURCES:
        if rows := [row for row in figures if row["license"] and row["source"].startswith(f"{source.address}/")]:
            heading = f"### {source.title}\n\n{source.author}. {source.address}. {source.license}, {len(rows)} rows."
            parts.append(f"{heading}\n{source.notices}\n")
    parts.append(_UNLICENSED.format(count=sum(not row["license"] for row in figures)))
    ordered = sorted(left_out.items(), key=lambda pair: -pair[1])
    parts.append(_LEFT_OUT + "".join(f"| {count} | {reason} |\n" for reason, count in ordered if count))
    return "\n".join(parts)
