"""outrider-client built alone, installed alone, used against a server."""

import asyncio
import shutil
import subprocess
import sys
import venv
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from server.tokenizer import Tokenizer
from tests.fakes.front import Front, running_front, tiny_model_info
from tests.fakes.scripted_engine import ScriptedEngine

ROOT = Path(__file__).resolve().parents[2]
USE = """
import asyncio, importlib.util, sys
from clients.aio import AsyncClient
from clients.errors import InvalidRequestError
from clients.sync import Client

target = sys.argv[1]
assert importlib.util.find_spec("server") is None, "only the client is installed"
assert importlib.util.find_spec("torch") is None
with Client(target) as client:
    client.wait_ready(timeout_s=10)
    print(client.generate(token_ids=[5, 6], max_tokens=3).text())
    try:
        client.generate("hi", top_p=2.0).text()
    except InvalidRequestError as error:
        print(error.violations[0].field)

async def main():
    async with AsyncClient(target) as client:
        print(await client.generate(token_ids=[7], max_tokens=2).text())

asyncio.run(main())
"""


@pytest.fixture
async def front(tokenizer: Tokenizer) -> AsyncIterator[Front]:
    async with running_front(ScriptedEngine(tiny_model_info()), tokenizer) as running:
        yield running


def _run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _build_and_install(folder: Path) -> Path:
    """Build from copies, so that nothing is left in the source tree. Returns: the new environment's python."""
    source, wheels = folder / "source", folder / "wheels"
    for part in ("clients", "protos", "packages/client"):
        ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
        shutil.copytree(ROOT / part, source / part, ignore=ignored)
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", wheels, source / "packages/client", cwd=folder)
    (wheel,) = wheels.iterdir()
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    _run(python, "-m", "pip", "install", "-q", wheel, cwd=folder)
    return python


@pytest.mark.full
@pytest.mark.timeout(600)
async def test_the_client_works_alone(front: Front, tmp_path: Path) -> None:
    python = await asyncio.to_thread(_build_and_install, tmp_path)
    output = await asyncio.to_thread(_run, python, "-I", "-c", USE, front.target, cwd=tmp_path)
    assert output.splitlines() == ["<5><6><5>", "sampling.top_p", "<7><7>"]
