"""Test that the reports of some logs show the same figures as before, even if the layout changes.

``tools/report_figures.py`` checks the reports of all logs in results/.
"""

import json
import re

import pytest
from report_figures import CHECKSUMS_FILE, ROOT, compute_checksum, list_figures, make_document

CHECKSUMS = json.loads(CHECKSUMS_FILE.read_text())


def list_smallest_logs():
    """Return the smallest log of each command, kernel and dtype, without sweeps of the many cublasLt algorithms."""
    smallest = {}
    for path in sorted(CHECKSUMS, key=lambda path: (ROOT / path).stat().st_size):
        smallest.setdefault(re.split("-burst|-sustained|-202", (ROOT / path).name)[0], path)
    return sorted(path for name, path in smallest.items() if not name.startswith("sweep-cublaslt"))


@pytest.mark.parametrize("path", list_smallest_logs())
def test_a_report_shows_the_same_figures(path):
    assert compute_checksum(list_figures(make_document(ROOT / path))) == CHECKSUMS[path]
