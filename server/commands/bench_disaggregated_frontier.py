"""One node with each token budget, and two nodes that share the work, under the same load on the same cores."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from clients.aio import AsyncClient
from clients.bench import Generating
from clients.disaggregated import DEFAULT_MIN_PROMPT_TOKENS, DisaggregatedClient
from clients.mixed_load import Arrival, MixedResult, run_arrivals
from clients.workload import random_prompts
from server.commands.bench_disaggregated_connectors import Setup
from server.commands.bench_disaggregated_cores import Cores
from server.commands.bench_disaggregated_load import LONG, STREAM, Load, arrivals
from server.commands.bench_disaggregated_node import NO_RETRY, Starter
from server.errors import ConfigError, OutriderError

SHARED = "1 prefill + 1 decode"
_WARM_UP_SEED = -1

Results = dict[float, dict[str, list[MixedResult]]]
"""By long prompts per second, and by set-up: one of each turn."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A set-up. Attributes: budget: of one node; None for two nodes."""

    budget: int | None

    @property
    def name(self) -> str:
        return SHARED if self.budget is None else f"budget {self.budget}"


def candidate_names(load: Load) -> list[str]:
    """All set-ups, as reports and tables have them, that of two nodes last."""
    return [candidate.name for candidate in _candidates(load)]


def _candidates(load: Load) -> list[_Candidate]:
    return [*(_Candidate(budget) for budget in sorted(set(load.budgets))), _Candidate(None)]


def check_budgets(load: Load, max_num_seqs: int) -> None:
    """Raises: ConfigError for a budget that no server takes, which is better known before the run than after."""
    if min(load.budgets) < max_num_seqs:
        raise ConfigError(
            f"--budgets: {min(load.budgets)} is less than --max-num-seqs, {max_num_seqs}: "
            "each running sequence needs a token per step"
        )


async def measure_frontier(
    starter: Starter, load: Load, cores: Cores, setup: Setup, say: Callable[[str], None]
) -> Results:
    """Every set-up once in each turn, another one first each time, so that what drifts hits all alike.

    Each starts anew for its turn, and nobody else is running meanwhile. What it is sent depends on turn and rate alone.

    Args: setup: the connector between the two nodes. say: called with what is measured next.
    Raises: ConfigError; OutriderError if a server does not start, or a request of the warm-up fails.
    """
    found: Results = {rate: {name: [] for name in candidate_names(load)} for rate in load.rates}
    candidates = _candidates(load)
    for turn in range(load.repeat):
        first = turn % len(candidates)
        for candidate in (*candidates[first:], *candidates[:first]):
            say(f"turn {turn + 1} of {load.repeat}, {candidate.name}")
            async with _running(starter, load, cores, setup, candidate) as (client, vocab_size):
                await _warm_up(client, load, vocab_size, candidate)
                for place, rate in enumerate(load.rates):
                    seed = load.seed + 2 * (turn * len(load.rates) + place)
                    sent = arrivals(load, rate, vocab_size, seed)
                    result = await run_arrivals(client, sent)
                    check(result, f"{candidate.name} at {rate:g} prompts/s")
                    found[rate][candidate.name].append(result)
    return found


@asynccontextmanager
async def _running(
    starter: Starter, load: Load, cores: Cores, setup: Setup, candidate: _Candidate
) -> AsyncIterator[tuple[Generating, int]]:
    """A client of the set-up, and the model's number of token ids."""
    async with AsyncExitStack() as stack:
        if candidate.budget is not None:
            node = await stack.enter_async_context(
                starter.running(candidate.name, cores.both, max_num_batched_tokens=candidate.budget)
            )
            load.check_lengths(node.info.max_model_len)
            yield await stack.enter_async_context(AsyncClient(node.target, retry=NO_RETRY)), node.info.vocab_size
            return
        prefill, decode = [
            await stack.enter_async_context(starter.running(role, own, role=role, kv_transfer_config=setup.choice))
            for role, own in (("prefill", cores.prefill), ("decode", cores.decode))
        ]
        load.check_lengths(decode.info.max_model_len)
        client = DisaggregatedClient(
            prefill=[prefill.target],
            decode=[decode.target],
            min_prompt_tokens=min(load.prompt_len, DEFAULT_MIN_PROMPT_TOKENS),
            remembers_prompts=False,
            retry=NO_RETRY,
        )
        yield await stack.enter_async_context(client), decode.info.vocab_size


async def _warm_up(client: Generating, load: Load, vocab_size: int, candidate: _Candidate) -> None:
    """One request of each kind: connections are made, memory is touched."""
    sent: list[Arrival] = []
    for kind, input_len, output_len in (
        (LONG, load.prompt_len, load.output_len),
        (STREAM, load.stream_input_len, load.stream_output_len),
    ):
        prompts = random_prompts(
            input_len=input_len, output_len=output_len, prefix_len=0, vocab_size=vocab_size, seed=_WARM_UP_SEED
        )
        sent.append(Arrival(0.0, kind, next(prompts)))
    check(await run_arrivals(client, sent), f"{candidate.name}, warming up")


def check(result: MixedResult, where: str) -> None:
    """Raises: OutriderError for a kind of request of which none was answered."""
    for kind, measurements in result.by_kind.items():
        if not measurements.num_completed:
            failures = ", ".join(f"{count} x {status}" for status, count in measurements.failures.items())
            raise OutriderError(f"{where}: no {kind} request was answered: {failures}")


def tokens_per_s(result: MixedResult) -> float:
    """Tokens delivered, over the time to the last answer."""
    return sum(each.num_output_tokens for each in result.by_kind.values()) / result.duration_s


def summarised(results: Mapping[str, Sequence[MixedResult]]) -> Mapping[str, Mapping[str, list[float]]]:
    """Of each set-up what counts, in turns; times in seconds."""
    return {
        name: {
            "ttft_p50_s": [each.by_kind[LONG].ttft.quantile(0.5) for each in found],
            "ttft_p95_s": [each.by_kind[LONG].ttft.quantile(0.95) for each in found],
            "stream_ttft_p50_s": [each.by_kind[STREAM].ttft.quantile(0.5) for each in found],
            "gap_p50_s": [each.by_kind[STREAM].token_gap.quantile(0.5) for each in found],
            "gap_p99_s": [each.by_kind[STREAM].token_gap.quantile(0.99) for each in found],
            "second_token_p50_s": [each.by_kind[LONG].second_gap.quantile(0.5) for each in found],
            "tokens_per_s": [tokens_per_s(each) for each in found],
        }
        for name, found in results.items()
    }
