"""Links from a page to files of the repository that are not pages: ``../mamf/peaks.csv``.

On GitHub they work as written. On the site they lead to the repository, or are plain text if its address is unknown. A
link to a file that does not exist stays a warning. Links of an included page count from its own folder.
"""

from __future__ import annotations

import os
from importlib.metadata import metadata
from pathlib import Path

from docutils import nodes
from sphinx.addnodes import download_reference, pending_xref
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[2]
#: Pages of the site that include a file from elsewhere.
PAGES = {ROOT / "CONTRIBUTING.md": "contributing"}


def repository_url() -> str:
    """From GitHub's runner, else from the package's metadata; empty if neither knows it."""
    if "GITHUB_REPOSITORY" in os.environ:
        return f"{os.environ.get('GITHUB_SERVER_URL', 'https://github.com')}/{os.environ['GITHUB_REPOSITORY']}"
    urls: dict[str, str] = dict(url.split(", ", 1) for url in metadata("mamf").get_all("Project-URL") or ())
    return urls.get("Repository", "")


class RepositoryLinks(SphinxTransform):
    """Runs before Sphinx copies the files that a page links to."""

    default_priority = 400

    def apply(self) -> None:
        links = [*self.document.findall(download_reference), *self.document.findall(pending_xref)]
        for link in links:
            if link.get("reftype") == "myst":
                self._replace(link)

    def _replace(self, link: nodes.Element) -> None:
        target, _, anchor = link["reftarget"].partition("#")
        if is_page := link.get("refdomain") == "doc":  # also of pages outside of docs/
            target, anchor = f"{target}.md", link.get("reftargetid") or ""
        folder = Path(self.env.srcdir) if is_page else Path(str(link.source or self.document["source"])).parent
        path = (folder / target).resolve()
        name = PAGES.get(path, self.env.path2doc(path))
        if name in self.env.found_docs:
            attributes = {**link.attributes, "refdomain": "doc", "reftarget": name, "reftargetid": anchor or None}
            link.replace_self(pending_xref("", *link.children, **attributes))
        elif path.exists() and path.is_relative_to(ROOT):
            link.replace_self(_link_to_repository(path, link.children))


def _link_to_repository(path: Path, children: list[nodes.Node]) -> nodes.Element:
    if not (url := repository_url()):
        return nodes.inline("", "", *children)
    kind = "tree" if path.is_dir() else "blob"
    return nodes.reference("", "", *children, refuri=f"{url}/{kind}/HEAD/{path.relative_to(ROOT).as_posix()}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True}
