"""Test pages that Chromium opens from files: no errors, no requests to other addresses, no scripts but their own."""

import re

import pytest
from browsing.chromium import PHONE
from browsing.pages import PAGES, ROOT

pytestmark = pytest.mark.browser
INJECTED_MARKUP = """<script>window.injected = 1</script><style>main { display: none }</style>
<p id="styled" style="display: none" onclick="window.injected = 1">text</p>
<img src="http://127.0.0.1:9/" onerror="window.injected = 1"><iframe srcdoc="text"></iframe>
<a id="link" href="javascript:window.injected = 1">run</a></body>"""
HOSTILE_PAGES = [name for name in PAGES if name.startswith("hostile")]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_without_requests_to_other_addresses(name, browser, page):
    browser.open(page(name))
    assert browser.evaluate("return document.querySelectorAll('h1').length") == 1
    assert browser.list_requested_urls() == [page(name).as_uri()]
    assert browser.read_console() == []


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_folder_of_this_machine(name, page):
    text = page(name).read_text(encoding="utf-8")
    assert not [folder for folder in (ROOT, page("find").parent) if str(folder) in text]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_no_wider_than_a_phone(name, browser, page):
    browser.open(page(name), PHONE)
    assert browser.evaluate("return document.documentElement.scrollWidth") <= PHONE


@pytest.mark.parametrize("name", PAGES)
def test_pictures_fit_a_phone_and_their_texts_can_be_read(name, browser, page):
    browser.open(page(name), PHONE)
    script = """document.querySelectorAll('details').forEach((each) => { each.open = true; });
    return [...document.querySelectorAll('.pictures svg')].map((svg) => [
      svg.parentElement.scrollWidth - svg.parentElement.clientWidth,
      Math.min(...[...svg.querySelectorAll('text')].map((text) => parseFloat(getComputedStyle(text).fontSize)))
        * svg.getBoundingClientRect().width / svg.viewBox.baseVal.width])"""
    for overflow, pixels in browser.evaluate(script):
        assert overflow <= 0
        assert pixels >= 9


def test_the_content_security_policy_blocks_injected_markup(browser, page, tmp_path):
    altered = tmp_path / "altered.html"
    altered.write_text(page("find").read_text().replace("</body>", INJECTED_MARKUP))
    browser.open(altered)
    browser.evaluate("document.getElementById('styled').click(); document.getElementById('link').click()")
    script = "return ['main', '#styled'].map((each) => getComputedStyle(document.querySelector(each)).display)"
    assert browser.evaluate(script) == ["block", "block"]
    assert browser.evaluate("return window.injected === undefined")
    messages = " ".join(browser.read_console())
    for kind in ("script-src", "style-src", "img-src", "frame-src"):
        assert kind in messages or "default-src" in messages
    assert len(re.findall("Content Security Policy", messages)) >= 6


@pytest.mark.parametrize("name", HOSTILE_PAGES)
def test_a_hostile_log_runs_nothing(name, browser, page):
    browser.open(page(name))
    browser.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    browser.evaluate(
        "document.querySelectorAll('body *').forEach((each) => { for (const kind of ['click', 'focus', 'mouseover',"
        " 'pointerover']) each.dispatchEvent(new Event(kind, { bubbles: true })); })"
    )
    assert "onerror" in browser.evaluate("return document.body.innerText"), "the page must show markup as plain text"
    assert browser.evaluate("return window.pwned === undefined")
    assert browser.list_requested_urls() == [page(name).as_uri()]
    assert browser.read_console() == []


@pytest.mark.parametrize("name", HOSTILE_PAGES)
def test_a_hostile_log_adds_no_elements_to_the_page(name, browser, page):
    browser.open(page(name))
    script = "return [...document.querySelectorAll(arguments[0])].length"
    assert (
        browser.evaluate(
            script, "img, iframe, form, base, link, object, embed, foreignObject, image, use:not([href^='#'])"
        )
        == 0
    )
    assert [browser.evaluate(script, tag) for tag in ("script", "style", "title:not(svg *)", "h1")] == [1, 1, 1, 1]
    assert (
        browser.evaluate(script, "[style]:not(#hint), [onload], [onerror], [onmouseover], [autofocus], [http-equiv]")
        == 1
    )
    protocols = browser.evaluate("return [...document.links].map((each) => each.protocol)")
    assert set(protocols) <= {"https:", "http:", "file:"}
