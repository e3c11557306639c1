"""Blocks that go elsewhere: which, how many at a time, and what the end of a choice waits for."""

from dataclasses import replace
from typing import Any

import pytest

from connectors.base import Finished
from connectors.save_failure import SaveFailure
from server.engine.protocol import FinishReason
from server.kv_handle import KVHandle
from server.scheduler.kv_saves import HAND_ON_TIMEOUT_S
from tests.fakes.core import Core, make_core, make_request
from tests.fakes.executor import reference
from tests.fakes.scripted_connector import ScriptedScheduler

BLOCK = 4
CONTENT = KVHandle("fake", "e1", "", "", 8, (), BLOCK, "")
LEASED = replace(CONTENT, lease_id="lease-1")


class Saving:
    """A core whose connector takes blocks; saves end when the test says so."""

    def __init__(
        self,
        handle: KVHandle | None = None,
        *,
        wants_saves: bool = True,
        wants_announcements: bool = False,
        **settings: Any,
    ) -> None:
        self.connector = ScriptedScheduler(
            wants_saves=wants_saves, wants_announcements=wants_announcements, handle=handle
        )
        self.core: Core = make_core(block_size=BLOCK, connector=self.connector, **settings)
        self.scheduler, self.pool = self.core.scheduler, self.core.pool

    def compute(self, name: str, num_tokens: int, **settings: Any) -> None:
        """A prompt that is like no other's, to its end."""
        prompt = tuple((ord(name[0]) + i) % 40 for i in range(num_tokens))
        values = {"max_tokens": 1, **settings}
        self.scheduler.add(replace(make_request(name, prompt, **values), hands_on=values["max_tokens"] > 1))
        while self.scheduler._live.by_id:
            self.step()
        self.step()

    def step(self) -> None:
        self.core.step()
        external = self.scheduler.external
        assert external is not None
        external.plan()
        self.scheduler.check_integrity()

    def end_saves(self, count: int | None = None) -> None:
        """The oldest ones."""
        ended = self.connector.saves[:count]
        del self.connector.saves[: len(ended)]
        self.scheduler.update_transfers(Finished(saved=tuple(save.block_id for save in ended)), frozenset())
        self.step()

    @property
    def ends(self) -> list[FinishReason]:
        reasons = [output.finish_reason for output in self.core.outputs]
        return [reason for reason in reasons if reason is not None]


def test_full_blocks_are_held_until_they_are_saved() -> None:
    saving = Saving()
    saving.compute("a", 11)
    assert len(saving.connector.saves) == 2
    assert saving.pool.num_free == saving.pool.num_usable - 2
    assert saving.scheduler.statistics().num_held_blocks == 2
    assert all(saving.pool.lookup(save.block_hash) == save.block_id for save in saving.connector.saves)
    saving.end_saves()
    assert saving.pool.num_free == saving.pool.num_usable


def test_nothing_is_held_for_who_wants_no_saves() -> None:
    saving = Saving(wants_saves=False)
    saving.compute("a", 11)
    assert not saving.connector.saves
    assert saving.pool.num_free == saving.pool.num_usable


def test_what_is_in_the_cache_was_saved_before() -> None:
    saving = Saving()
    saving.compute("a", 11)
    saving.end_saves()
    saving.compute("a", 15)
    assert len(saving.connector.saves) == 1


def test_blocks_beyond_a_share_of_the_pool_wait_for_their_turn() -> None:
    saving = Saving(num_blocks=16)
    saving.compute("a", 40)
    first = [save.block_id for save in saving.connector.saves]
    assert len(first) == 4
    saving.end_saves(2)
    assert len(saving.connector.saves) == 4
    for _ in range(5):
        saving.end_saves()
    assert saving.pool.num_free == saving.pool.num_usable
    assert saving.scheduler.counters.num_unsaved_blocks == 0


def test_blocks_that_are_used_again_before_their_turn_are_not_saved() -> None:
    saving = Saving(num_blocks=16)
    saving.compute("a", 40)
    saving.compute("b", 48)  # all that is left of the pool
    saving.end_saves()
    for _ in range(8):
        saving.end_saves()
    assert saving.scheduler.counters.num_unsaved_blocks >= 6
    assert saving.pool.num_free == saving.pool.num_usable


def test_blocks_that_are_not_kept_are_counted_by_the_reason() -> None:
    saving = Saving()
    failures = (SaveFailure.FULL, SaveFailure.UNAVAILABLE, SaveFailure.FULL)
    saving.scheduler.update_transfers(Finished(save_failures=failures), frozenset())
    assert saving.scheduler.statistics().save_failures == {"full": 2, "unavailable": 1}


def test_what_is_not_saved_at_the_end_is_told_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    saving = Saving(num_blocks=16)
    saving.compute("a", 40)  # 9 full blocks, 4 of which are being saved
    external = saving.scheduler.external
    assert external is not None
    ended = [save.block_id for save in saving.connector.saves[:3]]
    external.end(Finished(saved=tuple(ended), save_failures=(SaveFailure.FULL,)))
    assert saving.scheduler.statistics().save_failures == {"full": 1, "stopped": 7}
    assert caplog.messages == ["7 KV blocks are lost that were to be saved: the engine has stopped"]


def test_an_end_that_loses_nothing_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    saving = Saving()
    saving.compute("a", 11)
    external = saving.scheduler.external
    assert external is not None
    external.end(Finished(saved=tuple(save.block_id for save in saving.connector.saves)))
    assert (saving.scheduler.statistics().save_failures, caplog.messages) == ({}, [])


def test_who_hands_on_waits_until_all_blocks_are_saved() -> None:
    saving = Saving(CONTENT, num_blocks=16)
    saving.compute("a", 40, max_tokens=9)
    assert saving.ends == []
    assert saving.scheduler.has_requests
    saving.end_saves()
    saving.end_saves()
    assert saving.ends == []
    saving.end_saves()
    assert saving.ends == [FinishReason.HANDED_ON]
    assert saving.core.outputs[-1].source == CONTENT
    assert not saving.scheduler.has_requests


@pytest.mark.parametrize(("deadline_s", "after_s"), [(None, HAND_ON_TIMEOUT_S), (2.0, 2.0)])
def test_who_hands_on_does_not_wait_for_ever(deadline_s: float | None, after_s: float) -> None:
    saving = Saving(CONTENT)
    saving.compute("a", 11, max_tokens=9, deadline_s=deadline_s)
    saving.core.clock.now_s = after_s - 0.01
    saving.step()
    assert saving.ends == []
    saving.core.clock.now_s = after_s
    saving.step()
    assert saving.ends == [FinishReason.HANDED_ON]
    assert not saving.scheduler.has_requests
    saving.end_saves()
    assert saving.ends == [FinishReason.HANDED_ON]
    assert saving.pool.num_free == saving.pool.num_usable


def test_an_abort_ends_what_waits_to_be_handed_on() -> None:
    saving = Saving(CONTENT)
    saving.compute("a", 11, max_tokens=9)
    saving.scheduler.abort("a")
    assert not saving.scheduler.has_requests
    saving.end_saves()
    assert saving.ends == []


def test_the_first_choice_says_where_the_prompt_is_held_until_the_lease_ends() -> None:
    saving = Saving(LEASED, wants_saves=False)
    saving.compute("a", 11, max_tokens=9, n=3)
    sources = [output.source for output in saving.core.outputs if output.finish_reason is not None]
    assert sources == [LEASED, None, None]
    assert saving.connector.num_finished == 1
    assert saving.pool.num_free == saving.pool.num_usable - 2
    saving.scheduler.release("a")
    assert len(saving.connector.cancelled) == 1
    saving.scheduler.update_transfers(Finished(released=("lease-1", "unknown")), frozenset())
    assert saving.pool.num_free == saving.pool.num_usable
    saving.scheduler.release("a")
    assert len(saving.connector.cancelled) == 1


def test_a_prompt_without_a_full_block_is_handed_on_without_kv() -> None:
    saving = Saving(LEASED)
    saving.compute("a", 3, max_tokens=9)
    assert saving.ends == [FinishReason.HANDED_ON]
    assert saving.connector.num_finished == 0
    assert saving.core.outputs[-1].source is None


def test_a_sequence_is_preempted_while_its_blocks_are_being_saved() -> None:
    saving = Saving(num_blocks=8, max_num_seqs=2)
    for name in "ab":
        prompt = tuple((ord(name) + i) % 40 for i in range(9))
        saving.scheduler.add(make_request(name, prompt, max_tokens=15, stop_token_ids=()))
    while saving.scheduler._live.by_id:
        saving.step()
        if len(saving.connector.saves) > 1:
            saving.end_saves(1)
    assert saving.scheduler.counters.num_preemptions > 0
    assert len(saving.core.tokens("a")) == len(saving.core.tokens("b")) == 15
    for _ in range(4):
        saving.end_saves()
    assert saving.pool.num_free == saving.pool.num_usable


def test_nothing_is_announced_to_who_does_not_want_to_know() -> None:
    saving = Saving()
    saving.compute("a", 11)
    assert saving.connector.announced == []
    assert all(save.announcement is None for save in saving.connector.saves)


@pytest.mark.parametrize("budget", [3, 4, 6, 64])
def test_what_a_prompt_fills_is_announced_once_and_offered_as_announced(budget: int) -> None:
    """Whatever chunks it is computed in."""
    saving = Saving(wants_announcements=True, num_blocks=32, max_num_batched_tokens=budget)
    saving.compute("a", 27)
    assert len(saving.connector.saves) == 6
    announced = saving.connector.announced
    assert saving.connector.saves == announced[: len(saving.connector.saves)]
    assert len({save.announcement for save in announced}) == len(announced) == 6


def test_what_generated_tokens_fill_is_not_announced() -> None:
    """Nor what drafts do, which may be wrong."""
    saving = Saving(wants_announcements=True, num_blocks=32, max_drafts=3)
    saving.scheduler.add(make_request("a", range(10), max_tokens=15, stop_token_ids=()))
    while saving.scheduler._live.by_id:
        saving.step()
    saving.step()
    assert len(saving.connector.announced) == 2
    assert [save.announcement is None for save in saving.connector.saves] == [False, False, True, True, True, True]


def test_what_is_in_the_cache_is_not_announced_again() -> None:
    saving = Saving(wants_announcements=True)
    saving.compute("a", 11)
    saving.end_saves()
    saving.compute("a", 15)
    assert len(saving.connector.announced) == 3
    assert [save.announcement for save in saving.connector.saves] == [2]


def test_a_block_whose_step_failed_is_announced_anew() -> None:
    saving = Saving(wants_announcements=True)
    saving.core.executor.row_error_rate = 1.0
    saving.compute("a", 11)
    assert saving.connector.saves == []
    saving.core.executor.row_error_rate = 0.0
    saving.compute("a", 11)
    first, second = saving.connector.announced[:2], saving.connector.announced[2:]
    assert [save.block_hash for save in first] == [save.block_hash for save in second]
    assert saving.connector.saves == second


def test_what_was_announced_of_a_block_is_void_once_something_else_fills_it() -> None:
    """A prompt's step fails; then a shorter prompt goes on just as that did, in the same blocks."""
    saving = Saving(wants_announcements=True)
    shorter = make_request("b", range(2 * BLOCK - 1), max_tokens=2)
    first_token = reference(shorter, 0)[0][0]
    saving.core.executor.row_error_rate = 1.0
    saving.scheduler.add(make_request("a", (*shorter.prompt_token_ids, first_token), max_tokens=1))
    saving.step()
    saving.core.executor.row_error_rate = 0.0
    saving.scheduler.add(shorter)
    for _ in range(3):
        saving.step()
    failed, announced = saving.connector.announced[:2], saving.connector.announced[2:]
    assert saving.connector.saves == [*announced, replace(failed[1], announcement=None)]
    assert announced == [replace(failed[0], announcement=2)]
