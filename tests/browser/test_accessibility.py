"""Test with axe-core that no page has serious accessibility problems, in light and in dark mode.

The tests need axe-core's file axe.min.js. The environment variable ``AXE_CORE`` contains its path.
"""

import os
from pathlib import Path

import pytest
from browsing.chromium import LAPTOP, PHONE
from browsing.pages import PAGES

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not os.environ.get("AXE_CORE"), reason="AXE_CORE does not name axe-core's axe.min.js"),
]
# All rows of a table have the same structure, and so have all points of a chart. So the script removes all rows and
# points except the first ones before it checks the page.
_FIND_VIOLATIONS = """const done = arguments[arguments.length - 1];
document.querySelectorAll('details').forEach((details) => { details.open = true; });
document.querySelectorAll('tbody tr:nth-child(n + 20), svg :nth-child(n + 80)').forEach((element) => element.remove());
axe.run(document, { resultTypes: ['violations'], ...arguments[0] }).then((results) => done(results.violations
  .filter(({ impact }) => ['serious', 'critical'].includes(impact))
  .map(({ id, nodes }) => `${id}: ${nodes.length} times, ${nodes[0].html.slice(0, 200)}
    ${nodes[0].failureSummary}`)), (error) => done([String(error)]))"""


#: The options of axe-core in dark mode. A dark page differs from a light page only in its colors.
_DARK_MODE_OPTIONS = {"runOnly": ["color-contrast", "link-in-text-block"]}
# Leave out "hostile find" and "hostile attention", because the page "hostile" contains both of their logs. On a phone
# only the widths of tables and charts differ, so a few pages are enough.
VIEWS = [(name, LAPTOP, is_dark) for name in PAGES if "hostile " not in name for is_dark in (False, True)]
VIEWS += [(name, PHONE, False) for name in ("find", "attention", "autoprofile", "device")]


@pytest.mark.parametrize(("name", "width", "is_dark"), VIEWS)
def test_axe_finds_nothing_serious(name, width, is_dark, browser, page):
    browser.open(page(name), width, is_dark=is_dark)
    browser.evaluate(Path(os.environ["AXE_CORE"]).read_text(encoding="utf-8"))
    assert browser.driver.execute_async_script(_FIND_VIOLATIONS, _DARK_MODE_OPTIONS if is_dark else {}) == []
