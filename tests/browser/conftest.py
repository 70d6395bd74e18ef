"""Pages of every kind and a browser, made once; without a browser these tests are skipped."""

import pytest
from browsing.chromium import chromium, missing
from browsing.pages import OF_SITE, has_site, make_large_results, make_pages, make_site


@pytest.fixture(scope="session")
def browser():
    if reason := missing():
        pytest.skip(reason)
    with chromium() as found:
        yield found


@pytest.fixture(scope="session")
def pages(browser, tmp_path_factory):
    """The path of each page by its name."""
    folder = tmp_path_factory.mktemp("pages")
    return make_pages(folder) | (make_site(folder / "site") if has_site() else {})


@pytest.fixture(scope="session")
def large_site(browser, tmp_path_factory):
    """The front page of a site of a thousand logs."""
    if not has_site():
        pytest.skip("this mamf has no 'results site'")
    folder = tmp_path_factory.mktemp("large")
    return make_site(folder / "site", make_large_results(folder / "results", 1000))["site"]


@pytest.fixture
def page(pages):
    """A page by its name; skips what this mamf does not write."""

    def named(name):
        if name in OF_SITE and name not in pages:
            pytest.skip("this mamf has no 'results site'")
        return pages[name]

    return named
