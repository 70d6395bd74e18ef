"""Debian's Chromium without a window, driven by the chromedriver of the same package. Nothing is downloaded."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: Widths in pixels that pages are looked at.
PHONE, LAPTOP = 390, 1280
_HEIGHT = 800
#: Of a picture.
_TALLEST = 16_000
_OPTIONS = ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
# The end of the load event is known a moment after the event.
_LOAD_MILLISECONDS = """const done = arguments[arguments.length - 1];
const look = () => {
  const end = performance.getEntriesByType('navigation')[0].loadEventEnd;
  end ? done(end) : setTimeout(look);
};
look()"""
#: As root, in a container, Chromium starts without its sandbox only.
_NO_SANDBOX = "--no-sandbox"


def missing() -> str:
    """Why no browser can be driven here; empty if one can."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install -e '.[browser]'"
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"no {' and no '.join(lacking)}: apt-get install chromium chromium-driver" if lacking else ""


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*_OPTIONS, *((_NO_SANDBOX,) if os.geteuid() == 0 else ())):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A page in Chromium; ``driver`` is selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = LAPTOP, *, is_dark: bool = False, medium: str = "") -> None:
        """Open a page from its file. ``medium``: "print", or what a screen shows."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", media=medium, features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=_HEIGHT,
            deviceScaleFactor=1,
            mobile=width == PHONE,
        )
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # what the page before left
        self.driver.get(page.resolve().as_uri())

    def call(self, method: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.driver.execute_cdp_cmd(method, parameters)

    def evaluate(self, script: str, *values: Any) -> Any:
        """What a function's body returns in the page; the page's policy does not apply to it."""
        return self.driver.execute_script(script, *values)

    def console(self) -> list[str]:
        """What the browser said since the page was opened, errors and refusals of the policy included."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the page was opened."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [each["params"]["request"]["url"] for each in events if each["method"] == "Network.requestWillBeSent"]

    def load_seconds(self, page: Path, times: int = 5) -> float:
        """From the start of the navigation to the end of the load event, the best of so many times."""
        found = []
        for _ in range(times):
            self.open(page)
            found.append(self.driver.execute_async_script(_LOAD_MILLISECONDS) / 1e3)
        return min(found)

    def picture(self, path: Path) -> None:
        """The whole page as PNG."""
        width, height = self.evaluate("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, _TALLEST), "scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(shot["data"]))

    def pdf(self) -> bytes:
        """The page as it prints on A4."""
        printed = self.call("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(printed["data"])
