"""What a kernel's launches are worth, as measuring finds it."""

from mamf.engine.regimes.base import CheckedKernel, WrongResultError


def verified(prepared):
    """The verdict on every operand set, launched once from poisoned outputs."""
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
