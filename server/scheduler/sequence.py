"""One choice of a request while it is in the scheduler."""

import hashlib
import secrets
import struct
from collections import deque
from dataclasses import dataclass, field

from server.engine.protocol import PositionLogprobs
from server.kv.prefix_cache import BlockHashes
from server.request import Request


@dataclass(frozen=True, slots=True)
class InFlight:
    """A row that was launched and has not settled."""

    num_query: int
    num_drafts: int
    is_sampling: bool


def sampling_key(seed: int | None, choice: int) -> int:
    """63 bits that all randomness of a choice follows from; fresh ones where no seed was given."""
    if seed is None:
        return secrets.randbits(63)
    digest = hashlib.sha256(struct.pack("<qq", seed, choice)).digest()
    return int(struct.unpack("<q", digest[:8])[0]) & (2**63 - 1)


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable state of one choice; owned by the scheduler.

    Attributes:
        order: sort key, unique; smaller goes first.
        limit: most tokens it may have, prompt included.
        leader: the choice whose prompt blocks this one waits for; None if it need not wait.
        token_ids: prompt and settled output.
        num_computed: settled leading tokens with valid KV.
        num_next_drafts: drafts waiting on the device, known while nothing is in flight.
        epoch: grows with each preemption; results of an older one are stale.
    """

    seq_id: int
    request: Request
    choice: int
    order: tuple[float, int]
    hashes: BlockHashes
    num_speculative_tokens: int
    key: int
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
    is_finished: bool = False
    in_flight: deque[InFlight] = field(default_factory=deque)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)

    @property
    def num_prompt(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def limit(self) -> int:
        """Most tokens it may have, prompt included."""
        max_tokens = self.request.sampling.max_tokens
        assert max_tokens is not None
        return self.num_prompt + max_tokens

    @property
    def tokens_upper(self) -> int:
        """Most tokens it can have once everything in flight has settled."""
        return len(self.token_ids) + sum(1 + row.num_drafts for row in self.in_flight if row.is_sampling)

    @property
    def tokens_lower(self) -> int:
        """Fewest tokens it can have then, unless it ends."""
        return len(self.token_ids) + sum(1 for row in self.in_flight if row.is_sampling)

    @property
    def computed_upper(self) -> int:
        """Most tokens it can have computed then: all but the newest once it has sampled."""
        if any(row.is_sampling for row in self.in_flight):
            return self.tokens_upper - 1
        return self.num_computed + sum(row.num_query for row in self.in_flight)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether prompt positions are still to be reported; cached KV has no logits for them."""
        wanted = self.request.sampling.prompt_logprobs is not None and self.choice == 0
        return wanted and len(self.prompt_logprobs) < self.num_prompt - 1

    def is_ready(self) -> bool:
        """Whether its leader has published the prompt's full blocks, or never will."""
        leader = self.leader
        return leader is None or leader.is_finished or leader.num_computed >= leader.num_prompt
