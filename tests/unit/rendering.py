"""Render reports as text, for tests."""

from mamf.profiling.log import make_profile_document
from mamf.report.explanation import make_explanation_document
from mamf.report.formats import FORMATTERS
from mamf.report.kernels import make_kernels_document
from mamf.report.roofline import make_roofline_document
from mamf.report.shares import ShareCalculator


def render(form, rows, header, summary, top=None, width=None, ceilings=None, roofs=None, known=None, shared=None):
    shares = ShareCalculator(header, shared or {}, known or {}, roofs)
    return FORMATTERS[form](make_kernels_document(rows, shares, summary, top=top, confirmed_ceilings=ceilings), width)


def render_explanation(form, steps, rows, head, foot=(), width=None):
    return FORMATTERS[form](make_explanation_document(steps, rows, head, foot), width)


def render_roofline(form, roofs, points, head="head"):
    return FORMATTERS[form](make_roofline_document(roofs, points, [head]), None)


def render_profile(form, script, profile, top=10, width=None):
    return FORMATTERS[form](make_profile_document(script, profile, top), width)
