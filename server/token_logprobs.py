"""Log probabilities of tokens, as they pass from the worker to the caller, and from node to node."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its natural-log probability under the raw distribution, its rank from 1."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The token at a position and the likeliest ones there, best first."""

    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]
