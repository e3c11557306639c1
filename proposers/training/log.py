"""Progress lines on stderr."""

import logging


def start_log(prefix: str = "") -> None:
    """Show what our own modules say of their progress. Args: prefix: in front of every line."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {prefix}%(message)s", datefmt="%H:%M:%S")
    logging.getLogger("proposers.training").setLevel(logging.INFO)
