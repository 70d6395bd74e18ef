"""Provide Chromium and mamf pages of every kind to the browser tests. Without a browser, these tests are skipped."""

import pytest
from browsing.chromium import get_missing_browser_reason, open_browser
from browsing.pages import make_large_results, make_pages, make_site


@pytest.fixture(scope="session")
def browser():
    """Provide one browser for all tests. Skip the tests if no browser can run here."""
    if reason := get_missing_browser_reason():
        pytest.skip(reason)
    with open_browser() as running_browser:
        yield running_browser


@pytest.fixture(scope="session")
def pages(browser, tmp_path_factory):
    """Make all pages, and return their paths by name."""
    folder = tmp_path_factory.mktemp("pages")
    return make_pages(folder) | make_site(folder / "site")


@pytest.fixture(scope="session")
def large_site(browser, tmp_path_factory):
    """Make a site from 1000 logs, and return the path of its front page."""
    folder = tmp_path_factory.mktemp("large")
    return make_site(folder / "site", make_large_results(folder / "results", 1000))["site"]


@pytest.fixture
def page(pages):
    """Return a function that takes the name of a page and returns its path."""
    return pages.__getitem__
