"""Verify the launches of a prepared kernel as a measurement does."""

from mamf.engine.regimes.base import CheckedKernel, WrongResultError


def verified(prepared):
    """Poison the outputs, launch once with each operand set, and return the verdict on the whole outputs."""
    checked = CheckedKernel(prepared)
    checked.poison_outputs()
    for launch in checked.launches:
        launch()
    try:
        checked.verify_last_outputs(checks_all_elements=True)
        checked.require_unchanged_operands()
    except WrongResultError as error:
        return error.verdict
    return checked.verdict
