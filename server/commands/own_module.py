"""How a process that runs a module of ours is started, wherever the user stands."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def module_command(
    module: str, *arguments: str, environ: Mapping[str, str] = os.environ
) -> tuple[list[str], dict[str, str]]:
    """Returns: the command, and variables that it needs besides those of this process, `environ`."""
    # A folder called "server" where the user stands, or in front of others, must not be taken for ours.
    path = os.pathsep.join([str(_ROOT), *filter(None, [environ.get("PYTHONPATH")])])
    return [sys.executable, "-P", "-m", module, *arguments], {"PYTHONPATH": path}
