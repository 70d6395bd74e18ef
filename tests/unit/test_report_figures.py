"""Reports show the figures that they showed before, whatever the layout. All logs: tools/report_figures.py."""

import json
import re
from dataclasses import replace

import pytest
from report_figures import RECORDED, ROOT, checksum, document_of, figures_of

from mamf.report.document import Table

CHECKSUMS = json.loads(RECORDED.read_text())


def sample():
    """Return the smallest log of each command and dtype."""
    smallest = {}
    for path in sorted(CHECKSUMS, key=lambda path: (ROOT / path).stat().st_size):
        smallest.setdefault(re.split("-burst|-sustained|-202", (ROOT / path).name)[0], path)
    return sorted(path for name, path in smallest.items() if not name.startswith("sweep-cublaslt"))


@pytest.mark.parametrize("path", sample())
def test_a_report_shows_the_same_figures(path):
    assert checksum(figures_of(document_of(ROOT / path))) == CHECKSUMS[path]


def test_a_changed_figure_is_seen():
    document = document_of(ROOT / next(path for path in sample() if "/sweep-" in path))
    number, table = next((number, each) for number, each in enumerate(document.blocks) if isinstance(each, Table))
    rate = next(each for each in table.columns if each.name == "rate_mean_tflops")

    def figures_with(changed):
        columns = [changed if each is rate else each for each in table.columns]
        blocks = [*document.blocks[:number], replace(table, columns=columns), *document.blocks[number + 1 :]]
        return figures_of(replace(document, blocks=blocks))

    assert figures_with(rate) == figures_of(document)
    slower = replace(rate, read=lambda row: rate.read(row) and rate.read(row) * 0.9998)
    assert figures_with(slower) != figures_of(document)
