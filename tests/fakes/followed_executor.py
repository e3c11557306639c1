"""The fake device with a network that follows it; the network's K and V are checked after each step."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from proposers.base import ProposeInput, TargetModel, TargetView
from proposers.drafting import NetworkProposer
from proposers.network import ComputedTokens
from server.model.attention import AttentionGroup
from server.plan import PlanRow, SequenceStart, StepPlan, StepResult
from server.worker.batch import BatchState
from server.worker.drafting import Drafting
from tests.fakes.executor import VOCAB_SIZE, FakeExecutor, _chain, _Handle
from tests.fakes.recording_network import RecordingNetwork


@dataclass(frozen=True, slots=True)
class _Row:
    """A row as a step finds it: where it begins, and the known tokens and drafts."""

    row: PlanRow
    begin: int
    num_tokens: int
    token_ids: list[int]


class FollowedExecutor(FakeExecutor):
    """Shows each step to a NetworkProposer as the runner does, or lets it pass by.

    Attributes:
        counts: rows that drafted, those of them that attended to less than all, and those that were behind.
    """

    def attach(
        self,
        rng: random.Random,
        *,
        num_slots: int,
        num_blocks: int,
        is_fed: bool,
        max_num_tokens: int | None,
        off_rate: float,
    ) -> None:
        """Args:
        num_blocks: usable ones, which one sequence may fill.
        off_rate: how often drafting is turned off, to be turned on again some steps later.
        """
        self._coin = rng
        self._off_rate = off_rate
        self._is_on = True
        self._max_num_tokens = max_num_tokens
        self.network = RecordingNetwork(self._states, self._block_size, is_fed=is_fed, max_num_tokens=max_num_tokens)
        target = TargetModel(
            model=cast(Any, None),
            head=cast(Any, None),
            config=cast(Any, None),
            tokenizer=None,
            folder=cast(Any, None),
            dtype=torch.float64,
            digest="",
            block_size=self._block_size,
            max_num_tokens=num_blocks * self._block_size,
        )
        self._proposer = NetworkProposer(
            self.network,
            TargetView(VOCAB_SIZE, torch.device("cpu"), num_slots, target),
            num_speculative_tokens=max(1, self._max_drafts),
            is_sampled=False,
            num_features=int(is_fed),
        )
        longest = num_blocks * self._block_size
        batch = BatchState(num_slots, longest, self._block_size, max(1, self._max_drafts), torch.device("cpu"))
        self._memory = batch.memory(num_blocks=num_blocks + 1, block_size=self._block_size)
        self._proposer.bind(self._memory)
        self._drafting = Drafting(batch, self._proposer, [self._proposer], max_tokens=longest)
        self._plans: dict[int, StepPlan] = {}
        self.counts = Counter[str]()

    def launch(self, plan: StepPlan) -> _Handle:
        """Run the step, then show it to the proposer."""
        before = {start.slot: (start.num_computed, list(start.token_ids), list[int]()) for start in plan.starts}
        for row in plan.rows:
            if row.slot not in before:
                slot = self._slots[row.slot]
                before[row.slot] = slot.num_computed, list(slot.tokens), list(slot.drafts)
        handle = super().launch(plan)
        self._plans[handle.number] = plan
        rows = []
        for row in plan.rows:
            begin, tokens, drafts = before[row.slot]
            known = tokens + drafts[: row.num_drafts] if row.is_sampling else tokens
            rows.append(_Row(row, begin, len(tokens), known[: begin + row.num_query]))
        self._show(plan, rows)
        return handle

    def settle(self, handle: _Handle) -> StepResult:
        """The results, of which the proposer is told."""
        result = super().settle(handle)
        by_slot = {row.seq_id: row for row in self._plans[handle.number].rows}
        self._drafting.settle([by_slot[each.seq_id] for each in result.rows], result.rows)
        return result

    def _states(self, slot: int) -> list[int]:
        """Of the text in a slot, what each token's K and V depend on."""
        return _chain(self._slots[slot].request.cache_salt, self._slots[slot].tokens)

    def _show(self, plan: StepPlan, rows: Sequence[_Row]) -> None:
        self._is_on = self._coin.random() > (self._off_rate if self._is_on else 0.85)
        is_followed = self._is_on and plan.num_proposed > 0
        memory = self._memory
        for start in plan.starts:
            self._place(start)
        for each in rows:
            table = self._slots[each.row.slot].table
            memory.block_table[each.row.slot, : len(table)] = torch.tensor(table, dtype=torch.int32)
        self._drafting.begin(plan.starts, plan.rows, is_followed=is_followed)
        for each in rows:
            number, slot = each.row.slot, self._slots[each.row.slot]
            memory.token_ids[number, : len(slot.tokens)] = torch.tensor(slot.tokens, dtype=torch.int32)
            memory.num_tokens[number], memory.num_computed[number] = len(slot.tokens), slot.num_computed
        computed = self._computed(rows)
        self._proposer.remember(computed)
        if is_followed:
            self._proposer.follow(computed)
            self._draft([each.row for each in rows if each.row.is_sampling])

    def _place(self, start: SequenceStart) -> None:
        memory, count = self._memory, len(start.token_ids)
        memory.token_ids[start.slot, :count] = torch.tensor(start.token_ids, dtype=torch.int32)
        memory.num_tokens[start.slot], memory.num_computed[start.slot] = count, start.num_computed
        memory.block_table[start.slot] = 0

    def _computed(self, rows: Sequence[_Row]) -> ComputedTokens:
        """The step's tokens: a group for each row, the drafts that it does not have as padding."""
        slots: list[int] = []
        positions: list[int] = []
        is_real: list[bool] = []
        features: list[float] = []
        groups: list[AttentionGroup] = []
        first_token: list[int] = []
        for index, each in enumerate(rows):
            row, first = each.row, len(slots)
            first_token.append(first)
            groups.append(AttentionGroup(index, 1, first, row.num_query, row.context_bound))
            states = _chain(self._slots[row.slot].request.cache_salt, each.token_ids)
            for position in range(each.begin, each.begin + row.num_query):
                is_there = position < len(each.token_ids)
                slots.append(row.slot)
                positions.append(position if is_there else 0)
                is_real.append(is_there)
                features.append(float(states[position]) if is_there else 0.0)
        fed = torch.tensor(features, dtype=torch.float64)[:, None] if self._proposer.features else None
        return ComputedTokens(
            slots=torch.tensor(slots),
            positions=torch.tensor(positions),
            is_real=torch.tensor(is_real),
            features=fed,
            rows=torch.tensor([each.row.slot for each in rows]),
            first_token=torch.tensor(first_token),
            num_query=torch.tensor([each.row.num_query for each in rows]),
            groups=tuple(groups),
        )

    def _draft(self, rows: Sequence[PlanRow]) -> None:
        """Whoever gets drafts must have all that they are made of; whoever has caught up gets some."""
        if not rows:
            return
        memory = self._memory
        slots = torch.tensor([row.slot for row in rows])
        num_tokens = memory.num_tokens[slots]
        bound = max(row.context_bound for row in rows) + 1
        wanted = torch.full((len(rows),), 99, dtype=torch.int32)
        draft = self._proposer.propose(ProposeInput(memory.token_ids, slots, num_tokens, wanted, bound))
        state = self._proposer._bound
        for row, count, num_known in zip(rows, draft.counts.tolist(), num_tokens.tolist(), strict=True):
            if num_known > self._limit(self._slots[row.slot]):
                continue  # it has ended, as the scheduler is yet to learn
            if num_known > state.limit:
                assert count == 0
            elif count == 0:
                assert state.slots.lag(row.slot), f"slot {row.slot} gets no drafts"
                self.counts["behind"] += 1
            else:
                self._check(row.slot, num_known)

    def _check(self, slot: int, num_known: int) -> None:
        """All that the drafts were made of, but for drafts, is right."""
        self.counts["drafted"] += 1
        states, table = self._states(slot), self._slots[slot].table
        begin = 0
        if self._proposer.features:
            begin = int(self._proposer._bound.first[slot])
            assert begin >= 1
            self.counts["attends to less"] += begin > 1
        for position in range(begin, num_known):
            assert self.network.holds(table, position, states[position]), f"slot {slot} position {position} of {begin}"
