"""Test the parameters of shapes and problems: parsing of text, combinations of values, and allowed ranges."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from mamf.errors import MAX_RUN_ROWS, UsageError, parse_size
from mamf.operation import DERIVED_METADATA, CheckedProblem, describe, get_parameters, yield_combinations


@dataclass(frozen=True)
class Problem(CheckedProblem):
    rows: int = field(metadata=describe("rows", keyword="row_counts", parse_text=parse_size))
    style: Literal["plain", "fancy"] = "plain"
    blocks: int = field(default=0, metadata=describe("blocks", minimum=0, maximum=8))
    is_tied: bool = True
    window: int | None = None
    extra: dict | None = None
    sum: int = field(default=0, metadata=DERIVED_METADATA)
    dtype: str = "bfloat16"


PARAMETERS = get_parameters(Problem)


def test_a_field_declares_its_option_and_default():
    assert "sum" not in PARAMETERS
    assert (PARAMETERS["rows"].option_name, PARAMETERS["is_tied"].option_name) == ("--row-counts", "--is-tied")
    assert [PARAMETERS[name].default for name in ("rows", "style", "is_tied", "window")] == ["", "plain", "yes", ""]
    assert [name for name, parameter in PARAMETERS.items() if not parameter.accepts_text] == ["extra"]


@pytest.mark.parametrize(
    ("name", "value", "values"),
    [
        ("rows", "12", (12,)),
        ("rows", [1, "2"], (1, 2)),
        ("style", ("plain", "fancy"), ("plain", "fancy")),
        ("is_tied", ["no", True], (False, True)),
        ("window", ["none", "3", None], (None, 3, None)),
    ],
)
def test_a_parameter_takes_one_value_or_several(name, value, values):
    assert PARAMETERS[name].parse_values(value) == values


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("rows", "0", "whole number of at least 1"),
        ("style", "plane", "did you mean 'plain'"),
        ("blocks", "1.5", "'1.5' is not a whole number"),
        ("is_tied", "maybe", "is not yes or no"),
        ("extra", "{}", "takes no text: set it in Python"),
    ],
)
def test_text_that_is_not_a_value_is_refused(name, text, message):
    with pytest.raises(UsageError, match=message):
        PARAMETERS[name].parse(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rows": 0}, "rows must be at least 1, not 0"),
        ({"rows": 1, "blocks": 9}, "blocks must be at most 8, not 9"),
        ({"rows": 1, "style": "odd"}, "unknown style 'odd'"),
        ({"rows": 1, "dtype": "bf17"}, "unknown dtype 'bf17'"),
    ],
)
def test_values_that_are_not_allowed_are_refused(fields, message):
    with pytest.raises(UsageError, match=message):
        Problem(**fields)


def test_values_are_combined_up_to_a_maximum_number():
    assert list(yield_combinations({"a": [1, 2], "b": "xy"})) == [{"a": a, "b": b} for a in (1, 2) for b in "xy"]
    assert list(yield_combinations({})) == [{}]
    with pytest.raises(UsageError, match="rows, but at most"):
        yield_combinations({"a": range(MAX_RUN_ROWS), "b": [1, 2]})
