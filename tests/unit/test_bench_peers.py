"""The arithmetic of paired benchmarks, and their order."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from tests.bench.paired import interleave, median_ratio
from tests.bench.repetition import repeating_text
from tests.bench.sample import Prompts, Sample


class Engine:
    """Notes what it is asked to do; its rounds take `wall_s`."""

    def __init__(self, name: str, log: list[tuple[str, Sequence[int]]], wall_s: float) -> None:
        self.name, self.log, self.wall_s = name, log, wall_s
        self.is_running = False

    @contextmanager
    def running(self) -> Iterator[None]:
        self.is_running = True
        yield
        self.is_running = False

    def measure(self, prompts: Prompts, output_len: int) -> Sample:
        assert self.is_running
        self.log.append((self.name, [*prompts[0], output_len]))
        return Sample(0.1, self.wall_s - 0.1, self.wall_s, output_len * len(prompts), len(prompts))


def sample(**changes: float) -> Sample:
    return Sample(**({"ttft_s": 1.0, "decode_s": 4.0, "wall_s": 6.0, "num_tokens": 90, "num_first": 10} | changes))  # type: ignore[arg-type]


def test_decoding_is_what_comes_after_the_latest_first_token() -> None:
    assert sample().decode_tokens_per_s == 20.0
    assert sample().tokens_per_s == 15.0


def test_the_clients_cpu_time_is_counted_apart() -> None:
    assert sample(client_cpu_s=3.0).tokens_per_s_without_client(num_cpus=2) == 20.0
    assert sample().tokens_per_s_without_client(num_cpus=2) == 15.0


def test_pairs_take_turns_and_see_the_same_fresh_prompts() -> None:
    log: list[tuple[str, Sequence[int]]] = []
    ours, theirs = Engine("ours", log, 1.0), Engine("theirs", log, 2.0)
    numbers = iter(range(100))
    pairs = interleave(ours, theirs, lambda: [[next(numbers)] * 20], output_len=32, num_pairs=3)
    assert [(a.wall_s, b.wall_s) for a, b in pairs] == [(1.0, 2.0)] * 3, "the first pair does not count"
    measured = [(name, prompt[0]) for name, prompt in log if prompt[-1] == 32]
    assert measured == [
        *(("theirs", 0), ("ours", 0), ("ours", 1), ("theirs", 1)),
        *(("theirs", 2), ("ours", 2), ("ours", 3), ("theirs", 3)),
    ]
    assert len(log) == 2 * len(measured), "each is woken before it is measured"


def test_the_interval_is_around_the_median_and_narrows_with_agreement() -> None:
    ratios = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 9.0]
    interval = median_ratio(ratios)
    assert interval.median == 1.4
    assert 1.1 <= interval.low < 1.4 < interval.high <= 1.7, "one outlier does not reach it"
    assert median_ratio(ratios) == interval, "seeded"
    agreed = median_ratio([1.5] * 9)
    assert (agreed.low, agreed.median, agreed.high) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize("num_words", [1, 12, 64])
def test_repeating_text_repeats_and_differs_by_seed(num_words: int) -> None:
    text = repeating_text(3, num_words)
    assert len(text.split()) >= num_words
    lines = text.splitlines()
    assert lines == (lines[:2] * len(lines))[: len(lines)]
    assert repeating_text(4, num_words) != text == repeating_text(3, num_words)
