"""Runs the command line as `python -m server`."""

from server.cli import run_process

run_process()
