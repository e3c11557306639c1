"""The sides of a contest: our server through gRPC, and engines in workers of their own."""

import asyncio
import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from clients.aio import AsyncClient
from clients.errors import DeadlineExceededError
from protos.outrider.v1 import inference_pb2 as pb
from tests.bench.process import Process
from tests.bench.sample import Prompts, Sample

ROOT = Path(__file__).resolve().parents[2]
_POLL_S = 1.0


class OutriderServer:
    """`outrider serve` in a process of its own, measured from the outside."""

    def __init__(self, model: str, settings: Sequence[str], log: Path, environ: Mapping[str, str] = os.environ) -> None:
        """Start it and wait until it serves. Raises: BenchError if it ends instead."""
        port = _free_port()
        command = [sys.executable, "-P", "-m", "server", "serve", model, f"--port={port}", *settings]
        self._target = f"127.0.0.1:{port}"
        self._process = Process(command, log, {**environ, "PYTHONPATH": str(ROOT)})
        started_s = time.monotonic()
        try:
            self.model_info = asyncio.run(self._wait_ready())
        except BaseException:
            self.close()
            raise
        self.start_s = time.monotonic() - started_s
        """From the process's start to SERVING."""

    def running(self) -> AbstractContextManager[None]:
        """See Contestant."""
        return self._process.running()

    def pause(self) -> None:
        """Stand still until it is its turn."""
        self._process.pause()

    def close(self) -> None:
        """End the server."""
        self._process.close()

    def measure(self, prompts: Prompts, output_len: int) -> Sample:
        """See Contestant; over a fresh connection, as a stopped server answers no keepalive."""
        return asyncio.run(self._measure(prompts, output_len))

    def tokenize(self, text: str) -> list[int]:
        """The model's ids of a text."""

        async def tokenize() -> list[int]:
            async with AsyncClient(self._target) as client:
                return await client.tokenize(text)

        with self.running():
            return asyncio.run(tokenize())

    async def _wait_ready(self) -> pb.GetModelInfoResponse:
        async with AsyncClient(self._target) as client:
            while self._process.popen.poll() is None:
                try:
                    await client.wait_ready(timeout_s=_POLL_S)
                except DeadlineExceededError:
                    continue
                return await client.model_info()
        raise self._process.failure("the server did not start")

    async def _measure(self, prompts: Prompts, output_len: int) -> Sample:
        async with AsyncClient(self._target) as client:
            await client.model_info()  # connects
            cpu_before_s, start_s = time.process_time(), time.perf_counter()

            async def receive(prompt: Sequence[int]) -> tuple[float, float, int, int]:
                """When the first and the last message came; tokens of the first, and of all."""
                first_s, num_first, num_tokens = 0.0, 0, 0
                async for delta in client.generate(
                    token_ids=prompt, max_tokens=output_len, temperature=0.0, ignore_eos=True
                ):
                    if delta.token_ids and not num_tokens:
                        first_s, num_first = time.perf_counter(), len(delta.token_ids)
                    num_tokens += len(delta.token_ids)
                return first_s, time.perf_counter(), num_first, num_tokens

            received = await asyncio.gather(*map(receive, prompts))
            end_s, cpu_s = time.perf_counter(), time.process_time() - cpu_before_s
        firsts_s, lasts_s, nums_first, nums_tokens = zip(*received, strict=True)
        return Sample(
            ttft_s=max(firsts_s) - start_s,
            decode_s=max(lasts_s) - max(firsts_s),
            wall_s=end_s - start_s,
            num_tokens=sum(nums_tokens),
            num_first=sum(nums_first),
            client_cpu_s=cpu_s,
        )


class Worker:
    """An engine in tests/bench/worker.py, run by the interpreter that has it installed."""

    def __init__(self, python: str, engine: str, model: str, options: Mapping[str, object], log: Path) -> None:
        """Load it. Raises: BenchError if it ends instead."""
        command = [python, str(ROOT / "tests/bench/worker.py"), engine, model, json.dumps(options)]
        self._process = Process(command, log, _environ(python, engine))
        try:
            self.versions = self._answer()
        except BaseException:
            self.close()
            raise

    def running(self) -> AbstractContextManager[None]:
        """See Contestant."""
        return self._process.running()

    def pause(self) -> None:
        """Stand still until it is its turn."""
        self._process.pause()

    def close(self) -> None:
        """End the worker."""
        self._process.close()

    def measure(self, prompts: Prompts, output_len: int) -> Sample:
        """See Contestant."""
        assert self._process.popen.stdin is not None
        self._process.popen.stdin.write(json.dumps({"prompts": prompts, "output_len": output_len}) + "\n")
        self._process.popen.stdin.flush()
        return Sample(**self._answer())

    def _answer(self) -> dict[str, Any]:
        assert self._process.popen.stdout is not None
        line = self._process.popen.stdout.readline()
        if not line:
            self._process.popen.wait()
            raise self._process.failure("the worker ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environ(python: str, engine: str) -> dict[str, str]:
    """What the engine's makers advise for all cores, and nothing of ours but for our own engine."""
    if engine == "outrider":
        return {"PYTHONPATH": str(ROOT)}
    if engine != "vllm":
        return {}
    openmp = Path(python).absolute().parents[1] / "lib" / "libiomp5.so"
    return {
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        # A limit set for another engine is none of vLLM's, which binds its threads itself.
        **({"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))} if "OMP_NUM_THREADS" in os.environ else {}),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
