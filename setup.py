"""Finds the packages, so that a new operation is a folder and nothing else; all the rest is in pyproject.toml."""

from setuptools import find_packages, setup

setup(packages=[*find_packages(include=["mamf", "mamf.*"]), "mamf_backends"])
