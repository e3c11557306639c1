"""The usual example of two processes that share a store, each with an `LLM`; nothing but imports and model is ours."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server import LLM, SamplingParams
from tests.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = """
def read_prompts():
    context = "Hi " * 1000
    context2 = "Hey " * 500
    return [
        context + "Hello, my name is",
        context + "The capital of France is",
        context2 + "Your name is",
        context2 + "The capital of China is",
    ]
"""
SHARED = """
        kv_transfer_config=KVTransferConfig(
            kv_connector="SharedStorageConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": "local_storage"},
        ),
"""
PREFILL = f"""
from server import LLM, SamplingParams
from server.config import KVTransferConfig
{PROMPTS}
def main():
    sampling_params = SamplingParams(temperature=0, top_p=0.95, max_tokens=1)
    llm = LLM(
        model="model",
        enforce_eager=True,
        gpu_memory_utilization=0.8,{SHARED}
    )
    with open("output.txt", "w") as f:
        for output in llm.generate(read_prompts(), sampling_params):
            f.write(output.prompt + output.outputs[0].text + "\\n")

if __name__ == "__main__":
    main()
"""
DECODE = f"""
from server import LLM, SamplingParams
from server.config import KVTransferConfig

def main():
    with open("output.txt") as f:
        prompts = [line.strip("\\n") for line in f]
    sampling_params = SamplingParams(temperature=0, top_p=0.95, max_tokens=10)
    llm = LLM(
        model="model",
        enforce_eager=True,
        gpu_memory_utilization=0.8,
        max_num_batched_tokens=64,
        max_num_seqs=16,{SHARED}
    )
    for output in llm.generate(prompts, sampling_params):
        print(len(output.prompt_token_ids), output.num_cached_tokens, repr(output.outputs[0].text))

if __name__ == "__main__":
    main()
"""


def run(script: str, folder: Path) -> str:
    """Returns: what it has printed."""
    path = folder / "script.py"
    path.write_text(script)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=folder, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(900)
def test_the_second_process_finds_what_the_first_one_has_computed(tmp_path: Path) -> None:
    build_tiny_model(tmp_path / "model", max_position=8192)
    run(PREFILL, tmp_path)
    assert any((tmp_path / "local_storage").rglob("*"))
    printed = [line.split(" ", 2) for line in run(DECODE, tmp_path).splitlines()]
    assert len(printed) == 4
    for length, cached, _ in printed:  # a process that ends waits for its saves, but not for ever
        assert int(length) // 2 < int(cached) < int(length)
    prompts = (tmp_path / "output.txt").read_text().splitlines()
    with LLM(model=str(tmp_path / "model"), enforce_eager=True) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=10))
    assert [text for _, _, text in printed] == [repr(output.outputs[0].text) for output in outputs]
