"""What single requests get from the scheduler, step by step."""

import itertools
from dataclasses import replace

import pytest

from server.engine.protocol import FinishReason
from server.request import SpeculationOptions
from server.scheduler.outputs import Failure
from tests.fakes.core import Core, make_core, make_request, queries
from tests.fakes.executor import reference, token_logprobs


def failures(core: Core) -> list[tuple[str, Failure, str]]:
    return [(o.request_id, o.failure, o.error) for o in core.outputs if o.failure is not None]


# -- budget and chunks -----------------------------------------------------------------------


def test_long_prompt_is_chunked_beside_decodes() -> None:
    core = make_core(max_num_batched_tokens=8, block_size=4, num_blocks=32)
    core.scheduler.add(make_request("short", range(3), max_tokens=9))
    core.step()
    core.scheduler.add(make_request("long", range(20), max_tokens=2))
    assert queries(core.step()) == [(0, 1), (1, 7)]
    assert queries(core.step()) == [(0, 1), (1, 7)]
    assert queries(core.step()) == [(0, 1), (1, 6)]
    core.run()
    assert core.tokens("long") == reference(make_request("long", range(20), max_tokens=2), 0)[0]


def test_threshold_limits_one_prompt_and_partial_prefills_limit_prompts() -> None:
    core = make_core(
        num_blocks=64, enable_prefix_caching=False, long_prefill_token_threshold=5, max_num_partial_prefills=2
    )
    for name in "abc":
        core.scheduler.add(make_request(name, range(12), max_tokens=1))
    assert queries(core.step()) == [(0, 5), (1, 5)]
    assert queries(core.step()) == [(0, 5), (1, 5)]
    assert queries(core.step()) == [(0, 2), (1, 2), (2, 5)]


def test_nothing_is_launched_after_the_row_that_ends_a_sequence() -> None:
    core = make_core()
    core.scheduler.add(make_request("a", range(3), max_tokens=1))
    plan = core.scheduler.schedule()
    assert plan is not None
    assert core.scheduler.schedule() is None
    core.scheduler.update(core.executor.settle(core.executor.launch(plan)))
    assert not core.scheduler.has_requests


# -- stop rules ------------------------------------------------------------------------------


@pytest.mark.parametrize("max_drafts", [0, 3, 5])
@pytest.mark.parametrize("max_tokens", range(1, 9))
def test_stop_id_at_every_offset_of_an_accepted_run(max_drafts: int, max_tokens: int) -> None:
    """All drafts are right, so runs are as long as they can be; each token in turn is the stop id."""
    free = reference(make_request("a", range(6), max_tokens=12), 0)[0]
    for stop_token_id in {*free, 99}:
        for min_tokens in range(max_tokens + 1):
            request = make_request(
                "a",
                range(6),
                stop_token_ids=(stop_token_id,),
                max_tokens=max_tokens,
                min_tokens=min_tokens,
                logprobs=0,
            )
            core = make_core(max_drafts=max_drafts, accuracy=1.0, num_blocks=8)
            core.scheduler.add(request)
            core.run()
            expected, reason = reference(request, 0)
            assert core.tokens("a") == expected
            assert [o.finish_reason for o in core.outputs if o.finish_reason] == [reason]
            assert core.outputs[-1].stop_token_id == (stop_token_id if reason is FinishReason.STOP else None)
            logprobs = [entry for output in core.outputs for entry in output.logprobs]
            assert logprobs == [token_logprobs(t, i) for i, t in enumerate(expected, start=6)]
            assert core.scheduler.statistics().generation_tokens == len(expected)


def test_speculation_can_be_limited_or_turned_off() -> None:
    for speculation, most in (
        (SpeculationOptions(), 4),
        (SpeculationOptions(num_speculative_tokens=2), 2),
        (SpeculationOptions(num_speculative_tokens=9), 4),
        (SpeculationOptions(enabled=False), 0),
    ):
        core = make_core(max_drafts=4, accuracy=1.0, num_blocks=32)
        core.scheduler.add(replace(make_request("a", range(3), max_tokens=60), speculation=speculation))
        core.run()
        drafted = core.scheduler.statistics().draft_tokens_per_position
        assert len(drafted) == most
        assert core.scheduler.statistics().accepted_tokens_per_position == drafted


# -- who goes first --------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [0, 1])
def test_priority_takes_the_last_seat(depth: int) -> None:
    """The running one is in flight whenever a step is planned at depth 1, and must give way all the same."""
    core = make_core(max_num_seqs=1, scheduling_policy="priority", num_blocks=32)
    scheduler, executor = core.scheduler, core.executor
    scheduler.add(make_request("low", range(4), max_tokens=50, priority=1))
    launched = []
    for num_steps in itertools.count(1):
        if not scheduler.has_requests:
            break
        plan = scheduler.schedule()
        if plan is not None:
            launched.append(executor.launch(plan))
        if launched and (plan is None or len(launched) > depth):
            scheduler.update(executor.settle(launched.pop(0)))
        core.outputs += scheduler.take_outputs()
        if num_steps == 3:
            scheduler.add(make_request("high", range(100, 104), max_tokens=3, priority=0))
    ended = [output.request_id for output in core.outputs if output.finish_reason]
    assert ended == ["high", "low"]
    assert core.tokens("low") == reference(make_request("low", range(4), max_tokens=50), 0)[0]
    assert scheduler.counters.num_preemptions == 1


def test_fcfs_takes_no_seat() -> None:
    core = make_core(max_num_seqs=1)
    core.scheduler.add(make_request("late", range(4), max_tokens=9, arrival_s=2.0))
    core.step()
    core.scheduler.add(make_request("early", range(4), max_tokens=9, arrival_s=1.0))
    core.run()
    assert core.scheduler.counters.num_preemptions == 0


def test_low_priority_ages() -> None:
    """With a stream of urgent requests a low one still starts, after priority x ageing seconds."""
    core = make_core(max_num_seqs=1, num_blocks=32, scheduling_policy="priority", priority_ageing_seconds=5.0)
    core.scheduler.add(make_request("low", range(4), max_tokens=2, priority=3))
    for second in range(40):
        core.clock.now_s = float(second)
        core.scheduler.add(make_request(f"high {second}", range(4), max_tokens=1, arrival_s=float(second)))
        core.step()
        if core.tokens("low"):
            assert second == 15
            break
    else:
        raise AssertionError("it starves")


# -- deadlines, failures, cancellation -------------------------------------------------------


def test_expired_while_queued_is_never_started() -> None:
    core = make_core(max_num_seqs=1)
    core.scheduler.add(make_request("running", range(4), max_tokens=30))
    core.scheduler.add(make_request("queued", range(4), max_tokens=3, n=2, deadline_s=5.0))
    core.scheduler.add(make_request("late", range(4), max_tokens=3, deadline_s=0.0))
    core.step()
    core.clock.now_s = 5.0
    core.step()
    assert failures(core) == [("late", Failure.EXPIRED, "queued"), ("queued", Failure.EXPIRED, "queued")]
    core.run()
    assert {start.request.request_id for plan in core.executor.plans for start in plan.starts} == {"running"}


def test_expired_while_running_ends_all_choices_once() -> None:
    core = make_core()
    core.scheduler.add(make_request("a", range(6), max_tokens=30, n=3, deadline_s=5.0))
    core.step()
    core.step()
    core.clock.now_s = 6.0
    core.run()
    assert failures(core) == [("a", Failure.EXPIRED, "running")]
    assert core.outputs[-1].failure is Failure.EXPIRED
    assert core.pool.num_free == core.pool.num_usable


def test_a_broken_row_ends_its_request_alone() -> None:
    core = make_core(num_blocks=32)
    good = make_request("good", range(4), max_tokens=9)
    core.scheduler.add(good)
    core.scheduler.add(make_request("bad", range(4), max_tokens=9, n=2))
    core.step()
    core.executor.row_error_rate = 1.0
    core.scheduler.abort("good")
    core.step()
    core.executor.row_error_rate = 0.0
    core.scheduler.add(good)
    core.run()
    assert failures(core) == [("bad", Failure.BROKEN, "the logits are NaN")]
    assert core.tokens("good")[-9:] == reference(good, 0)[0]


def test_abort_is_idempotent_and_silent() -> None:
    core = make_core()
    core.scheduler.add(make_request("a", range(4), max_tokens=9))
    core.scheduler.abort("unknown")
    core.step()
    core.scheduler.abort("a")
    core.scheduler.abort("a")
    num_outputs = len(core.outputs)
    core.run()
    assert len(core.outputs) == num_outputs
    assert core.pool.num_free == core.pool.num_usable


def test_statistics_count_requests_that_wait_and_sequences_that_run() -> None:
    core = make_core(max_num_seqs=2, num_blocks=32)
    for name in "abc":
        core.scheduler.add(make_request(name, range(3), max_tokens=4, n=2))
    core.step()
    statistics = core.scheduler.statistics()
    assert (statistics.num_running, statistics.num_waiting) == (2, 2)
    assert statistics.kv_blocks_free == statistics.kv_blocks_total - 2
    assert statistics.num_steps == 1


def test_held_admission_lets_what_has_started_go_on() -> None:
    core = make_core(num_blocks=8, max_num_seqs=2)
    core.scheduler.add(make_request("first", range(8), max_tokens=30))
    core.step()
    core.scheduler.holds_admission = True
    core.scheduler.add(make_request("second", range(4), max_tokens=2))
    assert core.scheduler.has_started
    for _ in range(8):
        core.step()
    assert core.tokens("second") == []
    assert len(core.tokens("first")) > 4
    core.scheduler.abort("first")
    assert not core.scheduler.has_started
    assert core.scheduler.schedule() is None
    core.scheduler.holds_admission = False
    core.run()
    assert len(core.tokens("second")) == 2


def test_held_admission_starts_a_preempted_sequence_again() -> None:
    core = make_core(num_blocks=4, max_num_seqs=2)
    for name in ("first", "second"):
        core.scheduler.add(make_request(name, range(4), max_tokens=8))
    core.step()
    core.scheduler.holds_admission = True
    core.run()
    assert core.scheduler.counters.num_preemptions > 0
    assert [len(core.tokens(name)) for name in ("first", "second")] == [8, 8]
