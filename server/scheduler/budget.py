"""How a step's tokens are shared out."""

from collections.abc import Sequence as SequenceOf

from server.config import SchedulerConfig
from server.scheduler.sequence import InFlight, Sequence

_ONE_TOKEN = InFlight(num_query=1, num_drafts=0, is_sampling=True)


class TokenBudget:
    """The tokens of one step.

    Each decoding sequence is sure of one token, so that no prompt can stall it. Drafts may use
    what is left, but only half of it while there are prompts to compute.
    """

    def __init__(self, config: SchedulerConfig, running: SequenceOf[Sequence], *, has_waiting: bool) -> None:
        self._left = config.max_num_batched_tokens
        self._chunk_limit = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._partial_left = config.max_num_partial_prefills
        self._reserved = sum([sequence.tokens_upper - sequence.computed_upper == 1 for sequence in running])
        has_prompts = has_waiting or self._reserved < len(running)
        spare = max(0, self._left - self._reserved)
        self._drafts_left = spare // 2 if has_prompts else spare

    def offer(self, sequence: Sequence, num_allowed: int) -> InFlight | None:
        """The row a running sequence may have; None if it has nothing to do or no tokens are left. Once for each.

        Args: num_allowed: most drafts it may verify.
        """
        num_pending = sequence.tokens_upper - sequence.computed_upper
        if num_pending != 1:
            return self.offer_prompt(num_pending)
        self._reserved -= 1
        if sequence.tokens_lower >= sequence.limit or self._left < 1:
            return None  # what is in flight ends it, or it must wait
        if sequence.in_flight and (sequence.is_guided or (num_allowed and sequence.drafts_on_host)):
            return None  # its masks or drafts are made once that has settled
        # Drafts to verify: what the device is known to hold, or the most it can hold by then.
        held = sequence.num_speculative_tokens if sequence.in_flight else sequence.num_next_drafts
        if not num_allowed:
            return _ONE_TOKEN
        room = sequence.limit - sequence.tokens_upper - 1
        num_drafts = max(0, min(held, num_allowed, room, self._drafts_left, self._left - 1 - self._reserved))
        return InFlight(1 + num_drafts, num_drafts, True, num_allowed)

    def forgo(self, sequence: Sequence) -> None:
        """Give back what a running sequence is sure of, as it is about to be preempted; in place of an offer."""
        self._reserved -= sequence.tokens_upper - sequence.computed_upper == 1

    def offer_prompt(self, num_pending: int) -> InFlight | None:
        """The row for that many known tokens to compute, or a chunk of them; None if neither may run."""
        num_query = min(num_pending, self._left - self._reserved, self._chunk_limit)
        if num_query == num_pending:
            return InFlight(num_query, 0, is_sampling=True)
        if num_query > 0 and self._partial_left > 0:
            return InFlight(num_query, 0, is_sampling=False)
        return None

    def take(self, row: InFlight) -> None:
        """Spend an offer."""
        self._left -= row.num_query
        self._drafts_left -= row.num_drafts
        if not row.is_sampling:
            self._partial_left -= 1
