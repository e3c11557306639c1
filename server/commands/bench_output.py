"""Where a benchmark's report goes."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from server.errors import ConfigError, OutriderError


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add --output."""
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the report as JSON")


def check_output(path: Path | None) -> None:
    """Raises: ConfigError for a folder that is not there, which is better known before the run than after."""
    if path is not None and not path.parent.is_dir():
        raise ConfigError(f"--output: there is no folder {path.parent}")


def write_report(report: Mapping[str, object], path: Path | None) -> None:
    """Write the report as JSON, if it is wanted. Raises: OutriderError if that fails."""
    if path is None:
        return
    try:
        path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise OutriderError(f"cannot write the report to {path}: {error.strerror}") from error
