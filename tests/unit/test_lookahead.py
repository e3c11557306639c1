"""Blocks for what drafting writes: one for the newest token always, more of them where nobody goes short."""

import pytest

from tests.fakes.core import Core, make_core, make_request
from tests.fakes.executor import reference

BLOCK = 4
K = 6


def core(num_blocks: int, max_num_seqs: int = 4) -> Core:
    return make_core(
        block_size=BLOCK, num_blocks=num_blocks, max_drafts=K, num_lookahead_tokens=K, max_num_seqs=max_num_seqs
    )


def num_blocks_of_first(made: Core) -> int:
    return len(made.scheduler._batch.sequences[0].block_ids)


@pytest.mark.parametrize(("num_prompt", "expected"), [(1, 2), (2, 2), (3, 3), (4, 3), (7, 4)])
def test_a_prompt_s_first_drafts_have_blocks(num_prompt: int, expected: int) -> None:
    """The newest token comes behind the prompt, and all drafts but the last behind that."""
    made = core(16)
    made.scheduler.add(make_request("a", range(num_prompt), max_tokens=20))
    made.scheduler.schedule()
    assert num_blocks_of_first(made) == expected == -(-(num_prompt + K) // BLOCK)


def test_a_chunk_looks_no_further_than_its_prompt() -> None:
    made = make_core(
        block_size=BLOCK, num_blocks=16, max_drafts=K, num_lookahead_tokens=K, max_num_batched_tokens=8, max_num_seqs=1
    )
    made.scheduler.add(make_request("a", range(12), max_tokens=20))
    made.step()
    assert num_blocks_of_first(made) == 4
    made.step()
    assert num_blocks_of_first(made) == 5


def test_nothing_is_looked_ahead_of_the_end() -> None:
    made = core(16)
    made.scheduler.add(make_request("a", range(6), max_tokens=2))
    made.scheduler.schedule()
    assert num_blocks_of_first(made) == 2


@pytest.mark.parametrize(("num_prompt", "num_waiting"), [(3, 0), (4, 1)])
def test_a_prompt_waits_for_the_block_of_its_newest_token(num_prompt: int, num_waiting: int) -> None:
    made = core(3)
    made.scheduler.add(make_request("a", range(4), max_tokens=4))
    made.step()
    assert num_blocks_of_first(made) == 2
    made.scheduler.add(make_request("b", range(10, 10 + num_prompt), max_tokens=4))
    made.step()
    assert made.scheduler.statistics().num_waiting == num_waiting


@pytest.mark.parametrize(("num_blocks", "expected"), [(4, 2), (5, 4)])
def test_drafts_have_blocks_where_one_is_left_for_each_sequence(num_blocks: int, expected: int) -> None:
    made = core(num_blocks)
    made.scheduler.add(make_request("a", range(7), max_tokens=9))
    made.scheduler.schedule()
    assert num_blocks_of_first(made) == expected


def test_nobody_is_preempted_for_a_guess() -> None:
    """Two sequences that fit to their ends, which come sooner than the scheduler knows, but not with all drafts."""
    made = core(7, max_num_seqs=2)
    for first, name in ((0, "a"), (10, "b")):
        prompt = range(first, first + 7)
        made.scheduler.add(make_request(name, prompt, max_tokens=21, stop_token_ids=(fourth_token(prompt),)))
    made.run()
    assert made.scheduler.counters.num_preemptions == 0


def fourth_token(prompt: range) -> int:
    tokens, _ = reference(make_request("", prompt, max_tokens=4), 0)
    assert tokens.index(tokens[3]) == 3
    return tokens[3]
