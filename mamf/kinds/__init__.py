"""Kinds of runs: how a log of each is shown, summed up, drawn and resumed. One file per kind; registry.py finds it."""
