"""What is known of a network's K and V, by hand; tests/property/test_followers.py has random traffic."""

import pytest

from proposers.draft_slots import DraftSlots, SlotStart
from server.plan import PlanRow

BLOCK = 4


def row(slot: int, num_query: int, new_blocks: tuple[int, ...] = ()) -> PlanRow:
    return PlanRow(slot, slot, 0, num_query, 0, 0, is_sampling=True, new_block_ids=new_blocks)


def done(*, is_fed: bool, num_tokens: int = 12, blocks: tuple[int, ...] = (1, 2, 3)) -> DraftSlots:
    """A sequence in slot 0 that was done from its first position on."""
    slots = DraftSlots(10, BLOCK, is_fed=is_fed)
    slots.start(0, 0, blocks)
    slots.catch_up(0, 1)
    slots.settle(0, num_tokens)
    return slots


@pytest.mark.parametrize(("is_fed", "expected"), [(False, SlotStart(0, 0)), (True, SlotStart(1, 1))])
def test_a_new_sequence_has_everything_to_do(is_fed: bool, expected: SlotStart) -> None:
    """But for position 0 of a network with features, which has none for it."""
    slots = DraftSlots(10, BLOCK, is_fed=is_fed)
    assert slots.start(0, 0, (1, 2)) == expected
    assert slots.lag(0) == (0 if is_fed else 1)


@pytest.mark.parametrize("num_blocks", [1, 2, 3])
@pytest.mark.parametrize("is_fed", [False, True])
def test_blocks_that_are_whole_are_done(is_fed: bool, num_blocks: int) -> None:
    """The pair at the position behind them is still to be done."""
    slots, num_cached = done(is_fed=is_fed), BLOCK * num_blocks
    assert slots.start(1, num_cached, (1, 2, 3)[:num_blocks]) == SlotStart(num_cached, int(is_fed))
    assert slots.lag(1) == 1


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_block_that_is_not_full_is_not_whole(is_fed: bool) -> None:
    slots = done(is_fed=is_fed, num_tokens=11)
    assert slots.start(1, 12, (1, 2, 3)) == (SlotStart(12, 12) if is_fed else SlotStart(8, 0))


@pytest.mark.parametrize("is_fed", [False, True])
def test_what_lags_behind_is_not_whole_until_it_has_caught_up(is_fed: bool) -> None:
    slots = DraftSlots(10, BLOCK, is_fed=is_fed)
    slots.start(0, 0, (1, 2, 3))
    slots.catch_up(0, 1)
    slots.pass_by([row(0, 12)])
    slots.settle(0, 12)
    assert slots.start(1, 12, (1, 2, 3)) == (SlotStart(12, 12) if is_fed else SlotStart(0, 0))
    slots.catch_up(0, 7)
    slots.settle(0, 12)
    assert slots.start(1, 12, (1, 2, 3)) == (SlotStart(12, 12) if is_fed else SlotStart(0, 0))
    slots.catch_up(0, 5)
    slots.settle(0, 12)
    assert slots.start(1, 12, (1, 2, 3)) == SlotStart(12, int(is_fed))


def test_cached_blocks_are_done_again_from_the_first_one_that_is_not_whole() -> None:
    slots = done(is_fed=False)
    slots.start(1, 0, (5, 6))  # not done yet
    assert slots.start(2, 12, (1, 5, 3)) == SlotStart(4, 0)
    assert slots.lag(2) == 9
    slots.catch_up(2, 9)
    slots.settle(2, 12)
    assert slots.start(3, 12, (1, 5, 3)) == SlotStart(12, 0)


def test_with_features_the_whole_blocks_at_the_end_are_attended_to() -> None:
    slots = done(is_fed=True)
    assert slots.start(1, 12, (1, 5, 3)) == SlotStart(12, 8)
    assert slots.start(2, 12, (5, 2, 3)) == SlotStart(12, 4)
    assert slots.start(3, 12, (1, 2, 5)) == SlotStart(12, 12)


def test_blocks_behind_cached_ones_are_whole_for_those_who_attend_from_there() -> None:
    slots = DraftSlots(10, BLOCK, is_fed=True)
    assert slots.start(0, 4, (1, 2)) == SlotStart(4, 4)
    slots.catch_up(0, 1)
    slots.grow(row(0, 4, new_blocks=(3,)))
    slots.settle(0, 12)
    assert slots.start(1, 12, (1, 2, 3)) == SlotStart(12, 4)


@pytest.mark.parametrize("is_fed", [False, True])
def test_a_block_that_somebody_else_gets_is_not_whole(is_fed: bool) -> None:
    slots = done(is_fed=is_fed)
    slots.start(1, 0, (3,))
    assert slots.start(2, 12, (1, 2, 3)) == (SlotStart(12, 12) if is_fed else SlotStart(8, 0))
    slots = done(is_fed=is_fed)
    slots.start(1, 0, (5,))
    slots.grow(row(1, 4, new_blocks=(1,)))
    assert slots.start(2, 8, (1, 2)) == (SlotStart(8, 4) if is_fed else SlotStart(0, 0))


def test_what_is_left_out_is_neither_done_nor_whole() -> None:
    slots = DraftSlots(10, BLOCK, is_fed=True)
    slots.start(0, 0, (1, 2, 3, 4))
    slots.settle(0, 4)
    slots.pass_by([row(0, 30)])
    slots.skip(0, 3, bound=9)
    assert slots.lag(0) == 3
    slots.catch_up(0, 3)
    slots.settle(0, 16)
    assert slots.start(1, 16, (1, 2, 3, 4)) == SlotStart(16, 12)
    assert slots.start(2, 12, (1, 2, 3)) == SlotStart(12, 12)
    assert slots.start(3, 4, (1,)) == SlotStart(4, 1)


def test_behind_a_block_that_came_without_its_end_a_network_begins_a_position_later() -> None:
    """What it would be fed at the first position is not known; a network without features does the block anew."""
    slots = DraftSlots(10, BLOCK, is_fed=True)
    slots.void((1, 2))
    assert slots.start(0, 8, (1, 2, 3, 4)) == SlotStart(9, 9)
    assert slots.lag(0) == 0
    slots.settle(0, 16)
    assert slots.start(1, 16, (1, 2, 3, 4)) == SlotStart(16, 12)
    assert slots.start(2, 12, (1, 2, 3)) == SlotStart(12, 12)
    slots = DraftSlots(10, BLOCK, is_fed=False)
    slots.void((1, 2))
    assert slots.start(0, 8, (1, 2, 3)) == SlotStart(0, 0)


@pytest.mark.parametrize("is_fed", [False, True])
def test_blocks_that_came_whole_are_done(is_fed: bool) -> None:
    slots = DraftSlots(10, BLOCK, is_fed=is_fed)
    slots.void((1, 2))
    slots.adopt((1, 2))
    assert slots.is_whole(1)
    assert slots.start(0, 8, (1, 2, 3)) == SlotStart(8, int(is_fed))
    slots.start(1, 0, (1,))  # somebody else's now
    assert not slots.is_whole(1)
