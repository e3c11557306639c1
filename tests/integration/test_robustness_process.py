"""`outrider serve` as a supervisor sees it: signals, exit codes, what it says before it ends."""

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from clients.aio import AsyncClient
from clients.errors import UnavailableError
from clients.sync import Client
from server.cli import EXIT_FAILED, EXIT_USAGE, main
from server.scheduler.scheduler import Scheduler
from tests.fakes.front import NO_RETRY
from tests.tiny_model import build_tiny_model

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
NUM_TOKENS = 500

GATED = """
import pathlib, sys, time
import server.compose
from server.cli import main

warm_up, gate = server.compose.warm_up, pathlib.Path(sys.argv.pop(1))

def wait_then_warm_up(*args):
    while not gate.exists():
        time.sleep(0.01)
    warm_up(*args)

server.compose.warm_up = wait_then_warm_up
sys.exit(main(sys.argv[1:]))
"""
"""`outrider` whose warm-up waits for a file."""


def flags(model: Path) -> list[str]:
    return ["serve", str(model), "--device=cpu", "--dtype=float32", "--kv-cache-memory-bytes=4MiB"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def child(*command: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen([sys.executable, *command], stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def is_refused(client: AsyncClient) -> None:
    """Ask until the server takes no more calls."""
    with contextlib.suppress(UnavailableError):
        while True:
            await client.stats()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), max_position=NUM_TOKENS + 100)


async def test_sigterm_lets_streams_end_and_takes_no_more(model: Path, tmp_path: Path) -> None:
    port, gate = free_port(), tmp_path / "warm"
    target = f"127.0.0.1:{port}"
    with child("-c", GATED, str(gate), *flags(model), f"--port={port}") as process:
        async with grpc.aio.insecure_channel(target) as channel, AsyncClient(target, retry=NO_RETRY) as client:
            watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
            assert (await watch.read()).status == NOT_SERVING, "it listens, but is not warm"
            gate.touch()
            assert (await watch.read()).status == SERVING
            generation = client.generate("once", max_tokens=NUM_TOKENS, ignore_eos=True)
            deltas = aiter(generation)
            await anext(deltas)
            process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == NOT_SERVING
            assert not generation.finished, "the stream is still live"
            with pytest.raises(UnavailableError):
                await client.generate("twice", max_tokens=1)
            async for _ in deltas:
                pass
            assert generation.output.choices[0].finished.usage.completion_tokens == NUM_TOKENS
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, log
    assert "Traceback" not in log


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_a_second_signal_ends_it_at_once(model: Path, tmp_path: Path, number: signal.Signals) -> None:
    path = tmp_path / "socket"
    with child("-m", "server", *flags(model), f"--uds={path}") as process:
        async with AsyncClient(f"unix:{path}", retry=NO_RETRY) as client:
            await client.wait_ready(timeout_s=200)
            left = client.generate("once", max_tokens=NUM_TOKENS, ignore_eos=True, n=16)
            deltas = aiter(left)  # an iterator that is dropped ends the call
            await anext(deltas)
            process.send_signal(number)
            await is_refused(client)
            assert process.poll() is None, "it waits for the stream"
            process.send_signal(number)
            _, log = await asyncio.to_thread(process.communicate, timeout=60)
            assert process.returncode == 128 + number, log  # in order it would end with 0, once the stream has


@pytest.mark.full
async def test_sigint_ends_an_idle_server_and_its_socket(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with child("-m", "server", *flags(model), f"--uds={path}") as process:
        async with AsyncClient(f"unix:{path}", retry=NO_RETRY) as client:
            await client.wait_ready(timeout_s=200)
            await client.generate("once", max_tokens=3, ignore_eos=True)
        process.send_signal(signal.SIGINT)
        _, log = await asyncio.to_thread(process.communicate, timeout=60)
    assert process.returncode == 0, log
    assert not path.exists()


def test_a_port_in_use_is_one_line_and_code_2(model: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        assert main([*flags(model), f"--port={port}"]) == EXIT_USAGE
    lines = [line for line in capfd.readouterr().err.splitlines() if re.match("outrider: |Traceback", line)]
    assert lines == [
        (
            f"outrider: cannot listen on 127.0.0.1:{port}: another process listens there; stop it, or choose another "
            "--port (0 picks a free one)"
        )
    ]


def test_a_dead_engine_ends_the_process(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule, is_broken = Scheduler.schedule, threading.Event()

    def schedule_until_broken(scheduler: Scheduler) -> object:
        if is_broken.is_set():
            raise RuntimeError("a bug")
        return schedule(scheduler)

    monkeypatch.setattr(Scheduler, "schedule", schedule_until_broken)
    target = f"unix:{tmp_path}/socket"
    outcomes: list[Exception] = []
    statuses: list[int] = []

    def call() -> None:
        with Client(target, retry=NO_RETRY) as client, grpc.insecure_channel(target) as channel:
            client.wait_ready(timeout_s=200)
            watch = HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            statuses.append(next(watch).status)
            try:
                for _ in client.generate("once", max_tokens=NUM_TOKENS, ignore_eos=True):
                    is_broken.set()
            except UnavailableError as error:
                outcomes.append(error)
            statuses.append(next(watch).status)

    caller = threading.Thread(target=call)
    caller.start()
    try:
        assert main([*flags(model), f"--uds={tmp_path}/socket"]) == EXIT_FAILED
    finally:
        caller.join()
    assert "must be restarted" in str(outcomes[0])
    assert statuses == [SERVING, NOT_SERVING]
    assert "outrider: the engine has failed" in capsys.readouterr().err
