"""Where a run of new tokens ends a sequence."""

from server.engine.protocol import FinishReason
from server.scheduler.sequence import Sequence


def apply_stop_rules(sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
    """The tokens up to the first that ends the sequence, and why it does.

    Of one token, a stop id goes before the length. Stop strings are the event loop's part.
    """
    num_before = len(sequence.token_ids)
    stop_token_ids = sequence.request.stop_token_ids
    if num_before + len(token_ids) < sequence.limit and stop_token_ids.isdisjoint(token_ids):
        return token_ids, None  # nearly always, at no cost for each token
    # A grammar's masks keep the minimum themselves, and let it go where the grammar is at its end before.
    first_eligible = sequence.num_prompt + (0 if sequence.is_guided else sequence.request.sampling.min_tokens)
    for count, token_id in enumerate(token_ids, start=1):
        num_tokens = num_before + count
        if token_id in stop_token_ids and num_tokens > first_eligible:
            return token_ids[:count], FinishReason.STOP
        if num_tokens >= sequence.limit:
            return token_ids[:count], FinishReason.LENGTH
    return token_ids, None
