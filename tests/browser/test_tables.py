"""Test sorting, searching and filtering the tables of a page, by mouse and by keyboard."""

import pytest

pytestmark = pytest.mark.browser
#: The first table with filters. It is the table with the most rows.
TABLE = "document.querySelector('.filters').nextElementSibling.querySelector('table')"


@pytest.fixture
def table(browser, page):
    """Return the largest table of the page of an imported log.

    It has a column of shapes, a column of stages with few different values, and columns of figures that are missing in
    many rows.
    """
    browser.open(page("imported"))

    class Table:
        def column(self, title):
            """Return the texts of a column in all visible rows, from top to bottom."""
            script = f"""const table = {TABLE};
            const column = [...table.tHead.rows[0].cells].findIndex((each) => each.textContent === arguments[0]);
            return [...table.tBodies[0].rows].filter((each) => !each.hidden)
              .map((each) => each.cells[column].textContent)"""
            return browser.evaluate(script, title)

        def head(self, title):
            return browser.evaluate(
                f"return [...{TABLE}.querySelectorAll('th')].find((each) => each.textContent === arguments[0])", title
            )

        def sort(self, title):
            self.head(title).find_element("tag name", "button").click()

        def order(self, title):
            return self.head(title).get_attribute("aria-sort")

    return Table()


def select(browser, key, value):
    """Select a value of the first filter by keyboard.

    A selection through chromedriver would not trigger the input event that a user's selection triggers.
    """
    from selenium.webdriver import ActionChains, Keys

    browser.evaluate("document.querySelector('.filters select').focus()")
    ActionChains(browser.driver).send_keys(getattr(Keys, key)).perform()
    selected = (
        "const select = document.querySelector('.filters select'); return select.options[select.selectedIndex].text"
    )
    assert browser.evaluate(selected) == value


def figures(texts):
    return [float(text) for text in texts if text != "-"]


@pytest.mark.parametrize("title", ["fastest", "MAMF"])
def test_a_column_of_figures_is_sorted_down_then_up_and_what_lacks_one_is_last(table, title):
    before = table.column(title)
    assert "-" in before
    for order, is_down in (("descending", True), ("ascending", False), ("descending", True)):
        table.sort(title)
        after = table.column(title)
        known = figures(after)
        assert (known, table.order(title)) == (sorted(figures(before), reverse=is_down), order)
        assert set(after[: len(known)]) & {"-"} == set(), "rows without a figure must come last"
    assert sorted(after) == sorted(before)


def test_a_column_of_texts_is_sorted_up_first_and_one_column_alone_says_so(table):
    table.sort("fastest")
    table.sort("stage")
    assert table.column("stage") == sorted(table.column("stage"))
    assert (table.order("stage"), table.order("fastest")) == ("ascending", None)


def test_a_column_is_sorted_by_keyboard(browser, table):
    from selenium.webdriver import ActionChains, Keys

    browser.evaluate("document.querySelector('.filters select').focus()")
    for _ in range(12):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        if browser.driver.switch_to.active_element.text.startswith("fastest"):
            break
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert table.order("fastest") == "descending"
    known = figures(table.column("fastest"))
    assert known == sorted(known, reverse=True)
    outline = browser.evaluate("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the element with the focus must have a visible outline"


def test_a_search_leaves_the_rows_that_hold_the_text(browser, table):
    field, count = (browser.driver.find_element("css selector", f".filters {tag}") for tag in ("input", "output"))
    everything = len(table.column("shape"))
    assert field.accessible_name == "Search this table", "the field must say that it searches this table only"
    assert count.text == f"{everything} rows"
    field.send_keys("X20480")
    found = table.column("shape")
    assert 0 < len(found) < everything
    assert all("x20480" in shape for shape in found)
    assert count.text == f"{len(found)} of {everything}"
    field.send_keys(" no such text")
    assert table.column("shape") == []


def test_a_filter_and_a_search_hold_together_and_a_sort_keeps_both(browser, table):
    everything = len(table.column("stage"))
    select(browser, "DOWN", "confirm")
    assert set(table.column("stage")) == {"confirm"}
    confirmed = len(table.column("stage"))
    browser.driver.find_element("css selector", ".filters input").send_keys("2304x")
    table.sort("MAMF")
    assert 0 < len(table.column("stage")) < confirmed
    assert all(shape.startswith("2304x") for shape in table.column("shape"))
    browser.driver.find_element("css selector", ".filters input").clear()
    select(browser, "UP", "all")
    assert len(table.column("stage")) == everything
