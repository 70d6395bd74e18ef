"""Run Debian's Chromium without a window, controlled by Debian's chromedriver. Nothing is downloaded."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The widths of the window on a phone and on a laptop, in pixels.
PHONE, LAPTOP = 390, 1280
_HEIGHT = 800
#: The maximum height of a picture, in pixels.
_MAX_PICTURE_HEIGHT = 16_000
_OPTIONS = ("--headless=new", "--disable-dev-shm-usage", "--disable-gpu", "--hide-scrollbars", "--no-first-run")
# The browser sets loadEventEnd shortly after the load event, so wait until it is not 0.
_LOAD_MILLISECONDS = """const done = arguments[arguments.length - 1];
const look = () => {
  const end = performance.getEntriesByType('navigation')[0].loadEventEnd;
  end ? done(end) : setTimeout(look);
};
look()"""
#: How long ``open`` waits for a page to load.
_MAX_LOAD_SECONDS = 60
#: Root, for example in a container, can only start Chromium without its sandbox.
_NO_SANDBOX_OPTION = "--no-sandbox"


def get_missing_browser_reason() -> str:
    """Return why no browser can run here, and how to fix this. Return an empty text if one can run."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: run pip install -e '.[browser]'"
    missing_programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    if not missing_programs:
        return ""
    return f"{' and '.join(missing_programs)} not found: run apt-get install chromium chromium-driver"


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    """Start Chromium, and end it when the context closes."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for option in (*_OPTIONS, *((_NO_SANDBOX_OPTION,) if os.geteuid() == 0 else ())):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """Chromium with one open page. ``driver``: the WebDriver of selenium."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, page: Path, width: int = LAPTOP, *, is_dark: bool = False, medium: str = "") -> None:
        """Open a page from its file, and wait until it is completely loaded.

        ``medium``: "print" for the style of printed pages; empty for a screen. Raises TimeoutException of selenium if
        the page is not loaded after 60 s.
        """
        from selenium.webdriver.support.ui import WebDriverWait

        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.run_devtools_command("Emulation.setEmulatedMedia", media=medium, features=[scheme])
        self.run_devtools_command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=_HEIGHT,
            deviceScaleFactor=1,
            mobile=width == PHONE,
        )
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)  # Discard the entries of the previous page.
        self.driver.get(page.resolve().as_uri())
        WebDriverWait(self.driver, _MAX_LOAD_SECONDS).until(
            lambda driver: driver.execute_script("return document.readyState") == "complete"
        )

    def run_devtools_command(self, method: str, **parameters: Any) -> Any:
        """Send a command of the DevTools protocol, and return its result."""
        return self.driver.execute_cdp_cmd(method, parameters)

    def evaluate(self, script: str, *values: Any) -> Any:
        """Run the body of a function in the page, and return its result. The page's content security policy does not
        apply to the script.
        """
        return self.driver.execute_script(script, *values)

    def read_console(self) -> list[str]:
        """Return the console messages since the page was opened, including errors and violations of its content
        security policy.
        """
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def list_requested_urls(self) -> list[str]:
        """Return the URLs that the browser has requested since the page was opened."""
        events = (json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance"))
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def measure_load_seconds(self, page: Path, times: int = 5) -> float:
        """Open a page ``times`` times. Return the shortest time from the start of the navigation to the end of the load
        event.
        """
        all_seconds = []
        for _ in range(times):
            self.open(page)
            all_seconds.append(self.driver.execute_async_script(_LOAD_MILLISECONDS) / 1e3)
        return min(all_seconds)

    def take_picture(self, path: Path) -> None:
        """Write a picture of the whole page as PNG, up to the maximum height."""
        width, height = self.evaluate("return [innerWidth, document.documentElement.scrollHeight]")
        clip = {"x": 0, "y": 0, "width": width, "height": min(height, _MAX_PICTURE_HEIGHT), "scale": 1}
        screenshot = self.run_devtools_command(
            "Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip
        )
        path.write_bytes(base64.b64decode(screenshot["data"]))

    def print_pdf(self) -> bytes:
        """Return the page as PDF, as it is printed on A4 paper."""
        printed = self.run_devtools_command("Page.printToPDF", paperWidth=8.27, paperHeight=11.69, printBackground=True)
        return base64.b64decode(printed["data"])
