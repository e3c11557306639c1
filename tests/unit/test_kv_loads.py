"""Waiting sequences whose KV comes from elsewhere: who starts when, and what becomes of blocks."""

from dataclasses import replace
from typing import Any

import pytest

from connectors.base import LOAD_TIMEOUT_S, Finished
from server.engine.protocol import FinishReason
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.plan import StepPlan
from server.request import Request
from server.scheduler.admission import NUM_AHEAD
from server.scheduler.kv_loads import RENEWAL_S
from server.scheduler.outputs import Failure
from tests.fakes.core import Core, make_core, make_request
from tests.fakes.executor import _chain
from tests.fakes.scripted_connector import ScriptedScheduler

BLOCK = 4
HANDLE = KVHandle("fake", "e1", "", "lease-1", 8, (1, 2), BLOCK, "")


class Loading:
    """A core whose connector answers as told, in blocks; loads end when the test says so."""

    def __init__(self, *answers: int | None, wants_loads: bool = True, **settings: Any) -> None:
        self.connector = ScriptedScheduler(
            *(None if answer is None else answer * BLOCK for answer in answers),
            wants_saves=False,
            wants_loads=wants_loads,
        )
        self.core: Core = make_core(block_size=BLOCK, connector=self.connector, **settings)
        self.scheduler, self.pool = self.core.scheduler, self.core.pool

    def add(self, name: str, num_tokens: int, **settings: Any) -> Request:
        """A request with a prompt that is like no other's."""
        request = make_request(name, tuple((ord(name[0]) + i) % 40 for i in range(num_tokens)), **settings)
        self.scheduler.add(request)
        return request

    def step(self) -> StepPlan | None:
        plan = self.core.step()
        external = self.scheduler.external
        assert external is not None
        external.plan()
        self.scheduler.check_integrity()
        return plan

    def started(self) -> list[str]:
        """Whom the next step starts."""
        plan = self.step()
        return [] if plan is None else [start.request.request_id for start in plan.starts]

    def end_load(self, request: Request, number: int = 0, *, num_bad: int = 0) -> None:
        """Fill the blocks of the load of that number, but for the last ones."""
        load = self.connector.loads[number]
        cells = _chain("", request.prompt_token_ids)
        good = load.block_ids[: len(load.block_ids) - num_bad]
        for place, block_id in enumerate(good, load.first_block):
            self.core.executor.fill(block_id, cells[place * BLOCK : (place + 1) * BLOCK])
        self.report(load.seq_id, load.block_ids[len(good) :])

    def report(self, seq_id: int, bad: tuple[int, ...] = ()) -> None:
        self.scheduler.update_transfers(Finished(loaded=(seq_id,)), frozenset(bad))

    def run(self) -> None:
        """Until nothing is left; all blocks are free then."""
        self.core.run()
        assert self.pool.num_free == self.pool.num_usable
        self.scheduler.check_integrity()


def test_others_start_while_a_load_goes_on() -> None:
    loading = Loading(None, 2, 0)
    first = loading.add("a", 9, max_tokens=2)
    assert loading.started() == []
    assert loading.started() == []
    loading.add("b", 9, max_tokens=2)
    assert loading.started() == ["b"]
    assert loading.connector.loads[0].first_block == 0
    loading.end_load(first)
    assert loading.started() == ["a"]
    loading.run()
    assert loading.core.outputs[-1].num_cached_tokens in (0, 8)
    assert loading.scheduler.counters.external_loaded_tokens == 8
    assert loading.scheduler.counters.external_queried_tokens == 16


def test_where_nothing_is_loaded_nothing_is_asked_for() -> None:
    """What is queried there, as on a prefill node, would look as if loads failed."""
    loading = Loading(2, wants_loads=False)
    loading.add("a", 9, max_tokens=2)
    assert loading.started() == ["a"]
    loading.run()
    assert loading.connector.asked == []
    assert loading.scheduler.counters.external_queried_tokens == 0


def test_more_than_is_asked_for_is_not_loaded() -> None:
    loading = Loading(7)
    request = loading.add("a", 9, max_tokens=2)
    loading.step()
    assert len(loading.connector.loads[0].block_ids) == 2
    loading.end_load(request)
    loading.run()


def test_who_lacks_blocks_for_its_load_is_not_overtaken() -> None:
    loading = Loading(0, *[4] * 10, num_blocks=8)
    loading.add("a", 20, max_tokens=4)
    assert loading.started() == ["a"]
    request = loading.add("b", 17, max_tokens=4)
    loading.add("c", 3, max_tokens=2)
    assert loading.started() == []
    assert not loading.connector.loads
    while loading.scheduler._batch.sequences:
        assert loading.started() == []
    assert loading.started() == ["c"], "b has its blocks now"
    loading.end_load(request)
    loading.run()


def test_loaded_blocks_give_way_to_who_goes_before() -> None:
    """Neither of two sequences has enough blocks as long as the other one keeps its own."""
    loading = Loading(4, 4, num_blocks=10)
    first = loading.add("a", 23, max_tokens=4)
    second = loading.add("b", 23, max_tokens=4)
    loading.step()
    loading.end_load(first, 0)
    loading.end_load(second, 1)
    assert loading.started() == ["a"]
    loading.run()
    assert loading.scheduler.counters.num_preemptions == 0


def test_loaded_blocks_give_way_to_who_runs() -> None:
    loading = Loading(0, 3, num_blocks=6, max_num_seqs=2)
    loading.add("a", 8, max_tokens=12, stop_token_ids=())
    loading.step()
    second = loading.add("b", 13, max_tokens=4)
    loading.step()
    loading.end_load(second)
    assert loading.pool.num_free < 2
    loading.run()
    assert loading.scheduler.counters.num_preemptions == 0


def test_a_load_that_takes_too_long_is_given_up_and_its_blocks_are_kept_until_it_ends() -> None:
    loading = Loading(2)
    request = loading.add("a", 9, max_tokens=2)
    loading.step()
    loading.core.clock.now_s += LOAD_TIMEOUT_S - 0.01
    assert loading.started() == []
    loading.core.clock.now_s += 0.01
    assert loading.started() == ["a"]
    assert loading.connector.cancelled == [0]
    loading.core.run()
    assert loading.scheduler.counters.num_failed_loads == 1
    assert loading.scheduler.statistics().num_held_blocks == 2
    assert loading.pool.num_free == loading.pool.num_usable - 2
    loading.end_load(request)
    loading.run()
    assert loading.scheduler.counters.num_failed_loads == 1


@pytest.mark.parametrize("is_late", [False, True])
def test_by_policy_a_failed_load_ends_all_choices(is_late: bool) -> None:
    loading = Loading(2, 0, fails_on_bad_loads=True)
    request = loading.add("a", 9, max_tokens=2, n=3)
    loading.add("b", 9, max_tokens=2)
    loading.step()
    if is_late:
        loading.core.clock.now_s += LOAD_TIMEOUT_S
        loading.step()
        loading.report(0)
    else:
        loading.end_load(request, num_bad=1)
    loading.run()
    failures = [output for output in loading.core.outputs if output.failure is not None]
    assert [(output.request_id, output.failure) for output in failures] == [("a", Failure.BROKEN)]
    assert "could not be loaded" in failures[0].error
    assert [output.finish_reason for output in loading.core.outputs][-1] in (FinishReason.LENGTH, FinishReason.STOP)


def test_what_a_load_did_not_bring_is_computed() -> None:
    loading = Loading(3)
    request = loading.add("a", 13, max_tokens=2)
    loading.step()
    loading.end_load(request, num_bad=2)
    plan = loading.step()
    assert plan is not None
    assert plan.starts[0].num_computed == BLOCK
    loading.run()
    assert loading.scheduler.counters.external_loaded_tokens == BLOCK
    assert loading.scheduler.counters.num_failed_loads == 1


def test_of_two_sequences_with_one_beginning_one_loads_it() -> None:
    loading = Loading(2, 0)
    request = loading.add("a", 9, max_tokens=2)
    loading.add("a2", 9, max_tokens=2)
    loading.step()
    assert loading.started() == []
    loading.end_load(request)
    assert loading.started() == ["a", "a2"]
    assert len(loading.connector.loads) == 1
    assert loading.connector.asked == [0, 8]
    loading.run()


def test_who_waits_for_a_load_of_another_loads_itself_when_that_is_given_up() -> None:
    loading = Loading(2, 2)
    loading.add("a", 9, max_tokens=2)
    request = loading.add("a2", 9, max_tokens=2)
    loading.step()
    loading.scheduler.abort("a")
    loading.step()
    assert [load.seq_id for load in loading.connector.loads] == [0, 1]
    loading.end_load(request, 1)
    assert loading.started() == ["a2"]
    loading.report(0, loading.connector.loads[0].block_ids)
    loading.run()


def test_blocks_that_were_computed_meanwhile_are_not_kept_twice() -> None:
    loading = Loading(0, 2, max_num_batched_tokens=8, max_num_seqs=4)
    loading.add("a", 17, max_tokens=2)
    loading.step()  # two blocks of it are computed and published
    request = loading.add("b", 9, max_tokens=2)
    loading.step()
    load = loading.connector.loads[0]
    hashes = [loading.pool.lookup(block_hash) for block_hash in load.hashes]
    assert hashes == [None, None]
    other = loading.pool.allocate(2)
    assert other is not None
    for block_id, block_hash in zip(other, load.hashes, strict=True):
        loading.pool.publish(block_id, block_hash)
    cells = _chain("", request.prompt_token_ids)
    for place, block_id in enumerate(other):
        loading.core.executor._cells |= {(block_id, i): cells[place * BLOCK + i] for i in range(BLOCK)}
    loading.report(load.seq_id)
    external = loading.scheduler.external
    assert external is not None
    assert set(other) <= set(external.held.block_ids)
    assert not set(load.block_ids) & set(external.held.block_ids)
    loading.pool.release(other)
    loading.run()


def test_a_deadline_holds_while_a_load_goes_on() -> None:
    loading = Loading(2)
    request = loading.add("a", 9, deadline_s=3.0)
    loading.step()
    loading.core.clock.now_s = 3.0
    loading.step()
    assert [output.failure for output in loading.core.outputs] == [Failure.EXPIRED]
    assert loading.connector.cancelled == [0]
    assert loading.pool.num_free == loading.pool.num_usable - 2, "they are still written to"
    loading.end_load(request)
    assert loading.pool.num_free == loading.pool.num_usable


def test_nobody_is_preempted_for_who_cannot_start_yet() -> None:
    loading = Loading(0, None, 2, max_num_seqs=1, scheduling_policy="priority")
    loading.add("a", 9, priority=5, max_tokens=20)
    loading.step()
    request = loading.add("b", 9, priority=0, max_tokens=2)
    for _ in range(4):
        loading.step()
    assert loading.scheduler.counters.num_preemptions == 0
    loading.end_load(request)
    assert loading.started() == ["b"]
    assert loading.scheduler.counters.num_preemptions == 1
    loading.run()


def test_the_next_ones_are_loaded_for_while_no_seat_is_free() -> None:
    loading = Loading(0, 2, *[0] * 20, max_num_seqs=1)
    loading.add("a", 9, max_tokens=6)
    loading.step()
    request = loading.add("b", 9, max_tokens=2)
    for i in range(NUM_AHEAD):
        loading.add("cdefgh"[i], 9, max_tokens=1)
    loading.step()
    assert len(loading.connector.loads) == 1
    assert len(loading.connector.asked) == 1 + NUM_AHEAD
    loading.end_load(request)
    while loading.scheduler._batch.sequences:
        assert loading.started() == []
    assert loading.started() == ["b"]
    loading.run()


def test_a_store_is_not_asked_again_and_again_while_there_is_no_room() -> None:
    loading = Loading(0, *[4] * 10, num_blocks=8)
    loading.add("a", 20, max_tokens=11, ignore_eos=True)
    loading.step()
    request = loading.add("b", 17, max_tokens=4)
    while loading.scheduler._batch.sequences:
        assert loading.started() == []
    assert len(loading.connector.asked) <= 3
    loading.step()
    loading.end_load(request)
    loading.run()


def test_who_is_far_from_its_turn_is_asked_for_from_time_to_time_if_its_kv_is_leased() -> None:
    loading = Loading(0, max_num_seqs=1)
    loading.add("a", 9, max_tokens=20)
    loading.step()
    for name in "bdefgh"[:NUM_AHEAD]:
        loading.add(name, 9)
    loading.step()
    source = Continuation((ChoiceState((3,), 7),), HANDLE)
    loading.scheduler.add(replace(make_request("c", range(9)), continuation=source))
    num_before = len(loading.connector.asked)
    for _ in range(3):
        loading.step()
    assert len(loading.connector.asked) == num_before
    for _ in range(2):
        loading.core.clock.now_s += RENEWAL_S
        loading.step()
    assert len(loading.connector.asked) == num_before + 2
    loading.scheduler.abort("c")
    assert len(loading.connector.cancelled) == 1
    loading.run()


def test_prompt_logprobs_are_computed_where_the_prompt_is() -> None:
    loading = Loading(2)
    loading.add("a", 9, prompt_logprobs=0, max_tokens=2)
    assert loading.started() == ["a"]
    assert not loading.connector.asked
    loading.run()


def test_hashes_are_those_of_a_node_with_blocks_of_another_size() -> None:
    loading, other = Loading(0), Loading(0)
    handle = replace(HANDLE, num_tokens=8)
    for each, size in ((loading, BLOCK), (other, 2 * BLOCK)):
        each.core = make_core(block_size=size, connector=each.connector)
        continuation = Continuation((ChoiceState((1,), 7, 1),), handle)
        request = replace(make_request("a", range(17), max_tokens=3), continuation=continuation)
        each.core.scheduler.add(request)
        each.core.step()
    ours, theirs = loading.connector.requests[0], other.connector.requests[0]
    assert (len(ours.hashes), len(theirs.hashes)) == (4, 2)
    assert ours.hash_blocks is not None
    assert theirs.hash_blocks is not None
    assert list(ours.hash_blocks(2 * BLOCK)) == list(theirs.hashes)
    assert list(theirs.hash_blocks(BLOCK)) == list(ours.hashes)
