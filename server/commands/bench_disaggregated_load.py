"""What `outrider bench disaggregated` sends."""

import argparse
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import count, takewhile
from typing import Any, Self

from clients.mixed_load import Arrival
from clients.workload import Prompt, poisson_arrivals, random_prompts
from server.errors import ConfigError

PARTS = ("frontier", "ttft", "transfer")
CONNECTORS = ("filesystem", "tcp", "lmcache", "nixl", "memory")
TURNS: Mapping[str, int] = {"frontier": 1, "ttft": 3, "transfer": 9}
"""How many of each part count, if nothing else is asked for."""
QUICK_TURNS: Mapping[str, int] = {"frontier": 1, "ttft": 1, "transfer": 6}
"""The same of a quick run."""
MAX_BLOCKS = 512
"""In a pass of a transfer: what small blocks cost shows in few of them, and a store may take milliseconds for each."""
PEERS = ("tcp", "nixl")
"""Those that read KV from the node that has it, and keep none themselves."""

STREAM, LONG = "stream", "long"
"""Kinds of requests: short prompts whose tokens are read as they come, and the long prompts of bursts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The arguments, see their help.

    Attributes: turns: how many of each part count.
    """

    budgets: tuple[int, ...]
    rates: tuple[float, ...]
    burst_size: int
    prompt_len: int
    output_len: int
    stream_rate: float
    stream_input_len: int
    stream_output_len: int
    duration: float
    turns: Mapping[str, int]
    hop_connector: str
    block_kib: tuple[int, ...]
    mib: int
    seed: int

    @classmethod
    def of(cls, args: argparse.Namespace) -> Self:
        """From parsed arguments of the same names. Raises: ConfigError if a rate is so low that no burst comes."""
        values: dict[str, Any] = {name: getattr(args, name) for field in fields(cls) if (name := field.name) != "turns"}
        turns = QUICK_TURNS if args.quick else TURNS
        values["turns"] = turns if args.repeat is None else dict.fromkeys(PARTS, args.repeat)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        load = cls(**(values | lists))
        for rate in load.rates:
            if load.burst_size / rate / 2 >= load.duration:
                raise ConfigError(
                    f"--rates: at {rate:g} prompts/s in bursts of {load.burst_size} the first one comes after "
                    f"{load.burst_size / rate / 2:g} s, and --duration is {load.duration:g} s"
                )
        return load

    def check_lengths(self, max_model_len: int) -> None:
        """Raises: ConfigError for what the model does not take."""
        num_tokens = max(self.prompt_len + self.output_len, self.stream_input_len + self.stream_output_len)
        if num_tokens > max_model_len:
            raise ConfigError(
                f"--prompt-len + --output-len, or those of streams, is {num_tokens} tokens, "
                f"and the model takes {max_model_len}"
            )


def arrivals(load: Load, rate: float, vocab_size: int, seed: int) -> Sequence[Arrival]:
    """Streams at random times, and bursts of long prompts at even ones.

    Args: rate: of long prompts, per second. seed: of the streams; its successor is that of the long prompts.
    """
    streams = random_prompts(
        input_len=load.stream_input_len,
        output_len=load.stream_output_len,
        prefix_len=0,
        vocab_size=vocab_size,
        seed=seed,
    )
    prompts = random_prompts(
        input_len=load.prompt_len, output_len=load.output_len, prefix_len=0, vocab_size=vocab_size, seed=seed + 1
    )
    period_s = load.burst_size / rate
    bursts = ((index // load.burst_size + 0.5) * period_s for index in count())
    return list(
        heapq.merge(
            _before(load.duration, STREAM, poisson_arrivals(load.stream_rate, seed=seed), streams),
            _before(load.duration, LONG, bursts, prompts),
            key=lambda arrival: arrival.at_s,
        )
    )


def _before(end_s: float, kind: str, times: Iterable[float], prompts: Iterable[Prompt]) -> Iterator[Arrival]:
    for at_s, prompt in zip(takewhile(lambda at_s: at_s < end_s, times), prompts, strict=False):
        yield Arrival(at_s, kind, prompt)
