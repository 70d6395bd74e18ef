"""The validator: what fits passes, what does not is named by its path."""

import math

import pytest

from mamf.logs.validator import ANY_NAME, PLAIN, Nullable, require

SCHEMA = {
    "name": str,
    "count?": int,
    "seconds": [float],
    "tied": [{"shape": str, "watts": Nullable(float)}],
    "best": {ANY_NAME: {"ok": bool}},
    "of": {ANY_NAME: PLAIN},
}
RIGHT = {
    "name": "a",
    "seconds": [1, 2.5],
    "tied": [{"shape": "1x1x1", "watts": None}],
    "best": {"burst": {"ok": True}},
    "of": {"m": [1, "x"], "n": None},
}


def test_what_fits_passes_with_fields_that_nobody_names():
    require(RIGHT, SCHEMA)
    require(RIGHT | {"count": 3, "more": object()}, SCHEMA)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": None}, "field name: text is due, not null"),
        ({"count": True}, "field count: a whole number is due, not True"),
        ({"count": 2**70}, f"field count: {2**70} is beyond what anything counts"),
        ({"seconds": [1.0, math.inf]}, "field seconds[1]: a finite number is due, not inf"),
        ({"seconds": 1.0}, "field seconds: a list is due, not 1.0"),
        ({"tied": [RIGHT["tied"][0], {"watts": None}]}, "field tied[1].shape is missing"),
        ({"tied": [{"shape": "1x1x1", "watts": "x"}]}, "field tied[0].watts: a finite number is due, not 'x'"),
        ({"best": {"burst": {"ok": 1}}}, "field best.burst.ok: true or false is due, not 1"),
        ({"best": {"burst": []}}, "field best.burst: an object is due, not []"),
        ({"of": {"m": [[]]}}, "field of.m: one value or a list of them is due, not [[]]"),
    ],
)
def test_the_first_field_that_does_not_fit_is_named(wrong, told):
    with pytest.raises(ValueError) as error:
        require(RIGHT | wrong, SCHEMA)
    assert str(error.value) == told
    with pytest.raises(ValueError) as error:
        require(RIGHT | wrong, SCHEMA, "plan")
    assert str(error.value) == told.replace("field ", "field plan.")


def test_schemas_that_live_for_a_moment_are_not_taken_for_one_another():
    for kind, value in ((str, 1), (int, "1")) * 50:
        with pytest.raises(ValueError, match="field a: "):
            require({"a": value}, {"a": kind})
