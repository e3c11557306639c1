"""Runs the command line as `python -m server`."""

import sys

from server.cli import main

sys.exit(main())
