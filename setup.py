"""Finds the packages, so that a new operation is a folder and nothing else, and makes the README's links absolute; all
the rest is in pyproject.toml.

PyPI shows README.md without the repository around it. MAMF_REPOSITORY_URL, such as https://github.com/OWNER/NAME, says
where its links and pictures lead to, MAMF_REPOSITORY_REF at which tag or branch. Without it links stay relative.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

# [text](docs/x.md), ![text](docs/x.png), [text]: docs/x.md; neither addresses nor anchors.
_TARGET = r"(?![a-z][a-z0-9+.-]*:|[#/])"
_INLINE = re.compile(rf"(?P<image>!?)(?P<before>\[[^\]]*\]\(){_TARGET}")
_DEFINED = re.compile(rf"^(?P<before>\[[^\]]+\]: *){_TARGET}", re.M)
_FENCED = re.compile(r"^(```.*?^```[^\n]*$)", re.M | re.S)


def absolute_links(text: str, url: str, ref: str) -> str:
    """Markdown whose relative links lead to a file in the repository at ``url``, and pictures to its content."""

    def replace(found: re.Match[str]) -> str:
        image = found.groupdict().get("image", "")
        return f"{image}{found['before']}{url.rstrip('/')}/{'raw' if image else 'blob'}/{ref}/"

    parts = _FENCED.split(text)  # every second one is code
    parts[::2] = [_DEFINED.sub(replace, _INLINE.sub(replace, part)) for part in parts[::2]]
    return "".join(parts)


def described() -> dict[str, object]:
    """The arguments of ``setup`` that depend on the repository."""
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    if not (url := os.environ.get("MAMF_REPOSITORY_URL")):
        return {"long_description": readme, "project_urls": {}}
    ref = os.environ.get("MAMF_REPOSITORY_REF") or "HEAD"
    pages = {"Repository": url, "Changelog": f"{url}/blob/{ref}/CHANGELOG.md", "Issues": f"{url}/issues"}
    return {"long_description": absolute_links(readme, url, ref), "project_urls": pages}


if __name__ == "__main__":
    setup(
        packages=[*find_packages(include=["mamf", "mamf.*"]), "mamf_backends"],
        long_description_content_type="text/markdown",
        **described(),
    )
