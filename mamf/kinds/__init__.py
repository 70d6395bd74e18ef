"""Run kinds: how to show, summarize, plot and resume the logs of each kind."""
