"""python -m jobs.report."""

from jobs.cli import run_as_module

run_as_module("report")
