"""Test the charts of stacked bars, which show the phases of a model's step and its MAMFU."""

import re
from xml.etree.ElementTree import fromstring

import pytest

from mamf.measurement import Measurement, Rate
from mamf.operations.model.operation import TRAINING_PHASES, ModelProblem, ModelShape
from mamf.report.charts.logs import make_model_chart
from mamf.report.charts.picture import PANEL_WIDTH_INCHES
from mamf.report.page import make_picture_template_values
from mamf.statistics import summarize_samples

HEADER = {"device": {"name": "x"}, "environment": {}}
RATE_FIELDS = {"source": "given", "description": "of a log", "device": "x"}
KNOWN_CEILINGS = {("bfloat16", "sustained"): Rate(rate=500.0, dtype="bfloat16", regime="sustained", **RATE_FIELDS)}
MILLISECONDS = {"forward": 10.0, "forward-backward": 31.0, "step": 34.0}


def make_row(phase="step", milliseconds=None, kernel="torch[sdpa]"):
    samples = [(milliseconds or MILLISECONDS[phase]) / 1e3] * 10
    problem = ModelProblem(phase=phase)
    summary = summarize_samples(samples, "mean")
    shape = ModelShape(8, 1024)
    return Measurement(shape, kernel, problem, "sustained", "mean", "ok", "", summary, tuple(samples), launch_count=10)


STEP_ROWS = [make_row(phase) for phase in TRAINING_PHASES]


def list_bar_parts(rows):
    return [bar.parts for panel in make_model_chart(rows, KNOWN_CEILINGS, HEADER).panels for bar in panel.bars]


@pytest.mark.parametrize(
    ("phases", "expected"),
    [
        (TRAINING_PHASES, {"forward": 10, "backward": 21, "optimizer step": 3}),
        (["step", "forward"], {"forward": 10, "backward and optimizer step": 24}),
        (["forward-backward", "step"], {"forward and backward": 31, "optimizer step": 3}),
        (["step"], {"forward and backward and optimizer step": 34}),
    ],
)
def test_a_phase_is_the_difference_to_the_phase_that_it_contains(phases, expected):
    (bar_parts,) = list_bar_parts([make_row(phase) for phase in phases])
    assert dict(bar_parts) == pytest.approx(expected)
    assert list(dict(bar_parts)) == list(expected)
    notes = make_model_chart([make_row(phase) for phase in phases], KNOWN_CEILINGS, HEADER).notes
    assert any("differences" in note for note in notes) == (len(phases) > 1)


def test_a_chart_of_one_phase_names_it_and_draws_its_interval():
    row = make_row("forward")
    chart = make_model_chart([row], KNOWN_CEILINGS, HEADER)
    assert chart.title.startswith("A model's forward: ")
    assert make_model_chart(STEP_ROWS, KNOWN_CEILINGS, HEADER).title.startswith("A model's step by phase: ")
    ((bar,),) = (panel.bars for panel in chart.panels)
    assert bar.interval == pytest.approx((1e3 * row.interval.low, 1e3 * row.interval.high))


def test_steps_of_one_context_length_stand_side_by_side_with_their_shares():
    rows = [*STEP_ROWS, make_row("step", kernel="compiled", milliseconds=30.0)]
    chart = make_model_chart(rows, KNOWN_CEILINGS, HEADER)
    (panel,) = chart.panels
    shares = [100 * each.best_rate / 500 for each in (STEP_ROWS[-1], rows[-1])]
    assert [bar.label for bar in panel.bars] == [
        f"torch[sdpa] ({shares[0]:.1f} % MAMFU)",
        f"compiled ({shares[1]:.1f} % MAMFU)",
    ]
    assert "500" in chart.notes[0] and "context length 1k" in chart.title


def test_on_a_page_a_chart_of_many_bars_is_high_but_no_wider_and_cuts_no_label():
    names = ["torch[sdpa]", "a.module.with.a.long.path:AndAClass (by path)"] + [
        f"kernel-{number}" for number in range(8)
    ]
    few, many = (
        make_picture_template_values(
            make_model_chart([make_row(kernel=name) for name in chart_names], KNOWN_CEILINGS, HEADER)
        )["pictures"]
        for chart_names in (names[:2], names)
    )
    sizes = [re.search('viewBox="0 0 (.*?) (.*?)"', svg).groups() for (svg,) in (few, many)]
    (few_width, few_height), (many_width, many_height) = (map(float, size) for size in sizes)
    assert few_width == many_width == pytest.approx(72 * PANEL_WIDTH_INCHES, abs=0.1)
    assert many_height > 2 * few_height
    texts = " ".join(text.text for text in fromstring(many[0]).iter("text"))
    assert all(name in texts for name in names)
