"""Batch states and plan rows for tests of the worker's parts, without a model."""

from collections.abc import Mapping, Sequence

import torch

from server.plan import PlanRow, SequenceStart
from server.request import Request, SamplingParams
from server.worker.batch import BatchState
from server.worker.buckets import Buckets
from server.worker.flight import Flight, Flights
from server.worker.layout import lay_out
from server.worker.slot_info import SlotInfo
from server.worker.step_inputs import StepInputs

MAX_CONTEXT = 64


def start(
    slot: int,
    token_ids: Sequence[int],
    *,
    num_prompt: int | None = None,
    sampling: SamplingParams = SamplingParams(),
    stop_token_ids: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
    key: int = 1,
    block_ids: Sequence[int] = (1,),
    num_speculative_tokens: int = 0,
) -> SequenceStart:
    """A sequence that has computed all tokens but the last."""
    num_prompt = len(token_ids) if num_prompt is None else num_prompt
    request = Request(
        request_id=f"request-{slot}",
        prompt_token_ids=tuple(token_ids[:num_prompt]),
        sampling=sampling,
        stop_token_ids=frozenset(stop_token_ids),
        bad_words_token_ids=tuple(tuple(word) for word in bad_words),
    )
    return SequenceStart(
        slot=slot,
        request=request,
        key=key,
        token_ids=tuple(token_ids),
        num_prompt=num_prompt,
        num_computed=len(token_ids) - 1,
        block_ids=tuple(block_ids),
        num_speculative_tokens=num_speculative_tokens,
    )


def batch_of(
    starts: Sequence[SequenceStart], device: str, *, max_tokens: int = MAX_CONTEXT, max_drafts: int = 4
) -> BatchState:
    """A batch state with these sequences in it, and as many slots."""
    batch = BatchState(len(starts), MAX_CONTEXT, 16, max_drafts, torch.device(device))
    change(batch, starts)
    return batch


def change(batch: BatchState, starts: Sequence[SequenceStart] = (), rows: Sequence[PlanRow] = ()) -> None:
    """What a plan of these would change."""
    flight = flight_on(str(batch.token_ids.device))
    changes = batch.stage(starts, rows, flight)
    flight.send()
    batch.apply(changes)


def flight_on(device: str, nbytes: int = 4096) -> Flight:
    """A flight of its own."""
    return Flights(torch.device(device), nbytes, 64).begin()


def put_drafts(batch: BatchState, slot: int, draft_ids: Sequence[int]) -> None:
    """Put drafts behind a slot's known tokens."""
    first = int(batch.num_tokens[slot])
    for i, token_id in enumerate(draft_ids):
        batch.token_ids[slot, first + i] = token_id
    batch.num_drafts[slot] = len(draft_ids)


def decode_row(slot: int, context_len: int, num_drafts: int) -> PlanRow:
    """A row that verifies drafts behind `context_len` known tokens."""
    return PlanRow(
        slot=slot,
        seq_id=slot,
        epoch=0,
        num_query=1 + num_drafts,
        num_drafts=num_drafts,
        context_bound=context_len + num_drafts,
        is_sampling=True,
    )


def inputs_of(
    rows: Sequence[PlanRow],
    starts: Sequence[SequenceStart],
    device: str,
    max_drafts: int = 4,
    sizes: Sequence[int] = (),
) -> StepInputs:
    """The layout of rows whose sequences were started by `starts`, padded to one of these sizes."""
    infos: Mapping[int, SlotInfo] = {item.slot: SlotInfo.of(item) for item in starts}
    buckets = Buckets(spare_slot=len(starts), max_query=1 + max_drafts, max_context=MAX_CONTEXT, sizes=sizes)
    flight = flight_on(device)
    inputs = lay_out(rows, infos, buckets, flight)
    flight.send()
    return inputs
