"""Drafts token by token with a network that keeps K and V of its own beside the target's.

The network does token p at position p, so what it keeps there depends on tokens up to p alone and can be shared with
the target's blocks. With each step it does the target's flat tokens, each one place further on: by then the token that
followed is known. After refused drafts it does their places again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from connectors.base import KVGroup
from proposers.base import Draft, DraftVocabulary, ProposeInput, TargetView
from proposers.draft_chain import DraftChain
from proposers.draft_slots import DraftSlots
from proposers.flat_tokens import FlatTokens, blocks_of
from proposers.network import BatchMemory, ComputedTokens, DraftNetwork, Features
from server.model.attention import AttentionGroup
from server.plan import PlanRow, SequenceStart

CATCH_UP = {"cpu": 512, "cuda": 8192}
"""Most positions of earlier steps that are done with one step, so that it does not stall the others."""
KEPT = 96
"""The target's hidden states that are kept of each sequence, for positions the network has not done."""
LONGEST_GAP = KEPT - 33
"""So many of them are certain: those of the 32 drafts a step can have, and of the token before, may be refused."""


@dataclass(frozen=True, slots=True)
class _State:
    """What one batch needs; S slots and the padding's.

    Attributes:
        memory: the batch. slots: what the host knows. limit: the network takes positions below it.
        num_done, first: [S + 1] int64; positions below num_done need nothing more, and the network attends from
            `first` on.
        newest: [S + 1] int64, the flat token of the last step that is a sequence's newest.
        kept: [S + 1, KEPT, features], of position p at p % KEPT; edges: [num_blocks, features], of the last position
            of each block. None for networks without features.
    """

    memory: BatchMemory
    slots: DraftSlots
    limit: int
    kv: Tensor
    num_done: Tensor
    first: Tensor
    newest: Tensor
    kept: Tensor | None
    edges: Tensor | None


class NetworkProposer:
    """Implements proposers.network.Follower for any DraftNetwork.

    Attributes: network: what drafts.
    """

    writes_kv = True

    def __init__(
        self,
        network: DraftNetwork,
        target: TargetView,
        *,
        num_speculative_tokens: int,
        is_sampled: bool,
        num_features: int = 0,
        max_num_tokens: int | None = None,
        least_certainty: float = 0.0,
    ) -> None:
        """Args:
        is_sampled: whether drafts are drawn from the network's distribution; otherwise they are its likeliest.
        num_features: size of the hidden states that it is fed for each token.
        max_num_tokens: nothing is drafted from this position on, besides the network's own limit.
        least_certainty: see DraftChain.
        """
        assert target.network is not None
        self.network = network
        self._target = target
        self._num_features = num_features
        self._dtype = target.network.dtype
        self._k = num_speculative_tokens
        limits = [limit for limit in (network.max_num_tokens, max_num_tokens) if limit is not None]
        self._limit = min(limits, default=target.network.max_num_tokens)
        self._chain = DraftChain(
            network,
            target,
            num_drafts=num_speculative_tokens,
            is_sampled=is_sampled,
            limit=self._limit,
            least_certainty=least_certainty,
        )
        self._state: _State | None = None
        self._outputs: Tensor | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens proposed per step."""
        return self._k

    @property
    def runs_on_device(self) -> bool:
        """Nothing is read on the host."""
        return True

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """What drafts are drawn from."""
        return self._chain.vocabulary

    @property
    def features(self) -> Features:
        """What the network wants."""
        return self.network.features

    @property
    def block_nbytes(self) -> int:
        """K and V, and the target's hidden states at the end of the block."""
        assert self._target.network is not None
        shape = self.network.kv_shape
        per_token = shape.num_layers * shape.num_kv_heads * 2 * shape.head_dim * shape.dtype.itemsize
        return per_token * self._target.network.block_size + self._num_features * self._dtype.itemsize

    def bind(self, memory: BatchMemory) -> None:
        """Allocate K and V, and what is remembered, once what there was for another batch is freed."""
        self._state = self._outputs = None
        shape, device = self.network.kv_shape, memory.num_tokens.device
        kv_shape = memory.num_blocks, shape.num_layers, shape.num_kv_heads, memory.block_size, 2 * shape.head_dim
        kv = torch.zeros(kv_shape, dtype=shape.dtype, device=device)
        self.network.bind_kv(kv)
        counts = torch.zeros(3, memory.num_tokens.shape[0], dtype=torch.int64, device=device)
        kept = edges = None
        if self._num_features:
            kept_shape = memory.num_tokens.shape[0], KEPT, self._num_features
            kept = torch.zeros(kept_shape, dtype=self._dtype, device=device)
            edges = torch.zeros(memory.num_blocks, self._num_features, dtype=self._dtype, device=device)
        limit = min(self._limit, memory.num_positions)
        slots = DraftSlots(memory.num_blocks, memory.block_size, is_fed=edges is not None)
        self._state = _State(memory, slots, limit, kv, counts[0], counts[1], counts[2], kept, edges)

    def kv_groups(self) -> Sequence[KVGroup]:
        """K and V, and the hidden states at the ends of blocks."""
        state, fingerprint = self._bound, self.network.fingerprint
        groups = [KVGroup("draft", fingerprint, state.kv, state.slots.is_whole)]
        if state.edges is not None:
            groups.append(KVGroup("edge", fingerprint, state.edges, state.slots.is_whole))
        return groups

    def void(self, block_ids: Sequence[int]) -> None:
        """What is kept for these blocks is of other tokens."""
        self._bound.slots.void(block_ids)

    def adopt(self, block_ids: Sequence[int]) -> None:
        """These blocks need nothing more."""
        self._bound.slots.adopt(block_ids)

    def start(self, start: SequenceStart) -> None:
        """Find out which of its cached blocks the network has done."""
        state, slot = self._bound, start.slot
        begin = state.slots.start(slot, start.num_computed, start.block_ids)
        state.num_done[slot].fill_(begin.num_done)  # assigned, a number would be copied to a device in between
        state.first[slot].fill_(begin.first)
        if state.kept is not None and state.edges is not None and start.num_computed:
            last = start.num_computed - 1
            state.kept[slot, last % KEPT] = state.edges[start.block_ids[last // state.memory.block_size]]

    def begin(self, rows: Sequence[PlanRow], *, is_followed: bool) -> int:
        """Do what was left undone, if this step will be followed and as far as CATCH_UP goes."""
        slots = self._bound.slots
        for row in rows:
            if row.new_block_ids:
                slots.grow(row)
        if not is_followed:
            slots.pass_by(rows)
            return 0
        num_done = self._catch_up([row for row in rows if slots.lag(row.slot)])
        slots.pass_by([row for row in rows if slots.lag(row.slot)])
        return num_done

    def settle(self, rows: Sequence[PlanRow], num_computed: Mapping[int, int]) -> None:
        """Blocks that are full of settled tokens are shared."""
        slots = self._bound.slots
        for row in rows:
            slots.settle(row.slot, num_computed[row.slot])

    def remember(self, computed: ComputedTokens) -> None:
        """Keep hidden states: the last ones of each sequence, and those at the ends of blocks."""
        state, features, positions = self._bound, computed.features, computed.positions
        if state.kept is None or state.edges is None:
            return
        assert features is not None
        is_edge = computed.is_real & ((positions + 1) % state.memory.block_size == 0)
        state.edges[blocks_of(state.memory, computed.slots, positions) * is_edge] = features
        for is_long, members in groupby(computed.groups, key=lambda group: group.num_query > KEPT):
            groups = list(members)
            tokens: slice | Tensor = slice(groups[0].first_token, groups[-1].tokens.stop)
            if is_long:  # each place for one token: the last ones
                rows = slice(groups[0].first_row, groups[-1].rows.stop)
                first = computed.first_token[rows]
                back = torch.arange(KEPT, 0, -1, device=first.device)
                end = first + computed.num_query[rows]
                tokens = torch.maximum(end[:, None] - back, first[:, None]).flatten()
            slots = torch.where(computed.is_real[tokens], computed.slots[tokens], state.kept.shape[0] - 1)
            state.kept[slots, positions[tokens] % KEPT] = features[tokens]

    def follow(self, computed: ComputedTokens) -> None:
        """Run the network over the step's tokens, one place further on."""
        state, slots, rows = self._bound, computed.slots, computed.rows
        num_tokens = state.memory.num_tokens
        tokens = FlatTokens(
            slots=slots,
            positions=computed.positions + 1,
            is_real=computed.is_real & (computed.positions + 1 < num_tokens[slots].clamp(max=state.limit)),
            rows=rows,
            first_token=computed.first_token,
            num_query=computed.num_query,
            groups=tuple([replace(group, context_bound=group.context_bound + 1) for group in computed.groups]),
        )
        hidden = None if computed.features is None else self.network.condense(computed.features)
        self._outputs = self._run(tokens, hidden)
        before = computed.positions[computed.first_token]
        newest = computed.first_token + num_tokens[rows] - 2 - before
        state.newest[rows] = newest.clamp(0, slots.shape[0] - 1)
        end = torch.minimum(num_tokens[rows], before + 1 + computed.num_query)
        state.num_done[rows] = torch.where(state.num_done[rows] > before, end, state.num_done[rows])

    def propose(self, inputs: ProposeInput) -> Draft:
        """Draft for sequences whose newest token the network has done; none for the others yet."""
        state, slots = self._bound, inputs.slots
        assert self._outputs is not None
        is_ready = state.num_done[slots] == inputs.num_tokens
        starts = None if state.kept is None else state.first
        return self._chain.draft(inputs, state.memory, self._outputs[state.newest[slots]], is_ready, starts)

    def _catch_up(self, rows: Sequence[PlanRow]) -> int:
        """Do positions that were left out, the oldest first; the device knows which. Returns: at most how many."""
        state, left = self._bound, CATCH_UP[self._target.device.type]
        work: list[tuple[PlanRow, int]] = []
        for row in rows:
            if not left:
                break
            if state.kept is not None and state.slots.lag(row.slot) > LONGEST_GAP:
                state.slots.skip(row.slot, LONGEST_GAP, row.context_bound)
            width = min(state.slots.lag(row.slot), left)
            work.append((row, width))
            left -= width
        if not work:
            return 0
        self._do_left_out(work)
        for row, width in work:
            state.slots.catch_up(row.slot, width)
        return sum(width for _, width in work)

    def _do_left_out(self, work: Sequence[tuple[PlanRow, int]]) -> None:
        """Run the network over the first positions of each row that it has not done."""
        state = self._bound
        work = sorted(work, key=itemgetter(1))  # those that are alike are attended to in one go
        slot_ids, widths = (
            np.array(values) for values in zip(*[(row.slot, width) for row, width in work], strict=True)
        )
        begins = np.concatenate(([0], widths.cumsum()))
        groups = _groups(work, begins.tolist())
        offsets = np.arange(begins[-1]) - begins[:-1].repeat(widths)
        rows, first, num_query, slots, offset = self._upload(
            slot_ids, begins[:-1], widths, slot_ids.repeat(widths), offsets
        )
        known = state.memory.num_computed
        if state.kept is not None:
            oldest = known[rows] + 1 - LONGEST_GAP
            state.first[rows] = torch.where(state.num_done[rows] < oldest, oldest, state.first[rows])
            state.num_done[rows] = torch.maximum(state.num_done[rows], oldest)
        positions = state.num_done[slots] + offset
        is_real = positions <= known[slots].clamp(max=state.limit - 1)
        tokens = FlatTokens(slots, positions, is_real, rows, first, num_query, groups)
        hidden = None
        if state.kept is not None:
            hidden = self.network.condense(state.kept[slots, (positions - 1) % KEPT])
        self._run(tokens, hidden)
        state.num_done[rows] = torch.minimum(state.num_done[rows] + num_query, known[rows] + 1)

    def _run(self, tokens: FlatTokens, hidden: Tensor | None) -> Tensor:
        state = self._bound
        positions, step = tokens.step(state.memory, None if state.kept is None else state.first)
        token_ids = state.memory.token_ids[tokens.slots, positions].long()
        return self.network.forward(token_ids, positions, step, hidden)

    def _upload(self, *arrays: npt.NDArray[np.int64]) -> tuple[Tensor, ...]:
        """[n] int64 each on the device, in one go and without waiting for it."""
        host = torch.from_numpy(np.concatenate(arrays))
        if self._target.device.type == "cuda":
            host = host.pin_memory()
        return torch.split(host.to(self._target.device, non_blocking=True), [len(array) for array in arrays])

    @property
    def _bound(self) -> _State:
        assert self._state is not None, "bind comes first"
        return self._state


def _groups(work: Sequence[tuple[PlanRow, int]], begins: Sequence[int]) -> tuple[AttentionGroup, ...]:
    """Rows next to each other that are to do equally many positions. Args: begins: of each row, its first token."""
    groups: list[AttentionGroup] = []
    first_row = 0
    for width, members in groupby(work, key=itemgetter(1)):
        bounds = [row.context_bound for row, _ in members]
        groups.append(AttentionGroup(first_row, len(bounds), begins[first_row], width, max(bounds)))
        first_row += len(bounds)
    return tuple(groups)
