"""Who gets blocks: what is in the cache already, and what is left when they run short."""

import pytest

from tests.fakes.core import Core, make_core, make_request, queries
from tests.fakes.executor import reference, token_logprobs

# -- prefix cache ----------------------------------------------------------------------------


def cached(core: Core, request_id: str, choice: int = 0) -> int:
    return next(o.num_cached_tokens for o in core.outputs if (o.request_id, o.choice) == (request_id, choice))


def test_prefix_hits_leave_one_token_to_compute() -> None:
    core = make_core(block_size=4)
    for name, length in (("first", 8), ("same", 8), ("longer", 9), ("shorter", 7)):
        core.scheduler.add(make_request(name, range(length), max_tokens=1))
        core.run()
    assert [cached(core, name) for name in ("first", "same", "longer", "shorter")] == [0, 4, 8, 4]
    statistics = core.scheduler.statistics()
    assert (statistics.prefix_query_tokens, statistics.prefix_hit_tokens) == (32, 16)


def test_generated_tokens_are_hit_too() -> None:
    core = make_core(block_size=4, max_drafts=3)
    first = make_request("first", range(6), max_tokens=7)
    core.scheduler.add(first)
    core.run()
    prompt = (*range(6), *reference(first, 0)[0])
    core.scheduler.add(make_request("second", prompt, max_tokens=1))
    core.run()
    assert cached(core, "second") == 12  # 13 tokens were generated, the last one's KV never was


def test_salts_and_disabled_caching_share_nothing() -> None:
    core = make_core()
    for name, salt in (("plain", ""), ("salted", "x"), ("salted again", "x")):
        core.scheduler.add(make_request(name, range(8), max_tokens=1, cache_salt=salt))
        core.run()
    assert [cached(core, name) for name in ("plain", "salted", "salted again")] == [0, 0, 4]

    core = make_core(enable_prefix_caching=False)
    for _ in range(2):  # even an id that comes again is another request
        core.scheduler.add(make_request("again", range(8), max_tokens=1))
        core.run()
    assert {output.num_cached_tokens for output in core.outputs} == {0}


def test_a_beginning_that_is_being_computed_is_computed_once() -> None:
    """Whoever shares it waits for it, chunk by chunk, and computes what is its own; a stranger does not wait."""
    core = make_core(block_size=4, num_blocks=32, max_num_batched_tokens=8)
    for name, prompt in (("first", range(14)), ("same", range(14)), ("alike", (*range(8), 50, 51, 52, 53, 54))):
        core.scheduler.add(make_request(name, prompt, max_tokens=1))
    core.scheduler.add(make_request("stranger", range(40, 43), max_tokens=1))
    assert queries(core.step()) == [(0, 8)]
    core.run()
    assert [cached(core, name) for name in ("first", "same", "alike", "stranger")] == [0, 12, 8, 0]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_choices_share_the_prompt(enable_prefix_caching: bool) -> None:
    core = make_core(block_size=4, num_blocks=16, enable_prefix_caching=enable_prefix_caching)
    request = make_request("a", range(10), max_tokens=5, n=3)
    core.scheduler.add(request)
    assert queries(core.step()) == [(0, 10)]
    assert queries(core.step()) == [(0, 1), (1, 2), (2, 2)]
    shared = [set(sequence.block_ids[:2]) for sequence in core.scheduler._batch.sequences]
    assert shared[0] == shared[1] == shared[2]
    core.run()
    assert [cached(core, "a", choice) for choice in range(3)] == [0, 8, 8]
    assert [core.tokens("a", choice) for choice in range(3)] == [reference(request, c)[0] for c in range(3)]


def test_choices_wait_again_for_a_preempted_first_one() -> None:
    core = make_core(block_size=2, num_blocks=12, max_num_batched_tokens=8)
    core.scheduler.add(make_request("first", range(4), max_tokens=20))
    core.step()
    request = make_request("second", range(100, 116), max_tokens=2, n=2, arrival_s=1.0)
    core.scheduler.add(request)
    core.run()
    assert core.scheduler.counters.num_preemptions > 0
    assert [core.tokens("second", choice) for choice in range(2)] == [reference(request, c)[0] for c in range(2)]


@pytest.mark.parametrize("aborted", [0, 1])
def test_a_choice_may_end_alone(aborted: int) -> None:
    core = make_core(block_size=4)
    request = make_request("a", range(10), max_tokens=5, n=2)
    core.scheduler.add(request)
    core.scheduler.abort("a", aborted)
    core.run()
    assert core.tokens("a", aborted) == []
    assert core.tokens("a", 1 - aborted) == reference(request, 1 - aborted)[0]
    assert core.pool.num_free == core.pool.num_usable


def test_prompt_logprobs_bypass_the_cache_and_come_once() -> None:
    core = make_core(block_size=4, max_num_batched_tokens=5)
    core.scheduler.add(make_request("warm", range(10), max_tokens=1))
    core.run()
    core.scheduler.add(make_request("a", range(10), max_tokens=3, n=2, prompt_logprobs=0))
    core.run()
    assert cached(core, "a") == 0
    entries = [o.prompt_logprobs for o in core.outputs if o.prompt_logprobs]
    assert entries == [tuple(token_logprobs(i, i) for i in range(1, 10))]


# -- memory ----------------------------------------------------------------------------------


def test_preempted_sequences_go_on_where_they_were() -> None:
    core = make_core(block_size=2, num_blocks=10)
    requests = [make_request(name, range(4), max_tokens=12, seed=seed) for seed, name in enumerate("abcd")]
    for request in requests:
        core.scheduler.add(request)
    core.run()
    assert core.scheduler.counters.num_preemptions > 0
    assert [core.tokens(r.request_id) for r in requests] == [reference(r, 0)[0] for r in requests]
    ended = [o.request_id for o in core.outputs if o.finish_reason]
    assert ended[0] == "a", "the first one is never preempted"


def test_nobody_is_preempted_for_drafts() -> None:
    """One block is free, and the drafts of the first would reach into a second one."""
    for seed in range(100):
        core = make_core(block_size=4, num_blocks=3, max_drafts=5, seed=seed)
        for name in ("first", "last"):
            core.scheduler.add(make_request(name, range(len(name) - 2), max_tokens=7))
        core.step()
        if core.scheduler._batch.sequences[0].num_next_drafts == 5:
            break
    plan = core.step()
    assert plan is not None
    assert (len(plan.rows), plan.rows[0].num_query, plan.rows[0].num_drafts) == (2, 5, 4)
    assert core.scheduler.counters.num_preemptions == 0
    core.run()


def test_watermark_keeps_blocks_free_unless_nothing_runs() -> None:
    core = make_core(block_size=4, num_blocks=10, watermark=0.4)
    core.scheduler.add(make_request("big", range(30), max_tokens=1))
    assert queries(core.step()) == [(0, 30)]
    core.run()
    core.scheduler.add(make_request("a", range(100, 120), max_tokens=9))
    core.scheduler.add(make_request("b", range(200, 208), max_tokens=1))
    assert queries(core.step()) == [(1, 20)], "5 of 10 blocks are free and 4 stay so"
    core.run()


def test_request_of_the_whole_pool_runs() -> None:
    core = make_core(block_size=4, num_blocks=4, max_drafts=5)
    request = make_request("a", range(9), max_tokens=7)
    core.scheduler.add(request)
    core.run()
    assert core.tokens("a") == reference(request, 0)[0]
