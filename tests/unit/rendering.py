"""Render reports as text, for tests."""

from mamf.profiling.log import make_profile_document
from mamf.report.formats import FORMATTERS
from mamf.report.kernels import make_kernels_document
from mamf.report.roofline import make_roofline_document
from mamf.report.shares import ShareCalculator


def render(format_name, rows, header, summary, top=None, roofs=None):
    document = make_kernels_document(rows, ShareCalculator(header, {}, {}, roofs), summary, top=top)
    return FORMATTERS[format_name](document, None)


def render_roofline(format_name, roofs, points, head="head"):
    return FORMATTERS[format_name](make_roofline_document(roofs, points, [head]), None)


def render_profile(format_name, script, profile):
    return FORMATTERS[format_name](make_profile_document(script, profile, 10), None)
