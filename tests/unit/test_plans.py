"""Test how logs store plans: in one format for all kinds of runs and operations, without loss of information."""

import copy
import json

import msgspec
import pytest
from contribution_logs import write
from made_plans import kernels_plan, search_plan, sweep_plan

from mamf.contribution.review import review_log
from mamf.errors import RunLogError
from mamf.logs.recording import PlanRecord, make_plan_record, read_plan_record
from mamf.logs.run_log import read_run_log
from mamf.operations.attention.operation import AttentionProblem, AttentionShape
from mamf.operations.matmul.shapes import MatmulGrid, MatmulProblem, MatmulShape
from mamf.plans import (
    EXPLAIN,
    GUARD,
    MATMUL,
    REPRODUCE,
    VERIFY,
    Claim,
    GuardOptions,
    Plan,
    ReproduceOptions,
    RowKey,
    VerifyOptions,
)
from mamf.statistics import FigureUncertainty, Interval

SHAPE, PROBLEM = MatmulShape(64, 64, 64), MatmulProblem(seed=7)
ATTENTION_PROBLEM = AttentionProblem(direction="bwd")
ATTENTION_SHAPE = AttentionShape(1, 16, 2, 512, 512, 192, 128, True, 100)
MATMUL_WORK = ((PROBLEM,), ("torch.mm",), (SHAPE,))
SEARCH_PLAN = search_plan(PROBLEM, ("torch.mm",), MatmulGrid((64,), (64, 128), (64,)), priors=(SHAPE,), is_quick=True)
ROW_KEY = RowKey("burst", ATTENTION_PROBLEM, ATTENTION_SHAPE, "sdpa")
CLAIMS = (
    Claim(ROW_KEY, 600.0, Interval(590.0, 610.0, 1.0)),
    Claim(ROW_KEY, 700.0, Interval(690.0, 710.0, 0.95), FigureUncertainty(0.001, 0.002, 9), 1.7e9),
)
PLANS = {
    "sweep": sweep_plan((SHAPE,), PROBLEM, ("burst", "classic"), reference=SHAPE, budget_seconds=60.0, layers=("up",)),
    "search": SEARCH_PLAN,
    "bounded search": search_plan(PROBLEM, ("torch.mm",), MatmulGrid((64,), (64,), (64,), 1e9)),
    "shares": kernels_plan(
        "attention", (ATTENTION_SHAPE,), (ATTENTION_PROBLEM,), ("sdpa", "my.module:Mine"), searches=(SEARCH_PLAN,)
    ),
    "explain": Plan(EXPLAIN, MATMUL, *MATMUL_WORK),
    "guard": Plan(GUARD, MATMUL, *MATMUL_WORK, options=GuardOptions(5)),
    "reproduce": Plan(
        REPRODUCE,
        "attention",
        (ATTENTION_PROBLEM,),
        ("sdpa",),
        (ATTENTION_SHAPE,),
        options=ReproduceOptions(CLAIMS, "a.jsonl", (("torch", "2.9"),), 3),
    ),
    "verify": Plan(VERIFY, MATMUL, *MATMUL_WORK, options=VerifyOptions(17, ("attention", "matmul"))),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_read_as_it_was_written(name):
    record = json.loads(json.dumps(make_plan_record(PLANS[name]), allow_nan=False))
    assert read_plan_record(record) == PLANS[name]


def test_fields_with_a_default_may_be_missing_from_a_log_and_no_others():
    record = make_plan_record(PLANS["reproduce"])
    del record["clock"], record["flush"]
    msgspec.convert(record, PlanRecord)
    assert read_plan_record(record) == PLANS["reproduce"]
    del record["options"]["claims"][0]["step"]["kernel"]
    with pytest.raises(msgspec.ValidationError, match="missing required field `kernel`"):
        msgspec.convert(record, PlanRecord)


def test_a_plan_of_an_operation_that_is_not_installed_is_read():
    record = make_plan_record(PLANS["guard"])
    plan = read_plan_record(record | {"command": "soak", "operation": "fft", "options": {"hours": 3}})
    assert (plan.kind, plan.operation, plan.shapes, plan.options) == ("soak", "fft", ("64x64x64",), {"hours": 3})


def test_a_plan_in_the_form_of_an_earlier_version_is_refused(sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    del records[0]["plan"]["options"]
    with pytest.raises(
        RunLogError, match=r"line 1: the plan of this log has the form of mamf 0.2.0: .*, or measure again$"
    ):
        read_run_log(write(tmp_path / "run.jsonl", records))


def test_unknown_fields_of_a_plan_are_reported(sweep_records, tmp_path):
    records = copy.deepcopy(sweep_records)
    records[0]["plan"] |= {"wishes": 1}
    records[0]["plan"]["options"] |= {"hopes": 2}
    findings = review_log(write(tmp_path / "run.jsonl", records)).findings
    unknown_fields = {
        text for each in findings if each.rule == "unknown-field" for text in each.message.split("'")[1::2]
    }
    assert unknown_fields == {"plan.wishes", "plan.options.hopes"}
