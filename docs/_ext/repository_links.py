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
        is_page = link.get("refdomain") == "doc"  # its ending is left out
        path = (Path(str(link.source or self.document["source"])).parent / f"{target}{'.md' * is_page}").resolve()
        is_beside = is_page and path.is_relative_to(self.env.srcdir)
        if is_beside or not path.exists() or not path.is_relative_to(ROOT):
            return
        name = self.env.path2doc(path)
        if name not in self.env.found_docs:
            link.replace_self(_link_to_repository(path, link.children))
        else:
            page = pending_xref("", *link.children, **{**link.attributes, "refdomain": "doc", "reftarget": name})
            page["reftargetid"] = anchor or None
            link.replace_self(page)


def _link_to_repository(path: Path, children: list[nodes.Node]) -> nodes.Element:
    if not (url := repository_url()):
        return nodes.inline("", "", *children)
    kind = "tree" if path.is_dir() else "blob"
    return nodes.reference("", "", *children, refuri=f"{url}/{kind}/HEAD/{path.relative_to(ROOT).as_posix()}")


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(RepositoryLinks)
    return {"parallel_read_safe": True}
