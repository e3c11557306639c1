"""What the host knows of the sequence in a slot."""

from dataclasses import dataclass

from server.plan import SequenceStart
from server.request import Request, SamplingParams


@dataclass(frozen=True, slots=True)
class SlotInfo:
    """Facts of one sequence, for as long as it is in the batch; looked at in every step, so worked out once.

    Attributes:
        is_drafting: whether drafts are proposed for it.
        is_noisy, is_seeded: whether it is sampled rather than greedy, and whether by a seed.
        is_penalised, is_reporting: whether it has penalties, wants log probabilities.
        is_plain: whether it has no rules besides a grammar and reports nothing: what a captured segment can do.
    """

    params: SamplingParams
    num_prompt: int
    is_drafting: bool
    is_noisy: bool
    is_seeded: bool
    is_penalised: bool
    is_reporting: bool
    is_plain: bool

    @classmethod
    def of(cls, start: SequenceStart) -> "SlotInfo":
        """The facts of a sequence that enters the batch."""
        params = start.request.sampling
        is_reporting = params.logprobs is not None
        return cls(
            params=params,
            num_prompt=start.num_prompt,
            is_drafting=start.num_speculative_tokens > 0,
            is_noisy=not params.is_greedy,
            is_seeded=not params.is_greedy and params.seed is not None,
            is_penalised=params.has_penalties,
            is_reporting=is_reporting,
            is_plain=not (is_reporting or has_rules(start.request)),
        )


def has_rules(request: Request) -> bool:
    """Whether some of a request's logits are masked or shifted: biases, allowed ids, bad words, early stops."""
    params = request.sampling
    return bool(
        params.logit_bias
        or params.allowed_token_ids is not None
        or request.bad_words_token_ids
        or masks_early_stops(request)
    )


def masks_early_stops(request: Request) -> bool:
    """Whether stop ids are masked before a minimum of tokens; a grammar's masks see to that themselves."""
    return bool(request.sampling.min_tokens > 0 and request.stop_token_ids and request.grammar is None)
