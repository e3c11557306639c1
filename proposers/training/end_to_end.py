"""Acceptance and speed of proposers in the engine itself, through the offline API."""

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoTokenizer

from proposers.training.measures import ALL_KINDS, Line, Measures
from proposers.training.prompt_file import PromptRecord, prompt_ids, read_prompts
from proposers.training.repetition import MOST_REPEATED, repeated_share
from proposers.training.stages import report
from server.errors import ConfigError
from server.llm import LLM, CompletionOutput
from server.model.resolve import pull
from server.request import SamplingParams, SpeculationOptions

logger = logging.getLogger(__name__)

HOW = "end to end"
_NONE = "none"


class EndToEndStage(BaseModel):
    """Settings of the stage end-to-end."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = Field(default="smollm2-135m", description="the target")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N")
    dtype: str = Field(default="auto", description="type of weights and activations")
    compile: Literal["auto", "wait", "none"] = Field(default="auto", description="as for outrider serve")
    prompts: tuple[Path, ...] = Field(min_length=1, description="files of prompts; those to train on are left out")
    methods: tuple[str, ...] = Field(
        default=("none", "ngram"),
        min_length=1,
        description="none, ngram, suffix, or METHOD=FOLDER for a head, such as eagle3=heads/eagle3",
    )
    ks: tuple[int, ...] = Field(default=(2, 3, 4, 5, 6), min_length=1, description="numbers of drafts")
    temperatures: tuple[float, ...] = Field(default=(0.0, 0.8), min_length=1, description="to generate at")
    max_tokens: int = Field(default=256, ge=2, description="longest answer")
    max_prompt_tokens: int = Field(default=224, ge=2, description="longer prompts are left out")
    max_prompts: int = Field(default=200, ge=1, description="most prompts of each split and kind")
    max_num_seqs: int = Field(default=64, ge=1, description="sequences at a time; 1 measures the speed of one alone")
    kv_cache_memory_bytes: str | None = Field(default=None, description="size of the KV cache, such as 1GiB")
    seed: int | None = Field(default=None, description="of sampling; none draws as unseeded requests do")
    output: Path | None = Field(default=None, description="JSON file to write besides the table")


def end_to_end(stage: EndToEndStage) -> None:
    """Run every method on the same prompts, print a table. Raises: ConfigError, ModelError."""
    tokenizer = AutoTokenizer.from_pretrained(pull(stage.model))
    prompts = _prompts(stage, tokenizer)
    entries: list[dict[str, Any]] = []
    for given in stage.methods:
        method, _, folder = given.partition("=")
        entries += _measure(stage, method, folder, prompts)
    report(entries, stage.output)


def _prompts(stage: EndToEndStage, tokenizer: Any) -> list[tuple[PromptRecord, list[int]]]:
    counts: dict[tuple[str, str], int] = {}
    chosen: list[tuple[PromptRecord, list[int]]] = []
    for prompt in (prompt for path in stage.prompts for prompt in read_prompts(path) if prompt.split != "train"):
        group = prompt.split, prompt.kind
        ids = prompt_ids(prompt, tokenizer)
        if len(ids) <= stage.max_prompt_tokens and counts.get(group, 0) < stage.max_prompts:
            counts[group] = counts.get(group, 0) + 1
            chosen.append((prompt, ids))
    if not chosen:
        raise ConfigError("--prompts: there are no held-out or hand-written prompts that are short enough")
    return chosen


def _measure(
    stage: EndToEndStage, method: str, folder: str, prompts: Sequence[tuple[PromptRecord, list[int]]]
) -> list[dict[str, Any]]:
    config: Mapping[str, object] | None = None
    if method != _NONE:
        config = {"method": method, "num_speculative_tokens": max(stage.ks), "policy": "fixed"}
        config |= {"model": folder} if folder else {}
    options: dict[str, Any] = {}
    if stage.kv_cache_memory_bytes is not None:
        options["kv_cache_memory_bytes"] = stage.kv_cache_memory_bytes
    entries: list[dict[str, Any]] = []
    with LLM(
        stage.model,
        device=stage.device,
        dtype=stage.dtype,
        compile=stage.compile,
        max_num_seqs=stage.max_num_seqs,
        max_model_len=stage.max_prompt_tokens + stage.max_tokens,
        speculative_config=config,
        **options,
    ) as llm:
        _generate(llm, stage, prompts[: stage.max_num_seqs], 0.0, None)  # what is slow the first time
        for k in stage.ks if method != _NONE else (0,):
            for temperature in stage.temperatures:
                started_s = time.monotonic()
                outputs = _generate(llm, stage, prompts, temperature, k)
                seconds = time.monotonic() - started_s
                rate = sum(len(output.token_ids) for output in outputs) / seconds
                logger.info("%s, k = %d, temperature %g: %.0f tokens/s", method, k, temperature, rate)
                measures = Measures()
                for (prompt, _), output in zip(prompts, outputs, strict=True):
                    count(measures, method, prompt, output, temperature, k)
                entries += [entry | {"tokens_per_s": round(rate, 1)} for entry in measures.entries()]
    return entries


def _generate(
    llm: LLM,
    stage: EndToEndStage,
    prompts: Sequence[tuple[PromptRecord, list[int]]],
    temperature: float,
    k: int | None,
) -> list[CompletionOutput]:
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for _, ids in prompts],
        SamplingParams(temperature=temperature, max_tokens=stage.max_tokens, seed=stage.seed),
        speculation=SpeculationOptions(num_speculative_tokens=k or None),
    )
    return [output.outputs[0] for output in outputs]


def count(
    measures: Measures, method: str, prompt: PromptRecord, output: CompletionOutput, temperature: float, k: int
) -> None:
    """Count the steps of an answer behind its first token, those without drafts among them."""
    histogram = output.speculation.acceptance_histogram
    num_accepted = output.speculation.num_accepted_draft_tokens
    num_steps = len(output.token_ids) - 1 - num_accepted
    num_without = max(0, num_steps - output.speculation.num_spec_steps)
    is_varied = repeated_share(output.token_ids) <= MOST_REPEATED
    drafts = "greedy" if temperature == 0 or method in ("ngram", "suffix", _NONE) else "drawn"
    for kind in (prompt.kind, ALL_KINDS):
        for is_low_repetition in (False, True) if is_varied else (False,):
            line = Line(HOW, method, prompt.split, kind, temperature, drafts, is_low_repetition, k)
            tally = measures.of(line)
            tally.num_texts += 1
            tally.add(0, num_without)
            for num_kept, times in enumerate(histogram):
                tally.add(num_kept, times)
