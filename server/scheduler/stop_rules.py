"""Where a run of new tokens ends a sequence."""

from collections.abc import Sequence as SequenceOf

from server.engine.protocol import FinishReason
from server.scheduler.sequence import Sequence


def apply_stop_rules(sequence: Sequence, token_ids: SequenceOf[int]) -> tuple[list[int], FinishReason | None]:
    """The tokens up to the first that ends the sequence, and why it does.

    Of one token, a stop id goes before the length. Stop strings are the event loop's part.
    """
    request = sequence.request
    first_eligible = sequence.num_prompt + request.sampling.min_tokens
    kept: list[int] = []
    for position, token_id in enumerate(token_ids, start=len(sequence.token_ids)):
        kept.append(token_id)
        if token_id in request.stop_token_ids and position >= first_eligible:
            return kept, FinishReason.STOP
        if position + 1 >= sequence.limit:
            return kept, FinishReason.LENGTH
    return kept, None
