"""Define the kinds of runs: how each kind is measured, and how its logs are shown, summarized, drawn and resumed."""
