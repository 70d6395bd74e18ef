"""The site stays quick. The one bound on the wall clock in these tests: it is what was promised."""

import pytest

pytestmark = pytest.mark.browser
BOUND = 0.5


def test_the_front_page_of_a_thousand_logs_opens_in_half_a_second(browser, large_site):
    assert min(browser.load_seconds(large_site) for _ in range(3)) < BOUND
