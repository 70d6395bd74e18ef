"""The rules that ``mamf results check`` applies to a log: their names, and what each asks."""

from __future__ import annotations

#: Every rule and what it asks.
RULES = {
    "unreadable": "every line is a record with fields of the right types, and no field occurs twice",
    "schema": "its schema is known",
    "kind": "it is a run that results/ collects",
    "truncated": "its last line is complete",
    "missing-field": "the header names the device, the software and the sensors",
    "unknown-field": "records hold only fields that mamf writes",
    "device": "name, vendor, backend and memory belong to one device, and the name is spelled as usual",
    "simulated": "a device was measured, not a simulated one",
    "shared-card": "the run had whole cards of one model",
    "sensors": "if there are sensors, each row has a clock and a power that the device can have",
    "data": "operands were normal random data",
    "row-mismatch": "a row's figures follow from its samples and the plan",
    "implausible": "no figure is more than the datasheet or the clock that was read allows",
    "timer": "the timer's share of a sample is one that its backend can have",
    "unverified": "every result was checked, with an error within its tolerance",
    "equal-samples": "samples differ, within a row and between rows",
    "missing-row": "something was measured, and a find confirmed a ceiling",
    "unknown-operation": "the operation is installed here; otherwise nothing of it can be checked",
    "best-mismatch": "the summary follows from the rows",
    "ceiling-mismatch": "ceilings follow from the rounds that confirmed them",
    "few-samples": "the best has enough samples",
    "wide-interval": "the interval of the best is narrow enough",
    "throttled": "a burst was not throttled",
    "interrupted": "the run was completed (warning: tier interrupted)",
    "future": "no record is dated in the future",
    "private": "no secret, account, host, address or path is in it",
    "misplaced": "in results/: the log is in its place",
    "duplicate": "in results/: the log is there once",
    "submitter": "in results/: submitters.txt names who submitted it (warning if it does not yet)",
}
