"""Take pictures of every kind of page, as on a phone, on a laptop, in dark colors and in print, for people to inspect.

    python tools/screenshots.py OUT_FOLDER

Writes the pages to OUT_FOLDER, with four PNG files and one PDF file for each. Prints a table of sizes and load times.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from browsing.chromium import LAPTOP, PHONE, Browser, get_missing_browser_reason, open_browser
from browsing.pages import make_pages, make_site

#: The width of A4 paper without margins, in CSS pixels.
PRINT_WIDTH = 794


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT_FOLDER", help="new folder for the pages and pictures")
    args = parser.parse_args()
    if reason := get_missing_browser_reason():
        parser.error(reason)
    args.folder.mkdir(parents=True)
    pages = make_pages(args.folder) | make_site(args.folder / "site")
    print("| page | size | loads in |\n|---|---:|---:|")
    with open_browser() as browser:
        for name in pages:
            take_pictures(browser, pages[name], args.folder / name.replace(" ", "-"))
            seconds = browser.measure_load_seconds(pages[name])
            print(f"| {name} | {pages[name].stat().st_size / 1e3:.0f} kB | {1e3 * seconds:.0f} ms |", flush=True)
    return 0


def take_pictures(browser: Browser, page: Path, stem: Path) -> None:
    for kind, width, is_dark, medium in (
        ("phone", PHONE, False, ""),
        ("dark", LAPTOP, True, ""),
        ("print", PRINT_WIDTH, False, "print"),
        ("laptop", LAPTOP, False, ""),
    ):
        browser.open(page, width, is_dark=is_dark, medium=medium)
        browser.take_picture(stem.with_name(f"{stem.name}-{kind}.png"))
    stem.with_suffix(".pdf").write_bytes(browser.print_pdf())


if __name__ == "__main__":
    raise SystemExit(main())
