"""One choice of a request while it is in the scheduler."""

import hashlib
import secrets
import struct
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

from server.engine.protocol import PositionLogprobs
from server.kv.prefix_cache import BlockHashes
from server.kv_handle import KVHandle
from server.request import Request


class InFlight(NamedTuple):
    """A row that was launched and has not settled; `num_query` counts its drafts, of which it was allowed so many."""

    num_query: int
    num_drafts: int
    is_sampling: bool
    num_allowed: int = 0


def sampling_key(seed: int | None, choice: int) -> int:
    """63 bits that all randomness of a choice follows from; fresh ones where no seed was given."""
    if seed is None:
        return secrets.randbits(63)
    digest = hashlib.sha256(struct.pack("<qq", seed, choice)).digest()
    return int(struct.unpack("<q", digest[:8])[0]) & (2**63 - 1)


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one choice; owned by the scheduler.

    Every running sequence is looked at in every step, so what could be derived from `in_flight`
    is kept instead, by launch, settle_chunk, settle_tokens and restart.

    Attributes:
        order: sort key, unique; smaller goes first.
        leader: the choice whose prompt blocks this one waits for; None if it need not wait.
        token_ids: prompt and settled output.
        num_computed: settled leading tokens with valid KV.
        num_next_drafts: drafts waiting on the device, known while nothing is in flight.
        transfer_s: how long it has waited for KV from elsewhere.
        epoch: grows with each preemption; results of an older one are stale.
        drafts_on_host: whether its drafts are made on the host, from settled tokens.
        is_guided: whether it follows a grammar, whose masks are made on the host, from settled tokens.
        num_prompt: tokens of the prompt.
        limit: most tokens it may have, prompt included.
        tokens_upper: most tokens it can have once everything in flight has settled.
        tokens_lower: fewest tokens it can have then, unless it ends.
        computed_upper: most tokens it can have computed then: all but the newest once it has sampled.
    """

    seq_id: int
    request: Request
    choice: int
    order: tuple[float, int]
    hashes: BlockHashes
    num_speculative_tokens: int
    key: int
    drafts_on_host: bool = False
    leader: "Sequence | None" = None
    token_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_next_drafts: int = 0
    epoch: int = 0
    slot: int | None = None
    block_ids: list[int] = field(default_factory=list)
    num_published: int = 0
    num_cached_tokens: int = 0
    scheduled_s: float | None = None
    transfer_s: float = 0.0
    is_finished: bool = False
    in_flight: deque[InFlight] = field(default_factory=deque)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    is_guided: bool = field(init=False)
    num_prompt: int = field(init=False)
    limit: int = field(init=False)
    tokens_upper: int = field(init=False)
    tokens_lower: int = field(init=False)
    computed_upper: int = field(init=False)

    def __post_init__(self) -> None:
        """Derive what is kept; nothing is in flight yet."""
        max_tokens = self.request.sampling.max_tokens
        assert max_tokens is not None
        self.is_guided = self.request.grammar is not None
        self.num_prompt = len(self.request.prompt_token_ids)
        self.limit = self.num_prompt + max_tokens
        self.tokens_upper = self.tokens_lower = len(self.token_ids)
        self.computed_upper = self.num_computed

    def launch(self, row: InFlight) -> None:
        """Note that a row is in flight; behind one that samples only such rows may follow."""
        self.in_flight.append(row)
        if row.is_sampling:
            self.tokens_upper += 1 + row.num_drafts
            self.tokens_lower += 1
            self.computed_upper = self.tokens_upper - 1
        else:
            self.computed_upper += row.num_query

    def settle_chunk(self, row: InFlight) -> None:
        """Note what a row computed that did not sample; it is no longer in `in_flight`."""
        self.num_computed += row.num_query

    def settle_tokens(self, row: InFlight, num_accepted: int, token_ids: SequenceOf[int]) -> None:
        """Note what a row sampled; it is no longer in `in_flight`.

        Args:
            num_accepted: drafts that were accepted, of the tokens that are kept.
            token_ids: the tokens that are kept: all of them, or the sequence ends.
        """
        self.num_computed = len(self.token_ids) + num_accepted
        self.token_ids += token_ids
        self.tokens_upper -= 1 + row.num_drafts - len(token_ids)
        self.tokens_lower += len(token_ids) - 1
        self.computed_upper = self.tokens_upper - 1

    def restart(self, num_computed: int) -> None:
        """So many leading tokens are computed now, and nothing is in flight."""
        assert not self.in_flight
        self.num_computed = self.computed_upper = num_computed
        self.num_next_drafts = 0

    @property
    def source(self) -> KVHandle | None:
        """Where another node holds the prompt's KV for it."""
        continuation = self.request.continuation
        return None if continuation is None else continuation.source

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be reported; cached KV has no logits for them."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.choice == 0
        wanted = wanted and self.request.continuation is None
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    def hashes_to_find(self, block_size: int) -> list[bytes]:
        """Of the blocks that it could start with; the last token is always computed, as its logits are needed."""
        if self.needs_prompt_logprobs:
            return []
        return self.hashes.up_to(self.token_ids, (len(self.token_ids) - 1) // block_size)

    def unpublished_hashes(self, block_size: int) -> list[bytes]:
        """Of the full blocks that it is still to compute."""
        num_full = len(self.token_ids) // block_size
        if num_full <= self.num_published:
            return []
        return self.hashes.up_to(self.token_ids, num_full)[self.num_published :]

    def is_ready(self) -> bool:
        """Whether its leader has published the prompt's full blocks, or never will."""
        leader = self.leader
        return leader is None or leader.is_finished or leader.num_computed >= leader.num_prompt
