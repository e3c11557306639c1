"""How a step's tokens are shared out."""

from collections.abc import Sequence as SequenceOf

from server.config import SchedulerConfig
from server.scheduler.sequence import InFlight, Sequence


def num_pending(sequence: Sequence) -> int:
    """Known tokens whose KV is not computed, once everything in flight has settled."""
    return sequence.tokens_upper - sequence.computed_upper


class TokenBudget:
    """The tokens of one step.

    Each decoding sequence is sure of one token, so that no prompt can stall it. Drafts may use
    what is left, but only half of it while there are prompts to compute.
    """

    def __init__(self, config: SchedulerConfig, running: SequenceOf[Sequence], *, has_waiting: bool) -> None:
        self._left = config.max_num_batched_tokens
        self._chunk_limit = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._partial_left = config.max_num_partial_prefills
        self._reserved = {sequence.seq_id for sequence in running if num_pending(sequence) == 1}
        has_prompts = has_waiting or len(self._reserved) < len(running)
        spare = max(0, self._left - len(self._reserved))
        self._drafts_left = spare // 2 if has_prompts else spare

    def offer(self, sequence: Sequence) -> InFlight | None:
        """The row the sequence may run in this step; None if it has nothing to do or no tokens are left."""
        self._reserved.discard(sequence.seq_id)
        pending = num_pending(sequence)
        if pending == 1:
            if sequence.tokens_lower >= sequence.limit or self._left < 1:
                return None  # what is in flight ends it, or it must wait
            num_drafts = self._num_drafts(sequence)
            return InFlight(num_query=1 + num_drafts, num_drafts=num_drafts, is_sampling=True)
        if not self.admits(pending):
            return None
        num_query = self._chunk(pending)
        return InFlight(num_query=num_query, num_drafts=0, is_sampling=num_query == pending)

    def take(self, row: InFlight) -> None:
        """Spend an offer."""
        self._left -= row.num_query
        self._drafts_left -= row.num_drafts
        if not row.is_sampling:
            self._partial_left -= 1

    def admits(self, num_tokens: int) -> bool:
        """Whether a row for that many pending tokens, or a chunk of them, may run."""
        num_query = self._chunk(num_tokens)
        return num_query == num_tokens or (num_query > 0 and self._partial_left > 0)

    def _chunk(self, num_tokens: int) -> int:
        return max(0, min(num_tokens, self._left - len(self._reserved), self._chunk_limit))

    def _num_drafts(self, sequence: Sequence) -> int:
        """Drafts to verify: what the device is known to hold, or the most it can hold by then."""
        held = sequence.num_speculative_tokens if sequence.in_flight else sequence.num_next_drafts
        room = sequence.limit - sequence.tokens_upper - 1
        return max(0, min(held, room, self._drafts_left, self._left - 1 - len(self._reserved)))
