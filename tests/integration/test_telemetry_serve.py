"""A server as operators run it: load from `bench serve`, and what telemetry says of that load."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from clients.sync import Client
from server.cli import main
from tests.fakes.eventually import eventually
from tests.fakes.otlp_receiver import OtlpReceiver, attributes, running_receiver
from tests.tiny_model import build_tiny_model

NUM_PROMPTS, OUTPUT_LEN = 12, 48


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(folder: Path, *flags: str) -> Iterator[str]:
    """`outrider serve` on a Unix socket, stopped as an operator stops it."""
    model = build_tiny_model(folder / "tiny")
    target = f"unix:{folder}/socket"
    command = [sys.executable, "-m", "server", "serve", str(model), "--uds", f"{folder}/socket", "--dtype", "float32"]
    command += ["--device", "cpu", "--kv-cache-memory-bytes", "16MiB", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        with Client(target) as client:
            client.wait_ready(timeout_s=200)
        yield target
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0, log
    finally:
        process.kill()
        process.communicate()


def scrape(port: int) -> dict[str, float]:
    """Every sample without histogram buckets, summed over its labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as response:
        families = text_string_to_metric_families(response.read().decode())
    totals: dict[str, float] = {}
    for sample in (sample for family in families for sample in family.samples):
        if not sample.name.endswith("_bucket"):
            totals[sample.name] = totals.get(sample.name, 0) + sample.value
    return totals


def scrape_when_idle(port: int) -> dict[str, float]:
    """Once every block is free and every step measured: one that was launched ahead may end behind the last token."""
    metrics: dict[str, float] = {}

    def is_idle() -> bool:
        metrics.update(scrape(port))
        num_settled = metrics["outrider_step_duration_seconds_count"]
        is_free = metrics["outrider_kv_blocks_free"] == metrics["outrider_kv_blocks_total"] > 0
        return is_free and num_settled == metrics["outrider_steps_total"]

    asyncio.run(eventually(is_idle))
    return metrics


def test_bench_prometheus_and_spans_agree_on_a_real_server(tmp_path: Path) -> None:
    dataset, output, port = tmp_path / "prompts.txt", tmp_path / "report.json", free_port()
    dataset.write_text("".join(f"the dog {number} and then the dog jumps\n" for number in range(NUM_PROMPTS)))
    with running_receiver() as receiver:
        flags = ("--metrics-port", str(port), "--otlp-endpoint", receiver.endpoint)
        speculation = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "policy": "fixed"}'
        with serving(tmp_path, *flags, "--speculative-config", speculation) as target:
            arguments = ["--target", target, "--dataset", str(dataset), "--output", str(output), "--ignore-eos"]
            counts = ["--num-prompts", str(NUM_PROMPTS), "--random-output-len", str(OUTPUT_LEN), "--num-warmups", "0"]
            assert main(["bench", "serve", *arguments, *counts, "--max-concurrency", "4"]) == 0
            metrics = scrape_when_idle(port)
    report = json.loads(output.read_text(encoding="utf-8"))

    assert report["requests"] == {"completed": NUM_PROMPTS, "failed": 0, "failed_by_status": {}}
    assert report["tokens"]["output"] == NUM_PROMPTS * OUTPUT_LEN == metrics["outrider_generation_tokens_total"]
    assert report["tokens"]["prompt"] == metrics["outrider_prompt_tokens_total"]
    assert report["speculation"]["draft_tokens"] == metrics["outrider_draft_tokens_total"] > 0
    assert report["speculation"]["accepted_tokens"] == metrics["outrider_accepted_draft_tokens_total"]
    assert metrics["gen_ai_server_time_to_first_token_seconds_count"] == NUM_PROMPTS
    assert metrics["outrider_requests_running"] == metrics["outrider_requests_waiting"] == 0
    assert_spans_agree(receiver, report)


def assert_spans_agree(receiver: OtlpReceiver, report: dict[str, dict[str, int]]) -> None:
    generations = [span for span in receiver.server_spans() if span.name.endswith("/Generate")]
    assert len(generations) == NUM_PROMPTS
    drafts = 0
    for span in generations:
        described = attributes(span.attributes)
        assert described["gen_ai.usage.output_tokens"] == OUTPUT_LEN
        assert described["gen_ai.response.finish_reasons"] == ["length"]
        drafts += int(str(described["outrider.speculation.draft_tokens"]))
        assert set(receiver.children(span)) == {"queue", "prefill", "decode"}
    assert drafts == report["speculation"]["draft_tokens"]
