"""Prompts and arrival times of a benchmark."""

import math
from itertools import islice, pairwise
from pathlib import Path

import pytest

from clients.workload import Prompt, WorkloadError, poisson_arrivals, random_prompts, read_prompts


def test_random_prompts_share_their_prefix_and_repeat_with_the_seed() -> None:
    def make(seed: int) -> list[Prompt]:
        prompts = random_prompts(input_len=8, output_len=5, prefix_len=4, vocab_size=50, seed=seed)
        return list(islice(prompts, 20))

    prompts = make(1)
    ids = [prompt.token_ids or () for prompt in prompts]
    assert {len(i) for i in ids} == {12}
    assert len({i[:4] for i in ids}) == 1
    assert len({i[4:] for i in ids}) == 20
    assert all(0 <= token_id < 50 for i in ids for token_id in i)
    assert {prompt.max_tokens for prompt in prompts} == {5}
    assert prompts == make(1)
    assert prompts != make(2)


def test_lines_are_prompts_over_and_over(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("first\n\n  second \nдругой\n", encoding="utf-8")
    prompts = list(islice(read_prompts(file, output_len=9), 4))
    assert [prompt.text for prompt in prompts] == ["first", "  second ", "другой", "first"]
    assert {prompt.max_tokens for prompt in prompts} == {9}


def test_json_lines_carry_ids_and_lengths(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 3}\n{"prompt_token_ids": [1, 2]}\n', encoding="utf-8")
    assert list(islice(read_prompts(file, output_len=9), 2)) == [
        Prompt(text="a", max_tokens=3),
        Prompt(token_ids=(1, 2), max_tokens=9),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", "\n\n", "has no prompts"),
        ("p.txt", b"\xff", "cannot read"),
        ("p.jsonl", '{"prompt": "a"}\nnonsense\n', "p.jsonl:2: not JSON"),
        ("p.jsonl", "[1]\n", "p.jsonl:1: must be an object"),
        ("p.jsonl", '{"prompt": "a", "prompt_token_ids": [1]}\n', "either"),
        ("p.jsonl", '{"prompt": 5}\n', "must be text"),
        ("p.jsonl", '{"prompt_token_ids": ["a"]}\n', "list of integers"),
        ("p.jsonl", '{"prompt": "a", "max_tokens": 0}\n', "at least 1"),
    ],
)
def test_a_bad_file_is_named_with_its_line(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(WorkloadError, match=message):
        list(islice(read_prompts(file, output_len=9), 5))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"cannot read .*absent\.txt"):
        next(read_prompts(tmp_path / "absent.txt", output_len=9))


def test_poisson_arrivals_have_the_rate_and_the_spread_of_independent_times() -> None:
    times = list(islice(poisson_arrivals(20.0, seed=3), 20_001))
    gaps = [later - earlier for earlier, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert times[0] == 0
    assert mean == pytest.approx(1 / 20, rel=0.03)
    assert deviation == pytest.approx(mean, rel=0.03), "an exponential's deviation is its mean"
    assert times == list(islice(poisson_arrivals(20.0, seed=3), 20_001))


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert set(islice(poisson_arrivals(math.inf, seed=0), 10)) == {0.0}
