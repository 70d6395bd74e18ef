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
        def read_column(self, title):
            """Return the texts of a column in all visible rows, from top to bottom."""
            script = f"""const table = {TABLE};
            const column = [...table.tHead.rows[0].cells].findIndex((each) => each.textContent === arguments[0]);
            return [...table.tBodies[0].rows].filter((each) => !each.hidden)
              .map((each) => each.cells[column].textContent)"""
            return browser.evaluate(script, title)

        def find_header(self, title):
            return browser.evaluate(
                f"return [...{TABLE}.querySelectorAll('th')].find((each) => each.textContent === arguments[0])", title
            )

        def click_sort_button(self, title):
            self.find_header(title).find_element("tag name", "button").click()

        def read_sort_order(self, title):
            return self.find_header(title).get_attribute("aria-sort")

    return Table()


def select(browser, key, value):
    """Select a value of the first filter by keyboard.

    A selection through chromedriver would not trigger the input event that a user's selection triggers.
    """
    from selenium.webdriver import ActionChains, Keys

    browser.evaluate("document.querySelector('.filters select').focus()")
    ActionChains(browser.driver).send_keys(getattr(Keys, key)).perform()
    script = (
        "const select = document.querySelector('.filters select'); return select.options[select.selectedIndex].text"
    )
    assert browser.evaluate(script) == value


def parse_figures(texts):
    return [float(text) for text in texts if text != "-"]


@pytest.mark.parametrize("title", ["fastest", "MAMF"])
def test_a_column_of_figures_is_sorted_down_then_up_with_missing_figures_last(table, title):
    before = table.read_column(title)
    assert "-" in before
    for order, is_down in (("descending", True), ("ascending", False), ("descending", True)):
        table.click_sort_button(title)
        after = table.read_column(title)
        figures = parse_figures(after)
        assert (figures, table.read_sort_order(title)) == (sorted(parse_figures(before), reverse=is_down), order)
        assert set(after[: len(figures)]) & {"-"} == set(), "rows without a figure must come last"
    assert sorted(after) == sorted(before)


def test_a_column_of_texts_is_sorted_up_first_and_only_one_column_has_a_sort_order(table):
    table.click_sort_button("fastest")
    table.click_sort_button("stage")
    assert table.read_column("stage") == sorted(table.read_column("stage"))
    assert (table.read_sort_order("stage"), table.read_sort_order("fastest")) == ("ascending", None)


def test_a_column_is_sorted_by_keyboard(browser, table):
    from selenium.webdriver import ActionChains, Keys

    browser.evaluate("document.querySelector('.filters select').focus()")
    for _ in range(12):
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
        if browser.driver.switch_to.active_element.text.startswith("fastest"):
            break
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert table.read_sort_order("fastest") == "descending"
    figures = parse_figures(table.read_column("fastest"))
    assert figures == sorted(figures, reverse=True)
    outline = browser.evaluate("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid", "the element with the focus must have a visible outline"


def test_a_search_shows_the_rows_that_contain_the_text(browser, table):
    field, count = (browser.driver.find_element("css selector", f".filters {tag}") for tag in ("input", "output"))
    row_count = len(table.read_column("shape"))
    assert field.accessible_name == "Search this table", "the field must say that it searches this table only"
    assert count.text == f"{row_count} rows"
    field.send_keys("X20480")
    shapes = table.read_column("shape")
    assert 0 < len(shapes) < row_count
    assert all("x20480" in shape for shape in shapes)
    assert count.text == f"{len(shapes)} of {row_count}"
    field.send_keys(" no such text")
    assert table.read_column("shape") == []


def test_a_filter_and_a_search_apply_together_and_a_sort_keeps_both(browser, table):
    row_count = len(table.read_column("stage"))
    select(browser, "DOWN", "confirm")
    assert set(table.read_column("stage")) == {"confirm"}
    confirmed_row_count = len(table.read_column("stage"))
    browser.driver.find_element("css selector", ".filters input").send_keys("2304x")
    table.click_sort_button("MAMF")
    assert 0 < len(table.read_column("stage")) < confirmed_row_count
    assert all(shape.startswith("2304x") for shape in table.read_column("shape"))
    browser.driver.find_element("css selector", ".filters input").clear()
    select(browser, "UP", "all")
    assert len(table.read_column("stage")) == row_count
