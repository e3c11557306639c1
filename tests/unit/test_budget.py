"""How a step's tokens are shared out."""

from typing import Any

import pytest

from server.config import SchedulerConfig
from server.kv.prefix_cache import BlockHashes
from server.scheduler.budget import TokenBudget
from server.scheduler.sequence import InFlight, Sequence
from tests.fakes.core import make_request

MOST = 5


def sequence(
    seq_id: int, *, num_prompt: int = 10, num_computed: int = 0, max_tokens: int = 20, **state: Any
) -> Sequence:
    """A sequence that has computed so much of a prompt."""
    request = make_request(f"r{seq_id}", range(num_prompt), max_tokens=max_tokens)
    made = Sequence(
        seq_id=seq_id,
        request=request,
        choice=0,
        order=(0.0, seq_id),
        hashes=BlockHashes(b"", 4),
        num_speculative_tokens=MOST,
        key=0,
        token_ids=list(request.prompt_token_ids),
        num_computed=num_computed,
    )
    for name, value in state.items():
        setattr(made, name, value)
    return made


def decoding(seq_id: int, **state: Any) -> Sequence:
    return sequence(seq_id, num_computed=9, **state)


def budget(running: list[Sequence], *, has_waiting: bool = False, **config: Any) -> TokenBudget:
    values = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_num_partial_prefills": 1, **config}
    return TokenBudget(SchedulerConfig(**values), running, has_waiting=has_waiting)


def spend(tokens: TokenBudget, sequences: list[Sequence]) -> list[tuple[int, int, bool] | None]:
    rows: list[tuple[int, int, bool] | None] = []
    for one in sequences:
        row = tokens.offer(one, MOST)
        if row is not None:
            tokens.take(row)
        rows.append(None if row is None else (row.num_query, row.num_drafts, row.is_sampling))
    return rows


def test_later_decodes_are_sure_of_a_token_whatever_the_prompt_before_them() -> None:
    running = [sequence(0, num_prompt=100), decoding(1), decoding(2)]
    assert spend(budget(running, max_num_batched_tokens=4), running) == [(2, 0, False), (1, 0, True), (1, 0, True)]


def test_decodes_are_sure_of_a_token_whatever_the_drafts_before_them() -> None:
    running = [decoding(i, num_next_drafts=5) for i in range(3)]
    assert spend(budget(running, max_num_batched_tokens=6), running) == [(4, 3, True), (1, 0, True), (1, 0, True)]


@pytest.mark.parametrize("has_waiting", [False, True])
def test_drafts_leave_half_of_the_spare_tokens_to_prompts(has_waiting: bool) -> None:
    running = [decoding(i, num_next_drafts=5) for i in range(2)]
    rows = spend(budget(running, has_waiting=has_waiting, max_num_batched_tokens=10), running)
    assert rows == ([(5, 4, True), (1, 0, True)] if has_waiting else [(6, 5, True), (4, 3, True)])


def test_a_prompt_that_fits_is_not_partial() -> None:
    running = [sequence(0, num_prompt=10), sequence(1, num_prompt=4), sequence(2, num_prompt=9), sequence(3)]
    rows = spend(budget(running, max_num_batched_tokens=18), running)
    assert rows == [(10, 0, True), (4, 0, True), (4, 0, False), None]


def test_only_so_many_prompts_are_partial_at_a_time() -> None:
    running = [sequence(i, num_prompt=10) for i in range(3)]
    config: dict[str, Any] = {"long_prefill_token_threshold": 4, "max_num_batched_tokens": 100}
    assert spend(budget(running, max_num_partial_prefills=2, **config), running) == [(4, 0, False), (4, 0, False), None]
    short = [sequence(0, num_prompt=10), sequence(1, num_prompt=3)]
    assert spend(budget(short, **config), short) == [(4, 0, False), (3, 0, True)]


@pytest.mark.parametrize(("max_tokens", "num_drafts"), [(1, 0), (2, 1), (4, 3), (9, 5)])
def test_no_draft_beyond_the_last_token(max_tokens: int, num_drafts: int) -> None:
    """An accepted run ends with a token of the target's own."""
    running = [decoding(0, max_tokens=max_tokens, num_next_drafts=5)]
    assert spend(budget(running), running) == [(1 + num_drafts, num_drafts, True)]


def test_in_flight_the_device_may_hold_as_many_drafts_as_it_can() -> None:
    one = decoding(0, num_next_drafts=1)
    assert spend(budget([one]), [one]) == [(2, 1, True)]
    one.launch(InFlight(num_query=2, num_drafts=1, is_sampling=True))
    assert (one.tokens_lower, one.tokens_upper, one.computed_upper) == (11, 12, 11)
    assert spend(budget([one]), [one]) == [(6, 5, True)]


def test_nothing_is_offered_behind_the_row_that_ends_it() -> None:
    one = decoding(0, max_tokens=1)
    one.launch(InFlight(num_query=1, num_drafts=0, is_sampling=True))
    assert budget([one]).offer(one, MOST) is None


def test_chunks_in_flight_count_as_computed() -> None:
    one = sequence(0, num_prompt=10, num_computed=2)
    one.launch(InFlight(num_query=5, num_drafts=0, is_sampling=False))
    assert spend(budget([one]), [one]) == [(3, 0, True)]


def test_a_preempted_sequence_leaves_its_token_to_others() -> None:
    running = [decoding(0), decoding(1), sequence(2, num_prompt=100)]
    tokens = budget(running, max_num_batched_tokens=2)
    assert spend(tokens, running[:1]) == [(1, 0, True)]
    assert tokens.offer_prompt(1) is None
    tokens.forgo(running[2])
    assert tokens.offer_prompt(1) is None, "it was sure of nothing"
    tokens.forgo(running[1])
    assert tokens.offer_prompt(1) == InFlight(1, 0, is_sampling=True)


def test_admission_needs_room_for_a_chunk() -> None:
    running = [decoding(i) for i in range(4)]
    assert budget(running, max_num_batched_tokens=4).offer_prompt(1) is None
    assert budget(running, max_num_batched_tokens=5).offer_prompt(1) == InFlight(1, 0, is_sampling=True)
    assert budget(running, max_num_batched_tokens=5).offer_prompt(100) == InFlight(1, 0, is_sampling=False)


def test_who_is_drafted_for_on_the_host_waits_until_its_step_has_settled() -> None:
    on_host, on_device = decoding(0, drafts_on_host=True, num_next_drafts=3), decoding(1, num_next_drafts=3)
    for each in (on_host, on_device):
        assert spend(budget([each]), [each]) == [(4, 3, True)]
        each.launch(InFlight(4, 3, is_sampling=True))
    assert spend(budget([on_host, on_device]), [on_host, on_device]) == [None, (6, 5, True)]
