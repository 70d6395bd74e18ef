"""Links a class to the page that documents it under its exported name: ``mamf.backend.Backend`` as ``mamf.Backend``."""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import mamf


def resolve(app: Sphinx, env: BuildEnvironment, node: pending_xref, shown: nodes.Element) -> nodes.reference | None:
    name = node["reftarget"].rpartition(".")[2]
    if node.get("refdomain") != "py" or name not in mamf.__all__:
        return None
    domain: Any = env.get_domain("py")
    return domain.resolve_xref(env, node["refdoc"], app.builder, "obj", f"mamf.{name}", node, shown)


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True}
