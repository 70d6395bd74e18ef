"""The reference of the API: links to exported names, and signatures that Sphinx can parse.

A class is documented as ``mamf.Backend``, its exported name; annotations name ``mamf.backend.Backend``, its home.
"""

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


def replace_factory(
    app: Sphinx, what: str, name: str, of: Any, options: Any, signature: str | None, returned: str | None
) -> tuple[str, str | None] | None:
    """A dataclass shows ``<factory>`` for a default that it makes, which no parser reads."""
    return (signature.replace("<factory>", "..."), returned) if signature and "<factory>" in signature else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("missing-reference", resolve)
    app.connect("autodoc-process-signature", replace_factory)
    return {"parallel_read_safe": True}
