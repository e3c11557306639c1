"""Rounds of `outrider bench engine`: a batch goes through the engine, and its tokens are timed."""

import asyncio
import dataclasses
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from clients.workload import Prompt
from server.compose import Core
from server.engine.protocol import Finished
from server.preprocess import TokensPrompt
from server.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Round:
    """One batch, from its submission to its last token; times in seconds.

    Attributes:
        ttft_s: to the latest first token: all prompts are computed then.
        decode_s: from there to the last token.
        num_steps: that the slowest sequence took for it; with speculation fewer than its tokens.
        num_tokens: generated in total.
        num_drafts, num_accepted: draft tokens verified, and those that were right.
        num_draft_rows: verifications of a sequence's drafts.
    """

    ttft_s: float
    decode_s: float
    num_steps: int
    num_tokens: int
    num_drafts: int
    num_accepted: int
    num_draft_rows: int = 0

    @classmethod
    def of(cls, finished: Sequence[Finished]) -> "Round":
        """From how each sequence ended; all were submitted at the same time."""
        first_s = max(end.timing.ttft_s for end in finished)
        return cls(
            ttft_s=first_s,
            decode_s=max(end.timing.ttft_s + end.timing.decode_s for end in finished) - first_s,
            num_steps=max(
                end.num_completion_tokens - 1 - end.speculation.num_accepted_draft_tokens for end in finished
            ),
            num_tokens=sum(end.num_completion_tokens for end in finished),
            num_drafts=sum(end.speculation.num_draft_tokens for end in finished),
            num_accepted=sum(end.speculation.num_accepted_draft_tokens for end in finished),
            num_draft_rows=sum(end.speculation.num_spec_steps for end in finished),
        )


@dataclass(frozen=True, slots=True)
class Row:
    """The rounds of one batch size, and the bound that the device's memory sets.

    Attributes:
        floor_s: the time of a step that reads its weights and KV at the copy's bandwidth and does nothing else.
    """

    batch: int
    input_len: int
    rounds: Sequence[Round]
    floor_s: float

    def report(self) -> dict[str, object]:
        """Medians over the rounds and their spread as JSON values; null where one token is all that was generated."""
        ttfts_s = [each.ttft_s for each in self.rounds]
        report: dict[str, object] = {
            "batch": self.batch,
            "ttft_ms": _summary([1e3 * ttft_s for ttft_s in ttfts_s]),
            "prefill_tokens_per_s": statistics.median(self.batch * self.input_len / ttft_s for ttft_s in ttfts_s),
            "step_ms": None,
            "tokens_per_s": None,
            "tokens_per_step": None,
            "acceptance_rate": None,
            "floor_ms": 1e3 * self.floor_s,
            "step_per_floor": None,
        }
        if all(each.num_steps for each in self.rounds):
            steps_s = [each.decode_s / each.num_steps for each in self.rounds]
            decoded = [each.num_tokens - self.batch for each in self.rounds]
            report |= {
                "step_ms": _summary([1e3 * step_s for step_s in steps_s]),
                "tokens_per_s": statistics.median(
                    tokens / each.decode_s for tokens, each in zip(decoded, self.rounds, strict=True)
                ),
                "tokens_per_step": sum(decoded)
                / sum(tokens - each.num_accepted for tokens, each in zip(decoded, self.rounds, strict=True)),
                "step_per_floor": statistics.median(steps_s) / self.floor_s,
            }
        if num_drafts := sum(each.num_drafts for each in self.rounds):
            report["acceptance_rate"] = sum(each.num_accepted for each in self.rounds) / num_drafts
        return report


def _summary(values: Sequence[float]) -> dict[str, object]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


class Bench:
    """Sends batches to a started engine; no prompt is sent twice, so that no prefix is found in the cache."""

    def __init__(self, core: Core, prompts: Iterator[Prompt]) -> None:
        """Args: prompts: endless; their token ids, and how many tokens to generate."""
        self._core = core
        self._prompts = prompts
        self._ids = itertools.count()

    async def measure(self, batch: int) -> Round:
        """Generate for `batch` prompts at once, greedily, to the length that each prompt wants."""
        requests = [self._request(prompt) for prompt in itertools.islice(self._prompts, batch)]
        now_s = self._core.engine.now()
        async with asyncio.TaskGroup() as tasks:
            arrived = [dataclasses.replace(each, arrival_s=now_s) for each in requests]
            running = [tasks.create_task(run_to_end(self._core, each)) for each in arrived]
        return Round.of([task.result() for task in running])

    def _request(self, prompt: Prompt) -> Request:
        assert prompt.token_ids is not None
        return self._core.preprocessor.build(
            TokensPrompt(prompt.token_ids),
            SamplingParams(temperature=0, max_tokens=prompt.max_tokens, ignore_eos=True),
            request_id=f"bench-{next(self._ids)}",
        )


async def run_to_end(core: Core, request: Request) -> Finished:
    """Run a request of one choice, which ends early if the task does. Returns: how it has finished."""
    engine = core.engine
    stream = engine.open(request.request_id)
    try:
        engine.submit(stream, request)
        async for _ in stream:
            pass
    finally:
        engine.abort(request.request_id)
    return stream.finished[0]
