"""``mamf results site``: static pages, a feed and downloads from the logs in results/.

The same logs give the same bytes. The folder holds a list of the site's files, so that a build replaces its own files
only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from mamf.contribution.placing import folder_of
from mamf.contribution.published import NOTICE
from mamf.errors import UsageError
from mamf.files import make_folder, write_whole
from mamf.logs.run_log import Seen
from mamf.pages.feed import feed_csv, feed_json, feed_schema
from mamf.pages.site_data import SiteData, read_site_data
from mamf.pages.site_device import device_page
from mamf.pages.site_index import (
    CSV,
    FEED,
    FEED_SCHEMA,
    INDEX,
    NOTICE_FILE,
    PUBLISHED,
    Addresses,
    index_page,
    published_page,
)
from mamf.report.page import render_page

#: In the output folder: the files of the site, a JSON list.
LIST = ".mamf-site.json"
_DEVICES = "devices"
_LONGEST_NAME = 80


def site_files(data: SiteData, root: Path, logs: str) -> Iterator[tuple[str, str]]:
    """The files of the site, as (path in the site, text). ``logs``: the base address of the logs."""
    pages = {name: f"{_DEVICES}/{file}" for name, file in page_names(run.device for run in data.runs).items()}
    addresses = Addresses(logs, pages)
    yield CSV, feed_csv(data.lines)
    yield FEED, feed_json(data.lines)
    yield FEED_SCHEMA, feed_schema()
    if data.published:
        yield PUBLISHED, render_page(published_page(data))
        if (root / NOTICE).exists():
            yield NOTICE_FILE, (root / NOTICE).read_text(encoding="utf-8")
    below = Addresses(logs, pages, "../")
    for name, part in data.by_device().items():
        yield pages[name], render_page(device_page(name, part, below))
    yield INDEX, render_page(index_page(data, addresses))


def page_names(devices: Iterable[str]) -> dict[str, str]:
    """A file name for each device that any file system takes. Names that would share one have a hash at their end."""
    slugs = {name: folder_of(name)[:_LONGEST_NAME] for name in sorted(set(devices))}
    shared = list(slugs.values())

    def file_name(name: str, slug: str) -> str:
        is_exact = shared.count(slug) == 1 and len(slug) < _LONGEST_NAME
        digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:8]
        return f"{slug}.html" if is_exact else f"{slug}-{digest}.html"

    return {name: file_name(name, slug) for name, slug in slugs.items()}


def base_of_logs(address: str | None, root: Path, output: Path) -> str:
    """The address that places of logs are appended to: ``address``, or the way from the site to ``root``.

    Raises UsageError for an address that is not http or https, and if no relative way leads to ``root``.
    """
    if address is not None:
        if not address.lower().startswith(("https://", "http://")):
            raise UsageError(f"--logs {address}: name an address that begins with https:// or http://")
        return address.rstrip("/") + "/"
    try:
        way = os.path.relpath(root.resolve(), output.resolve())
    except ValueError:  # another drive
        raise UsageError(
            f"no relative link leads from {output} to {root}: name the address of the logs (--logs)"
        ) from None
    return quote(PurePosixPath(*Path(way).parts).as_posix()) + "/"


def build_site(
    root: Path, output: Path, logs: str | None = None, paths: Iterable[Path] = (), seen: Seen | None = None
) -> SiteData:
    """Write the site of the logs at ``paths`` in the results folder ``root``; give what it shows.

    ``logs``: the base address of the logs, by default a relative one. Files of an earlier build that are no longer part
    of the site are removed. Raises UsageError if ``output`` lies in ``root`` or holds files that no build wrote,
    RunLogError for a log that cannot be read, RunLogWriteError if the disk is full.
    """
    if root.resolve() in (output.resolve(), *output.resolve().parents):
        raise UsageError(f"{output} lies in {root}, which holds logs only: name another folder")
    base, old = base_of_logs(logs, root, output), _own_files(output)
    data = read_site_data(root, paths, seen)
    _write(output, dict(site_files(data, root, base)), old)
    return data


def _write(output: Path, texts: Mapping[str, str], old: set[str]) -> None:
    for name in {PurePosixPath(name).parent.as_posix() for name in texts}:
        make_folder(output / name)
    _write_list(output, {*old, *texts})  # an interrupted build leaves no file that the next one does not know
    for name, text in texts.items():
        write_whole(output / name, text)
    for name in old - set(texts):
        (output / name).unlink()
    _write_list(output, texts)


def _write_list(output: Path, names: Iterable[str]) -> None:
    write_whole(output / LIST, json.dumps(sorted(names), indent=0) + "\n")


def _own_files(output: Path) -> set[str]:
    """The files of an earlier build. Names that begin with a dot, such as .git, are left alone. Raises UsageError for
    any other.
    """
    try:
        listed = json.loads((output / LIST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        listed = []
    found = set(_files_in(output))
    own = {name for name in listed if isinstance(name, str) and not (output / name).is_symlink()}
    foreign = sorted(found - own)
    if foreign:
        more = f" and {len(foreign) - 1} more" if len(foreign) > 1 else ""
        raise UsageError(f"{output} holds files that are not from a site: {foreign[0]}{more}; name an empty folder")
    return found


def _files_in(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            if not name.startswith("."):
                yield Path(parent, name).relative_to(folder).as_posix()
