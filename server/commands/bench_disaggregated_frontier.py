"""One node with each token budget, and two nodes that share the work, under the same load on the same cores."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import islice

from clients.aio import AsyncClient
from clients.bench import Generating
from clients.disaggregated import DEFAULT_MIN_PROMPT_TOKENS, DisaggregatedClient
from clients.mixed_load import Arrival, MixedResult, run_arrivals
from clients.workload import random_prompts
from protos.outrider.v1 import inference_pb2 as pb
from server.commands.bench_disaggregated_connectors import Setup
from server.commands.bench_disaggregated_cores import Cores
from server.commands.bench_disaggregated_load import LONG, STREAM, Load, arrivals
from server.commands.bench_disaggregated_node import HANG_TIMEOUT_S, NO_RETRY, BlockShape, Starter
from server.errors import ConfigError, OutriderError

SHARED = "1 prefill + 1 decode"
_NUM_SEEDS = 2
"""That the warm-up takes, and each load in each turn: one of streams, one of long prompts."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A set-up under one load.

    Attributes:
        loaded_share: of two nodes, how much of the KV of long prompts' full blocks came to the decode node; the rest
            was computed there. None of one node.
    """

    result: MixedResult
    loaded_share: float | None


Results = dict[float, dict[str, list[Turn]]]
"""By long prompts per second, and by set-up."""


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


def no_results(load: Load) -> Results:
    """Every load and set-up, without turns yet."""
    return {rate: {name: [] for name in candidate_names(load)} for rate in load.rates}


async def measure_frontier(
    starter: Starter,
    load: Load,
    cores: Cores,
    setup: Setup,
    blocks: BlockShape,
    say: Callable[[str], None],
    found: Results,
) -> None:
    """Every set-up once in each turn, another one first each time, so that what drifts hits all alike.

    Each starts anew for its turn, and nobody else is running meanwhile. What it is sent depends on turn and rate alone.
    Its cache has room for as many long prompts as the warm-up has, so that all of it has been used before: the first
    use of memory costs as much as to move the block there, or more, and would be taken for the connector's.

    Args:
        setup: the connector between the two nodes. say: called with what is measured next.
        found: as of `no_results`; turns are added as they end.
    Raises: ConfigError; OutriderError if a server does not start, or a request of the warm-up fails.
    """
    candidates = _candidates(load)
    room = blocks.room_for(_num_warm(load), load.prompt_len)
    for turn in range(load.turns["frontier"]):
        first = turn % len(candidates)
        for candidate in (*candidates[first:], *candidates[:first]):
            say(f"turn {turn + 1} of {load.turns['frontier']}, {candidate.name}")
            async with _running(starter, load, cores, setup, candidate, room) as nodes:
                await _warm_up(nodes, load, candidate)
                for place, rate in enumerate(load.rates):
                    seed = load.seed + _NUM_SEEDS * (1 + turn * len(load.rates) + place)
                    sent = arrivals(load, rate, nodes.info.vocab_size, seed)
                    num_loaded = await nodes.num_loaded_tokens()
                    result = await run_arrivals(nodes.client, sent)
                    check(result, f"{candidate.name} at {rate:g} prompts/s")
                    share = None
                    if nodes.decode is not None:
                        share = (await nodes.num_loaded_tokens() - num_loaded) / _loadable(nodes, load, result)
                    found[rate][candidate.name].append(Turn(result, share))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """A set-up that runs.

    Attributes: decode: a client of the decode node alone; None if there is none.
    """

    client: Generating
    info: pb.GetModelInfoResponse
    decode: AsyncClient | None = None

    async def num_loaded_tokens(self) -> int:
        """Tokens whose KV came to the decode node so far."""
        return 0 if self.decode is None else (await self.decode.stats()).external_loaded_tokens


def _loadable(nodes: _Nodes, load: Load, result: MixedResult) -> int:
    """Tokens in full blocks of the long prompts that were answered; at least one block."""
    num_blocks = load.prompt_len // nodes.info.block_size
    return max(1, result.by_kind[LONG].num_completed * num_blocks) * nodes.info.block_size


@asynccontextmanager
async def _running(
    starter: Starter, load: Load, cores: Cores, setup: Setup, candidate: _Candidate, room: int
) -> AsyncIterator[_Nodes]:
    """The servers of a set-up, with so many bytes of KV cache each, and their client."""
    memory = {"kv_cache_memory_bytes": room}
    async with AsyncExitStack() as stack:
        if candidate.budget is not None:
            node = await stack.enter_async_context(
                starter.running(candidate.name, cores.both, max_num_batched_tokens=candidate.budget, **memory)
            )
            load.check_lengths(node.info.max_model_len)
            yield _Nodes(await stack.enter_async_context(AsyncClient(node.target, retry=NO_RETRY)), node.info)
            return
        prefill, decode = await stack.enter_async_context(
            starter.pair(cores.prefill, cores.decode, kv_transfer_config=setup.choice, **memory)
        )
        load.check_lengths(decode.info.max_model_len)
        client = DisaggregatedClient(
            prefill=[prefill.target],
            decode=[decode.target],
            min_prompt_tokens=min(load.prompt_len, DEFAULT_MIN_PROMPT_TOKENS),
            remembers_prompts=False,
            retry=NO_RETRY,
            hang_timeout_s=HANG_TIMEOUT_S,
        )
        yield _Nodes(
            await stack.enter_async_context(client),
            decode.info,
            await stack.enter_async_context(AsyncClient(decode.target, retry=NO_RETRY)),
        )


def _num_warm(load: Load) -> int:
    """Long prompts of the warm-up: two bursts of them, and one for the streams."""
    return 2 * load.burst_size + 1


async def _warm_up(nodes: _Nodes, load: Load, candidate: _Candidate) -> None:
    """Connections are made, memory is touched."""
    sent: list[Arrival] = []
    for seed, kind, input_len, output_len, num_prompts in (
        (load.seed, STREAM, load.stream_input_len, load.stream_output_len, 1),
        (load.seed + 1, LONG, load.prompt_len, load.output_len, _num_warm(load)),
    ):
        prompts = random_prompts(
            input_len=input_len,
            output_len=output_len,
            prefix_len=0,
            vocab_size=nodes.info.vocab_size,
            seed=seed,
        )
        sent += [Arrival(0.0, kind, prompt) for prompt in islice(prompts, num_prompts)]
    check(await run_arrivals(nodes.client, sent), f"{candidate.name}, warming up")


def check(result: MixedResult, where: str) -> None:
    """Raises: OutriderError for a kind of request of which none was answered."""
    for kind, measurements in result.by_kind.items():
        if not measurements.num_completed:
            failures = ", ".join(f"{count} x {status}" for status, count in measurements.failures.items())
            raise OutriderError(f"{where}: no {kind} request was answered: {failures}")


def tokens_per_s(result: MixedResult) -> float:
    """Tokens delivered, over the time to the last answer."""
    return sum(each.num_output_tokens for each in result.by_kind.values()) / result.duration_s


def summarised(results: Mapping[str, Sequence[Turn]]) -> Mapping[str, Mapping[str, list[float]]]:
    """Of each set-up that was measured what counts, in turns; times in seconds."""
    return {
        name: {
            "ttft_p50_s": [each.result.by_kind[LONG].ttft.quantile(0.5) for each in found],
            "ttft_p95_s": [each.result.by_kind[LONG].ttft.quantile(0.95) for each in found],
            "stream_ttft_p50_s": [each.result.by_kind[STREAM].ttft.quantile(0.5) for each in found],
            "gap_p50_s": [each.result.by_kind[STREAM].token_gap.quantile(0.5) for each in found],
            "gap_p99_s": [each.result.by_kind[STREAM].token_gap.quantile(0.99) for each in found],
            "second_token_p50_s": [each.result.by_kind[LONG].second_gap.quantile(0.5) for each in found],
            "tokens_per_s": [tokens_per_s(each.result) for each in found],
        }
        for name, found in results.items()
        if found
    }
