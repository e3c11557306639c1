"""The mailbox: order, merging, and that a reader who never reads costs no more than the output itself."""

import asyncio

import pytest

from server.engine.detokenize import Piece
from server.engine.protocol import Delta, Finished, FinishReason, SpeculationStats, Started, StreamEvent, Timing
from server.engine.stream import Mailbox
from server.errors import EngineDead
from tests.fakes.executor import token_logprobs


def finished(index: int = 0) -> Finished:
    return Finished(index, FinishReason.LENGTH, None, 1, 1, 0, timing=Timing(), speculation=SpeculationStats())


def piece(*token_ids: int) -> Piece:
    return Piece("".join(f"<{i}>" for i in token_ids), token_ids, tuple(token_logprobs(i, i) for i in token_ids))


async def test_a_late_reader_gets_one_delta_per_choice() -> None:
    mailbox = Mailbox("a")
    mailbox.put_first(Started("a", 1, 0))
    for token_id in range(1000):
        mailbox.put_piece(token_id % 2, piece(token_id))
    mailbox.put_finished(finished(0))
    mailbox.put_finished(finished(1))
    mailbox.close()
    events = [event async for event in mailbox]
    assert [type(event) for event in events] == [Started, Delta, Finished, Delta, Finished]
    for index, delta in enumerate(event for event in events if isinstance(event, Delta)):
        merged = piece(*range(index, 1000, 2))
        assert delta == Delta(index, merged.text, merged.token_ids, merged.logprobs)


async def test_memory_is_that_of_the_output() -> None:
    mailbox = Mailbox("a")
    for token_id in range(4000):
        mailbox.put_piece(0, piece(token_id))
    assert len(mailbox._unread) == 1
    assert sum(len(piece.token_ids) for piece in mailbox._unread[0]) == 4000
    assert not mailbox._first
    assert not mailbox._finished


async def test_a_quick_reader_gets_each_piece() -> None:
    mailbox = Mailbox("a")
    events = aiter(mailbox)
    for token_id in range(3):
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        assert not waiting.done()
        mailbox.put_piece(0, piece(token_id))
        assert await waiting == Delta(0, f"<{token_id}>", (token_id,), (token_logprobs(token_id, token_id),))
    mailbox.close()
    with pytest.raises(StopAsyncIteration):
        await anext(events)


async def test_the_end_of_a_choice_does_not_wait_for_its_busy_siblings() -> None:
    mailbox = Mailbox("a")
    mailbox.put_piece(0, piece(1))
    mailbox.put_piece(1, piece(2))
    mailbox.put_finished(finished(1))
    seen: list[StreamEvent] = []
    async for event in mailbox:
        seen.append(event)
        if isinstance(event, Finished):
            break
        mailbox.put_piece(0, piece(3))
    assert [getattr(event, "index", None) for event in seen] == [0, 1, 1]


async def test_what_goes_first_goes_before_unread_deltas() -> None:
    mailbox = Mailbox("a")
    mailbox.put_piece(0, piece(1))
    mailbox.put_first(Started("a", 1, 0))
    mailbox.close()
    assert [type(event) async for event in mailbox] == [Started, Delta]


async def test_an_error_comes_after_everything_before_it_and_the_first_one_stays() -> None:
    mailbox = Mailbox("a")
    mailbox.put_piece(0, piece(1))
    mailbox.close(EngineDead("first"))
    mailbox.close(EngineDead("second"))
    mailbox.close()
    events = aiter(mailbox)
    assert isinstance(await anext(events), Delta)
    with pytest.raises(EngineDead, match="first"):
        await anext(events)


async def test_a_reader_that_is_cancelled_loses_nothing() -> None:
    mailbox = Mailbox("a")
    waiting = asyncio.ensure_future(anext(aiter(mailbox)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    mailbox.put_piece(0, piece(1))
    assert await anext(aiter(mailbox)) == Delta(0, "<1>", (1,), (token_logprobs(1, 1),))


async def test_an_interval_gathers_all_but_the_first_and_the_last_tokens() -> None:
    mailbox = Mailbox("a", interval=4)
    seen: list[tuple[int, ...]] = []

    async def read() -> None:
        async for event in mailbox:
            seen.extend([event.token_ids] if isinstance(event, Delta) else [])

    reading = asyncio.create_task(read())
    for token_id in range(10):
        mailbox.put_piece(0, piece(token_id))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert seen == [(0,), (1, 2, 3, 4), (5, 6, 7, 8)]
    mailbox.put_finished(finished(0))
    mailbox.close()
    await reading
    assert seen[3:] == [(9,)]


async def test_an_interval_counts_tokens_and_keeps_choices_apart() -> None:
    mailbox = Mailbox("a", interval=3)
    for index in (0, 1):
        mailbox.put_piece(index, piece(index))
    mailbox.put_piece(0, piece(10, 11, 12, 13))
    mailbox.put_piece(1, piece(20))
    mailbox.put_finished(finished(0))
    events = aiter(mailbox)
    assert await anext(events) == Delta(0, *piece(0, 10, 11, 12, 13))
    assert await anext(events) == finished(0)
    assert await anext(events) == Delta(1, *piece(1))
    mailbox.close(EngineDead("gone"))
    assert await anext(events) == Delta(1, *piece(20))
    with pytest.raises(EngineDead):
        await anext(events)
