"""Test how people use the pages: hints at points of charts, details opened by keyboard, dark mode and printing."""

import pytest
from browsing.pages import PAGES

pytestmark = pytest.mark.browser
COUNT_CLOSED_DETAILS = "return document.querySelectorAll('details:not([open])').length"


def test_a_point_shows_its_figures_under_the_pointer(browser, page):
    from selenium.webdriver import ActionChains

    browser.open(page("attention"))
    hint = browser.driver.find_element("id", "hint")
    assert not hint.is_displayed()
    point = browser.driver.find_element("css selector", "figure .pictures use:has(> title)")
    ActionChains(browser.driver).scroll_to_element(point).move_to_element(point).perform()
    assert hint.is_displayed()
    assert hint.text == browser.evaluate("return arguments[0].querySelector('title').textContent", point)
    assert "TFLOPS" in hint.text
    ActionChains(browser.driver).move_to_element(browser.driver.find_element("tag name", "figcaption")).perform()
    assert not hint.is_displayed()


@pytest.mark.parametrize("name", ["find", "attention", "sweep", "explanation", "autoprofile", "node", "side by side"])
def test_a_hint_is_within_the_window(name, browser, page):
    browser.open(page(name))
    find_hints_outside = """const hint = document.getElementById('hint'), outside = [];
    document.querySelectorAll('details').forEach((details) => { details.open = true; });
    for (const point of document.querySelectorAll('figure svg *:has(> title)')) {
      point.scrollIntoView({ block: 'center' });
      const box = point.getBoundingClientRect();
      point.dispatchEvent(new PointerEvent('pointerover',
        { bubbles: true, clientX: box.right, clientY: box.top }));
      const area = hint.getBoundingClientRect();
      if (hint.hidden || area.left < 0 || area.right > innerWidth || area.top < 0 || area.bottom > innerHeight)
        outside.push(hint.textContent);
    }
    return outside"""
    assert browser.evaluate(find_hints_outside) == []


def test_details_open_by_keyboard(browser, page):
    from selenium.webdriver import ActionChains, Keys

    browser.open(page("side by side"))
    closed_count = browser.evaluate(COUNT_CLOSED_DETAILS)
    assert closed_count == 2
    browser.evaluate("document.querySelector('summary').focus()")
    ActionChains(browser.driver).send_keys(Keys.ENTER).perform()
    assert browser.evaluate(COUNT_CLOSED_DETAILS) == closed_count - 1


@pytest.mark.parametrize("name", ["side by side", "autoprofile"])
def test_a_printed_page_shows_all_details_and_the_screen_stays_unchanged(name, browser, page):
    browser.open(page(name))
    closed_count = browser.evaluate(COUNT_CLOSED_DETAILS)
    assert closed_count
    browser.evaluate(
        "addEventListener('beforeprint', () => { window.areOpen = [...document.querySelectorAll('details')].map("
        "(details) => details.open); })"
    )
    assert browser.print_pdf().startswith(b"%PDF")
    are_open_on_paper = browser.evaluate("return window.areOpen")
    assert are_open_on_paper and all(are_open_on_paper)
    assert browser.evaluate(COUNT_CLOSED_DETAILS) == closed_count


@pytest.mark.parametrize("name", PAGES)
def test_a_dark_page_is_dark_and_its_text_light(name, browser, page):
    brightness = """const style = getComputedStyle(document.body);
    return [style.backgroundColor, style.color].map(
      (color) => color.match(/[0-9.]+/g).slice(0, 3).reduce((sum, channel) => sum + Number(channel), 0) / 765)"""
    browser.open(page(name), is_dark=True)
    background, text = browser.evaluate(brightness)
    assert background < 0.2 and text > 0.8
    browser.open(page(name))
    background, text = browser.evaluate(brightness)
    assert background > 0.8 and text < 0.2


def test_a_printed_page_is_white_even_in_dark_mode(browser, page):
    browser.open(page("find"), is_dark=True, medium="print")
    assert browser.evaluate("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert browser.evaluate("return getComputedStyle(document.querySelector('svg text')).fill") != "rgb(230, 237, 243)"
