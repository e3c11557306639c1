"""The target continues prompts, in large batches on our own engine, shard by shard."""

import logging
import math
import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from proposers.training.log import start_log
from proposers.training.prompt_file import PromptRecord, Split, prompt_ids, read_prompts
from proposers.training.texts import Text, shard_path, write_shard
from server.errors import ConfigError, OutriderError
from server.llm import LLM
from server.model.resolve import pull
from server.request import SamplingParams

logger = logging.getLogger(__name__)

_LEFT_OFF = 3
"""Exit code of a worker that had no time for all of its shards."""
_STEP_TOKENS = 8192
_MOST_GATHERED = 1024
"""Tokens that an answer gathers before somebody looks at them: nobody reads along here."""


class GenerateSettings(BaseModel):
    """Settings of the stage generate."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="smollm2-135m", description="the target")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: str = Field(default="auto", description="type of weights and activations")
    compile: Literal["auto", "wait", "none"] = Field(default="auto", description="as for outrider serve")
    prompts: tuple[Path, ...] = Field(min_length=1, description="files of prompts")
    output: Path = Field(description="folder for shards of texts; those that are there are kept")
    max_tokens: int = Field(default=256, ge=2, description="longest continuation")
    max_prompt_tokens: int = Field(default=224, ge=2, description="longer prompts are left out")
    temperature: float = Field(default=0.8, ge=0, description="of the training texts that are not greedy")
    greedy_share: float = Field(default=0.5, ge=0, le=1, description="share of training texts that are greedy")
    max_num_seqs: int = Field(default=512, ge=1, le=4096, description="sequences that a worker runs at a time")
    kv_cache_memory_bytes: str | None = Field(
        default=None, description="each worker's KV cache, such as 8GiB; a share of the memory if not given"
    )
    shard_size: int = Field(
        default=4096,
        ge=1,
        description="prompts of a shard; as many as --max-num-seqs let all steps but the first ones be captured ones",
    )
    num_workers: int = Field(default=1, ge=1, le=64, description="processes that share the device")
    worker: int | None = Field(default=None, ge=0, description="do this worker's shards alone; all if not given")
    max_prompts: int | None = Field(default=None, ge=1, description="most prompts of each split")
    seed: int = Field(default=0, ge=0, description="of sampling")
    stop_after_seconds: float | None = Field(
        default=None, gt=0, description="begin no more shards then; the same command goes on"
    )


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt to continue. Attributes: seed: what its randomness follows from."""

    prompt: PromptRecord
    temperature: float
    seed: int


def generate(settings: GenerateSettings) -> bool:
    """Write the shards that are not there yet. Returns: whether all are there.

    Raises: ConfigError, ModelError; OutriderError if a worker fails.
    """
    stop_s = math.inf if settings.stop_after_seconds is None else time.monotonic() + settings.stop_after_seconds
    settings.output.mkdir(parents=True, exist_ok=True)
    if settings.num_workers > 1 and settings.worker is None:
        return _run_workers(settings)
    shards = list(plan_shards(settings).items())[settings.worker or 0 :: settings.num_workers]
    if missing := {path: jobs for path, jobs in shards if not path.exists()}:
        return _write(missing, settings, stop_s)
    logger.info("all texts are there")
    return True


def plan_shards(settings: GenerateSettings) -> dict[Path, list[Job]]:
    """Every shard with what goes into it; a function of settings and prompts, whatever is there already.

    Prompts for evaluation are continued greedily and at the temperature, those for training one way or the other.
    """
    by_split: dict[Split, list[PromptRecord]] = {}
    for path in settings.prompts:
        for prompt in read_prompts(path):
            by_split.setdefault(prompt.split, []).append(prompt)
    shards: dict[Path, list[Job]] = {}
    for split, prompts in sorted(by_split.items()):  # those to train on last: of them fewer will do
        chosen = np.random.default_rng(settings.seed).random(len(prompts)) < settings.greedy_share
        jobs: list[Job] = []
        for index, prompt in enumerate(prompts[: settings.max_prompts]):
            both = (0.0, settings.temperature)
            given = both if split != "train" else both[:1] if chosen[index] else both[1:]
            jobs += [Job(prompt, temperature, settings.seed * 1_000_003 + index) for temperature in given]
        for index, start in enumerate(range(0, len(jobs), settings.shard_size)):
            shards[shard_path(settings.output, split, index)] = jobs[start : start + settings.shard_size]
    return shards


def _write(shards: Mapping[Path, Sequence[Job]], settings: GenerateSettings, stop_s: float) -> bool:
    """Args: stop_s: of the monotonic clock. Returns: whether it wrote all."""
    tokenizer = AutoTokenizer.from_pretrained(pull(settings.model))
    longest = settings.max_prompt_tokens + settings.max_tokens
    options: dict[str, Any] = {}
    if settings.kv_cache_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes
    with LLM(
        settings.model,
        device=settings.device,
        dtype=settings.dtype,
        compile=settings.compile,
        max_model_len=longest,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(_STEP_TOKENS, settings.max_num_seqs),
        max_queued_requests=2 * settings.max_num_seqs,
        stream_interval=min(longest, _MOST_GATHERED),
        speculative_config=None,
        **options,
    ) as llm:
        for index, (path, jobs) in enumerate(shards.items()):
            started_s = time.monotonic()
            if started_s > stop_s:
                logger.info("left off with %d shards to write", len(shards) - index)
                return False
            texts = continue_prompts(llm, jobs, tokenizer, settings)
            write_shard(path, texts)
            num_tokens = sum(len(text.output_ids) for text in texts)
            rate = num_tokens / (time.monotonic() - started_s)
            logger.info("%s: %d texts, %d tokens, %.0f tokens/s", path.name, len(texts), num_tokens, rate)
    return True


def continue_prompts(llm: LLM, jobs: Sequence[Job], tokenizer: Any, settings: GenerateSettings) -> list[Text]:
    """What the target says; prompts that are too long are left out. Raises: ConfigError if all are."""
    tokenised = [(job, prompt_ids(job.prompt, tokenizer)) for job in jobs]
    fitting = [(job, ids) for job, ids in tokenised if len(ids) <= settings.max_prompt_tokens]
    if not fitting:
        raise ConfigError(f"none of {len(jobs)} prompts has at most {settings.max_prompt_tokens} tokens")
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for _, ids in fitting],
        [
            SamplingParams(temperature=job.temperature, max_tokens=settings.max_tokens, seed=job.seed)
            for job, _ in fitting
        ],
    )
    return [
        Text(
            np.array([*ids, *output.outputs[0].token_ids], dtype=np.int32),
            len(ids),
            job.prompt.kind,
            job.prompt.split,
            job.temperature,
        )
        for (job, ids), output in zip(fitting, outputs, strict=True)
    ]


def _run_workers(settings: GenerateSettings) -> bool:
    """Processes of their own: one alone leaves a large GPU waiting for Python. Returns: whether they wrote all."""
    if settings.kv_cache_memory_bytes is None:
        raise ConfigError("--num-workers above 1 needs --kv-cache-memory-bytes, the KV cache that each of them takes")
    spawn = multiprocessing.get_context("spawn")
    workers = [
        spawn.Process(target=_run_worker, args=(settings.model_copy(update={"worker": index}),))
        for index in range(settings.num_workers)
    ]
    try:
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
    finally:
        for worker in workers:
            worker.terminate()
    if failed := [index for index, worker in enumerate(workers) if worker.exitcode not in (0, _LEFT_OFF)]:
        raise OutriderError(f"the workers {failed} failed, see above; run the same command again for what is missing")
    return all(worker.exitcode == 0 for worker in workers)


def _run_worker(settings: GenerateSettings) -> None:
    start_log(f"worker {settings.worker} ")
    if not generate(settings):
        sys.exit(_LEFT_OFF)
