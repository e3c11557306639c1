"""What drafts by a network of its own: what that network is, and what it is told of the target's steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from connectors.base import KVGroup
from proposers.base import Proposer
from server.model.attention import AttentionGroup, AttentionStep
from server.plan import PlanRow, SequenceStart

Features = Literal["last"] | tuple[int, ...] | None
"""Hidden states of the target that a network wants for each token: the last one, which the head takes; those that
go into the decoder layers of these indices, side by side; or none."""


@dataclass(frozen=True, slots=True)
class KVShape:
    """K and V that a network keeps for each token, in blocks of the target's."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class ChainNetwork(Protocol):
    """Predicts the target's tokens one after the other; all tensors are on the target's device."""

    @property
    def to_target(self) -> Tensor | None:
        """[its vocabulary] int64, the target's id of each of its tokens, or -1; None where they are the same."""

    def forward(self, token_ids: Tensor, positions: Tensor, step: AttentionStep, hidden: Tensor | None) -> Tensor:
        """Run over flat tokens, keeping their K and V.

        Args:
            token_ids: [T] int64, the target's. positions: [T] int64.
            hidden: [T, hidden], condensed features of the token before each, or what `forward` gave for it;
                ignored by networks without features.
        Returns: [T, hidden].
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """What `forward` gave, [n, hidden] -> [n, its vocabulary] float32, of the token after each."""


class DraftNetwork(ChainNetwork, Protocol):
    """A network with K and V of its own.

    Token p of a sequence takes position p. A network with `features` is given for it what the target made of the
    token before, so it has nothing for position 0 and never attends to it.
    """

    @property
    def fingerprint(self) -> str:
        """Hex; equal where what is kept for a block may be exchanged, the block size apart."""

    @property
    def kv_shape(self) -> KVShape:
        """What it keeps for each token."""

    @property
    def features(self) -> Features:
        """What it wants of the target."""

    @property
    def max_num_tokens(self) -> int | None:
        """Positions that it was made for; None if there is no limit."""

    def bind_kv(self, kv: Tensor) -> None:
        """Use this memory for K and V.

        Args: kv: [num_blocks, layers, kv_heads, block_size, 2 * head_dim], K then V in the last dimension.
        """

    def condense(self, features: Tensor) -> Tensor:
        """[T, features], side by side -> [T, hidden], what `forward` takes; position by position."""


@dataclass(frozen=True, slots=True)
class BatchMemory:
    """The batch as it stays on the device for S slots and one more that padding names; proposers only read it.

    Attributes:
        token_ids: [S + 1, width] int32, known tokens of every slot. block_table: [S + 1, blocks] int32, 0 beyond a
            sequence's blocks.
        num_tokens, num_computed: [S + 1] int64, known tokens and those the target has computed.
        num_blocks, block_size: of the target's KV, and of every proposer's.
    """

    token_ids: Tensor
    block_table: Tensor
    num_tokens: Tensor
    num_computed: Tensor
    num_blocks: int
    block_size: int

    @property
    def num_positions(self) -> int:
        """Places in a row of the block table: no position from this on can be written to, or attended to."""
        return self.block_table.shape[1] * self.block_size


@dataclass(frozen=True, slots=True)
class ComputedTokens:
    """What the target has computed in a step, T flat tokens of N rows, padding among them; device tensors.

    Attributes:
        slots, positions: [T] int64. is_real: [T] bool, no padding; drafts that were refused are real.
        features: [T, n], what was asked for; None if nothing was.
        rows, first_token, num_query: [N] int64, slot and flat tokens of each row. groups: the rows, in order.
    """

    slots: Tensor
    positions: Tensor
    is_real: Tensor
    features: Tensor | None
    rows: Tensor
    first_token: Tensor
    num_query: Tensor
    groups: tuple[AttentionGroup, ...]


@runtime_checkable
class BatchReader(Proposer, Protocol):
    """A proposer that looks into the batch's memory."""

    def bind(self, memory: BatchMemory) -> None:
        """Draft for this batch from now on; what it keeps for one is allocated anew."""


@runtime_checkable
class Follower(BatchReader, Protocol):
    """A proposer with a state that follows what the target computes; used from the step thread, never waits.

    For each step: `start` and `begin`; then, when the step's tokens are chosen, `remember`, `follow` if drafts are
    wanted, and `propose`. These last three may be captured, and replayed for other rows. `settle` once the step has
    settled.
    """

    @property
    def features(self) -> Features:
        """What it wants of the target."""

    @property
    def block_nbytes(self) -> int:
        """Bytes that it keeps for each block of the target's KV."""

    def kv_groups(self) -> Sequence[KVGroup]:
        """What it keeps for each block, once it is bound."""

    def void(self, block_ids: Sequence[int]) -> None:
        """These blocks will be filled from elsewhere, what it keeps for them perhaps not."""

    def adopt(self, block_ids: Sequence[int]) -> None:
        """All that it keeps for these blocks came from elsewhere."""

    def start(self, start: SequenceStart) -> None:
        """A sequence takes a slot; the batch's memory knows of it."""

    def begin(self, rows: Sequence[PlanRow], *, is_followed: bool) -> int:
        """A step begins that will be followed or not. Returns: positions of earlier steps that are done now."""

    def remember(self, computed: ComputedTokens) -> None:
        """Take in what a step computed, as far as it may be needed later."""

    def follow(self, computed: ComputedTokens) -> None:
        """Do a step's positions, right after `remember`."""

    def settle(self, rows: Sequence[PlanRow], num_computed: Mapping[int, int]) -> None:
        """A step has settled. Args: num_computed: by slot, the tokens of its sequence that are computed for certain."""
