"""Processes of ours import what this one does."""

import os
import subprocess
import sys
from pathlib import Path

from server.commands.own_module import module_command


def imported(folder: Path, path: str) -> list[str]:
    """Where a module of ours and `elsewhere` come from, in a process that begins in `folder`."""
    command, environ = module_command("asked", environ={"PYTHONPATH": path})
    code = "import elsewhere, server.version as ours; print(elsewhere.__file__, ours.__file__)"
    command[command.index("-m") :] = ["-c", code]
    environ = {**os.environ, **environ}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=True).stdout.split()


def test_packages_of_the_users_path_are_found_and_none_takes_our_place(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for folder in (tmp_path, site):
        (folder / "server").mkdir(parents=True)
        (folder / "server" / "version.py").touch()
    (site / "elsewhere.py").touch()
    elsewhere, ours = imported(tmp_path, str(site))
    assert Path(elsewhere) == site / "elsewhere.py"
    assert Path(ours) == Path(sys.modules["server.commands.own_module"].__file__ or "").parents[1] / "version.py"


def test_without_a_path_of_the_users_there_is_ours_alone() -> None:
    for environ in ({}, {"PYTHONPATH": ""}):
        assert os.pathsep not in module_command("server", environ=environ)[1]["PYTHONPATH"]
