"""An executor without a model: it knows what a device would hold and refuses what a device would get wrong."""

import random
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from server.engine.protocol import FinishReason, PositionLogprobs, TokenLogprob
from server.kv.block_pool import NULL_BLOCK
from server.plan import PlanRow, RowResult, SequenceStart, StepPlan, StepResult
from server.request import Request
from server.scheduler.sequence import sampling_key

VOCAB_SIZE = 40
_DRAFTED = -1
"""What drafting leaves in a cell."""


class InjectedError(Exception):
    """A step that fails because the test wants it to."""


def _extend(state: int, token_id: int) -> int:
    return zlib.crc32(token_id.to_bytes(4, "little"), state)


def _chain(salt: str, token_ids: Sequence[int]) -> list[int]:
    """What the KV at each position depends on: salt and all tokens up to it."""
    state, states = zlib.crc32(salt.encode()), []
    for token_id in token_ids:
        state = _extend(state, token_id)
        states.append(state)
    return states


def _next_token(key: int, state: int) -> int:
    """The token after a prefix; any two prefixes or keys give unrelated tokens."""
    return zlib.crc32(key.to_bytes(8, "little"), state) % VOCAB_SIZE


def reference(request: Request, choice: int) -> tuple[list[int], FinishReason]:
    """What a seeded choice generates one token at a time, alone, and why it ends."""
    assert request.sampling.seed is not None
    assert request.sampling.max_tokens is not None
    key = sampling_key(request.sampling.seed, choice)
    state = _chain(request.cache_salt, request.prompt_token_ids)[-1]
    generated: list[int] = []
    while len(generated) < request.sampling.max_tokens:
        generated.append(_next_token(key, state))
        if generated[-1] in request.stop_token_ids and len(generated) > request.sampling.min_tokens:
            return generated, FinishReason.STOP
        state = _extend(state, generated[-1])
    return generated, FinishReason.LENGTH


def token_logprobs(token_id: int, position: int) -> PositionLogprobs:
    """A value that tells which token and position it belongs to."""
    return PositionLogprobs(TokenLogprob(token_id, -float(position), 1), ())


@dataclass(slots=True)
class _Slot:
    """Device truth about one row of the batch; seq_id and epoch are learned from the row's first step."""

    request: Request
    key: int
    tokens: list[int]
    num_prompt: int
    num_computed: int
    table: list[int]
    max_drafts: int
    drafts: list[int] = field(default_factory=list)
    seq_id: int | None = None
    epoch: int | None = None


@dataclass(frozen=True, slots=True)
class _Handle:
    """A launched step: its results, and which blocks each sequence touches until it settles."""

    number: int
    results: tuple[RowResult, ...]
    touched: frozenset[tuple[int, int]]


class FakeExecutor:
    """Implements plan.Executor; every violation of its contract raises AssertionError and is kept.

    A cell of KV holds what it would depend on, so reading a position that was never computed,
    that was overwritten, or that belongs to other tokens or another salt, is found out.

    Attributes:
        violations: what the scheduler got wrong.
        plans: how many were launched.
    """

    def __init__(
        self,
        rng: random.Random,
        *,
        block_size: int,
        max_drafts: int = 0,
        accuracy: float = 0.7,
        row_error_rate: float = 0.0,
        launch_error_rate: float = 0.0,
        settle_error_rate: float = 0.0,
        is_published: Callable[[int], bool] = lambda _: False,
        num_lookahead_tokens: int = 0,
    ) -> None:
        """Args:
        accuracy: probability that a drafted token is the one the target yields.
        is_published: whether a block is shared under a hash and thus read-only.
        num_lookahead_tokens: positions that drafting writes to, from that of the newest token on, as far as they
            have blocks; the first must have one.
        """
        self._rng = rng
        self._block_size = block_size
        self._max_drafts = max_drafts
        self.accuracy = accuracy
        self.row_error_rate = row_error_rate
        self.launch_error_rate = launch_error_rate
        self.settle_error_rate = settle_error_rate
        self._is_published = is_published
        self._num_lookahead_tokens = num_lookahead_tokens
        self._slots: dict[int, _Slot] = {}
        self._cells: dict[tuple[int, int], int | None] = {}
        self._unsettled: deque[_Handle] = deque()
        self._broken: set[int] = set()
        self.violations: list[str] = []
        self.plans: list[StepPlan] = []

    def block(self, block_id: int) -> tuple[int | None, ...]:
        """What a block's cells hold."""
        return tuple(self._cells.get((block_id, place)) for place in range(self._block_size))

    def fill(self, block_id: int, cells: Sequence[int | None]) -> None:
        """Have a block's cells hold something, as a connector does."""
        self._require(not self._is_published(block_id), f"published block {block_id} is loaded to")
        for place, cell in enumerate(cells):
            self._cells[block_id, place] = cell

    def launch(self, plan: StepPlan) -> _Handle:
        """Run the step at once; its results stay hidden until it is settled."""
        if self._rng.random() < self.launch_error_rate:
            raise InjectedError("launch")
        self.plans.append(plan)
        for start in plan.starts:
            self._start(start)
        touched: set[tuple[int, int]] = set()
        results: list[RowResult] = []
        for row in plan.rows:
            slot = self._slot_of(row)
            touched |= {(block_id, row.seq_id) for block_id in self._writable_blocks(slot, row)}
            results.append(self._run(slot, row))
        self._check_writers(touched)
        self._rng.shuffle(results)  # the order is the layout's, not the plan's
        handle = _Handle(len(self.plans), tuple(results), frozenset(touched))
        self._unsettled.append(handle)
        return handle

    def settle(self, handle: _Handle) -> StepResult:
        """The results of the oldest unsettled step."""
        if not self._unsettled or self._unsettled[0] is not handle:
            self._refuse(f"step {handle.number} is settled out of order")
        self._unsettled.popleft()
        if self._rng.random() < self.settle_error_rate:
            self._broken |= {row.seq_id for row in handle.results}
            raise InjectedError("settle")
        self._broken |= {row.seq_id for row in handle.results if row.error is not None}
        return StepResult(handle.results)

    def _refuse(self, what: str) -> NoReturn:
        self.violations.append(what)
        raise AssertionError(what)

    def _require(self, is_right: bool, what: str) -> None:
        if not is_right:
            self._refuse(what)

    def _start(self, start: SequenceStart) -> None:
        self._require(start.num_computed < len(start.token_ids), f"slot {start.slot} starts with nothing to compute")
        touched = {block_id for handle in self._unsettled for block_id, _ in handle.touched}
        writable = start.block_ids[start.num_computed // self._block_size :]
        self._require(not touched & set(writable), f"slot {start.slot} gets a block that a launched step writes")
        self._slots[start.slot] = _Slot(
            request=start.request,
            key=start.key,
            tokens=list(start.token_ids),
            num_prompt=start.num_prompt,
            num_computed=start.num_computed,
            table=list(start.block_ids),
            max_drafts=start.num_speculative_tokens,
        )

    def _slot_of(self, row: PlanRow) -> _Slot:
        slot = self._slots.get(row.slot)
        if slot is None:
            self._refuse(f"slot {row.slot} was never started")
        if slot.seq_id is None:
            slot.seq_id, slot.epoch = row.seq_id, row.epoch
        self._require((slot.seq_id, slot.epoch) == (row.seq_id, row.epoch), f"slot {row.slot} is someone else's")
        self._require(row.seq_id not in self._broken, f"sequence {row.seq_id} runs on after an error")
        slot.table += row.new_block_ids
        return slot

    def _run(self, slot: _Slot, row: PlanRow) -> RowResult:
        start = slot.num_computed
        known = slot.tokens + slot.drafts[: row.num_drafts] if row.is_sampling else slot.tokens
        end = min(start + row.num_query, len(known))
        self._require(
            start < end <= row.context_bound, f"row of {start} to {end} exceeds its bound {row.context_bound}"
        )
        self._require(
            row.context_bound <= len(slot.table) * self._block_size, f"slot {row.slot} has no blocks up to its bound"
        )
        if self._num_lookahead_tokens:
            newest = min(row.context_bound, self._limit(slot) - 1)
            self._require(
                newest < len(slot.table) * self._block_size, f"slot {row.slot} has no block for its newest token"
            )
        states = _chain(slot.request.cache_salt, known[:end])
        for position in range(start):
            self._require(
                self._cells.get(self._cell(slot, position)) == states[position],
                f"slot {row.slot} reads position {position}, which holds something else",
            )
        for position in range(start, end):
            block_id, _ = cell = self._cell(slot, position)
            self._require(block_id != NULL_BLOCK, "the null block is written")
            self._require(not self._is_published(block_id), f"published block {block_id} is written")
            self._cells[cell] = states[position]
        prompt_logprobs = self._prompt_logprobs(slot, row, start, end)
        if not row.is_sampling:
            self._require(end - start == row.num_query and end < len(slot.tokens), "a chunk must end within the known")
            slot.num_computed = end
            return RowResult(row.seq_id, row.epoch, prompt_logprobs=prompt_logprobs)
        first_sampled = start + row.num_query - 1 - row.num_drafts
        self._require(first_sampled == len(slot.tokens) - 1, f"slot {row.slot} samples after token {first_sampled}")
        return self._sample(slot, row, prompt_logprobs)

    def _sample(self, slot: _Slot, row: PlanRow, prompt_logprobs: tuple[PositionLogprobs, ...]) -> RowResult:
        drafts = slot.drafts[: row.num_drafts]
        first = len(slot.tokens)
        truth = self._truth(slot)
        new_tokens = [next(truth)]
        for draft in drafts:
            if draft != new_tokens[-1]:
                break
            new_tokens.append(next(truth))
        slot.num_computed = first + len(new_tokens) - 1
        slot.tokens += new_tokens
        self._write_drafts(slot)
        slot.drafts = self._propose(slot)
        if self._rng.random() < self.row_error_rate:
            return RowResult(row.seq_id, row.epoch, error="the logits are NaN")
        wants_logprobs = slot.request.sampling.logprobs is not None
        return RowResult(
            row.seq_id,
            row.epoch,
            token_ids=tuple(new_tokens),
            num_drafted=len(drafts),
            num_next_drafts=len(slot.drafts),
            logprobs=tuple(token_logprobs(t, i) for i, t in enumerate(new_tokens, first)) if wants_logprobs else (),
            prompt_logprobs=prompt_logprobs,
        )

    def _truth(self, slot: _Slot) -> Iterator[int]:
        """The tokens after the known ones."""
        state = _chain(slot.request.cache_salt, slot.tokens)[-1]
        while True:
            token_id = _next_token(slot.key, state)
            yield token_id
            state = _extend(state, token_id)

    def _propose(self, slot: _Slot) -> list[int]:
        drafts: list[int] = []
        truth = self._truth(slot)
        for _ in range(self._rng.randint(0, min(slot.max_drafts, self._max_drafts))):
            right = next(truth)
            drafts.append(right if self._rng.random() < self.accuracy else (right + 1) % VOCAB_SIZE)
        return drafts

    def _write_drafts(self, slot: _Slot) -> None:
        """Leave at the places of newest token and drafts what nobody may read."""
        newest = len(slot.tokens) - 1
        for position in range(newest, newest + self._num_lookahead_tokens):
            if position < len(slot.table) * self._block_size:
                block_id, _ = cell = self._cell(slot, position)
                self._require(not self._is_published(block_id), f"drafts are written to published block {block_id}")
                self._cells[cell] = _DRAFTED

    def _prompt_logprobs(self, slot: _Slot, row: PlanRow, start: int, end: int) -> tuple[PositionLogprobs, ...]:
        if row.num_prompt_logprobs is None:
            return ()
        # The worker takes the first position from the bound, without asking the device.
        self._require(row.context_bound - row.num_query == start, "prompt positions are misplaced")
        self._require(start < slot.num_prompt - 1, "prompt positions are asked for where there are none")
        positions = range(start + 1, min(end, slot.num_prompt - 1) + 1)
        return tuple(token_logprobs(slot.tokens[position], position) for position in positions)

    def _cell(self, slot: _Slot, position: int) -> tuple[int, int]:
        return slot.table[position // self._block_size], position % self._block_size

    def _writable_blocks(self, slot: _Slot, row: PlanRow) -> list[int]:
        """Blocks from the first position the row computes up to its bound, or that of its drafts."""
        bound = row.context_bound + self._num_lookahead_tokens
        return slot.table[slot.num_computed // self._block_size : -(-bound // self._block_size)]

    def _limit(self, slot: _Slot) -> int:
        max_tokens = slot.request.sampling.max_tokens
        assert max_tokens is not None
        return slot.num_prompt + max_tokens

    def _check_writers(self, touched: set[tuple[int, int]]) -> None:
        owners: dict[int, int] = {}
        for block_id, seq_id in [*touched, *(pair for handle in self._unsettled for pair in handle.touched)]:
            owner = owners.setdefault(block_id, seq_id)
            self._require(
                owner == seq_id or self._is_published(block_id), f"block {block_id} is written by {owner} and {seq_id}"
            )
