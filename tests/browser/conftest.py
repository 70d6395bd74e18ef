"""Pages of every kind and a browser, made once; without a browser these tests are skipped."""

import pytest
from browsing.chromium import chromium, missing
from browsing.pages import make_large_results, make_pages, make_site


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
    return make_pages(folder) | make_site(folder / "site")


@pytest.fixture(scope="session")
def large_site(browser, tmp_path_factory):
    """The front page of a site of a thousand logs."""
    folder = tmp_path_factory.mktemp("large")
    return make_site(folder / "site", make_large_results(folder / "results", 1000))["site"]


@pytest.fixture
def page(pages):
    """Returns the path of a page by its name."""
    return pages.__getitem__
