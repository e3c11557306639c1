"""Suffix decoding: what followed the longest suffix of the text before, in this text or in earlier answers."""

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from proposers.base import HostProposer, SequenceText, TargetView
from proposers.config import ProposerConfig
from proposers.earlier_outputs import EarlierOutputs
from proposers.suffix_automaton import ROOT, SuffixAutomaton

CATCH_UP = 512
"""Tokens of a prompt that are taken in with each step, so that a long one stalls nobody: about half a millisecond."""


class SuffixConfig(ProposerConfig):
    """Settings of suffix decoding; names are vLLM's."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
        }
    )

    num_speculative_tokens: int = Field(default=8, ge=1, le=32, description="most draft tokens per step")
    suffix_decoding_max_tree_depth: int = Field(
        default=24, ge=1, le=1024, description="longest match that counts, in tokens"
    )
    suffix_decoding_max_cached_requests: int = Field(
        default=10_000,
        ge=0,
        le=1 << 20,
        description="earlier outputs to draft from, for requests of the same cache salt; 0 is none",
    )
    suffix_decoding_max_spec_factor: float = Field(
        default=1.0, gt=0, le=64, description="most drafts for each token of the match"
    )
    suffix_decoding_min_token_prob: float = Field(
        default=0.1, ge=0, le=1, description="least estimated probability of a draft and all those before it"
    )

    def build(self, target: TargetView) -> "SuffixProposer":
        """Suffix decoding does for every target."""
        return SuffixProposer(self)


class SuffixProposer(HostProposer):
    """Drafts what most often followed the longest suffix that occurred before.

    How far a draft goes follows from how sure it is: a long match allows more tokens, and it ends where the counts
    make what it has so far unlikely. Of this text and earlier outputs the one with more expected hits is taken.
    A text costs about 440 bytes a token until its slot is taken again; earlier outputs are bounded, see
    EarlierOutputs.
    Source: Oliaro et al. 2024, arXiv:2411.04975.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._texts: dict[int, _Text] = {}
        num_kept, depth = config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth
        self._earlier = EarlierOutputs(num_kept, num_counted=depth) if num_kept else None

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens proposed per step."""
        return self._config.num_speculative_tokens

    def reconfigure(self, config: SuffixConfig) -> None:
        """Draft by other settings at once; what is indexed already keeps the counts that it has."""
        self._config = config
        num_kept, depth = config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth
        if not num_kept:
            self._earlier = None
            for text in self._texts.values():
                text.forget_earlier()
        elif self._earlier is None:
            self._earlier = EarlierOutputs(num_kept, num_counted=depth)
        else:
            self._earlier.resize(num_kept, num_counted=depth)

    def start(self, slot: int, text: SequenceText) -> None:
        """Keep the text; it is taken in step by step."""
        self._texts[slot] = _Text(text, self._earlier, self._config.suffix_decoding_max_tree_depth)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Take tokens in, for this sequence and for those that come after it."""
        self._texts[slot].extend(token_ids)

    def propose(self, slot: int, max_drafts: int) -> list[int]:
        """What most often followed."""
        config = self._config
        best: list[int] = []
        best_score = 0.0
        for automaton, state, num_matched in self._texts[slot].matches():
            counted = min(num_matched, config.suffix_decoding_max_tree_depth)
            limit = min(max_drafts, int(config.suffix_decoding_max_spec_factor * counted))
            drafts, score = _continued(automaton, state, limit, config.suffix_decoding_min_token_prob)
            if score > best_score:
                best, best_score = drafts, score
        return best


class _Text:
    """One sequence's own index, and where it stands in those of earlier outputs."""

    def __init__(self, text: SequenceText, earlier: EarlierOutputs | None, depth: int) -> None:
        self._own = SuffixAutomaton(depth)
        self._last = ROOT
        self._pending = deque(text.token_ids)
        self._earlier = None
        if earlier is not None:
            self._earlier = earlier.begin(text.cache_salt)
            self._earlier.follow(text.token_ids[-depth:])

    def forget_earlier(self) -> None:
        self._earlier = None

    def extend(self, token_ids: Sequence[int]) -> None:
        if self._earlier is not None:
            self._earlier.extend(token_ids)
        if self._pending:
            self._pending.extend(token_ids)
            num_taken = min(len(self._pending), CATCH_UP + len(token_ids))
            token_ids = [self._pending.popleft() for _ in range(num_taken)]
        last, extend = self._last, self._own.extend
        for token_id in token_ids:
            last = extend(last, token_id)
        self._last = last

    def matches(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """The longest suffixes that something followed: index, state and tokens."""
        found = [] if self._earlier is None else self._earlier.matches()
        if not self._pending:
            following = self._own.following
            for state in self._own.suffixes(self._last):
                if following[state]:
                    found.append((self._own, state, self._own.length[state]))
                    break
        return found


def _continued(
    automaton: SuffixAutomaton, state: int, max_tokens: int, min_probability: float
) -> tuple[list[int], float]:
    """Walk on from a state while it is likely enough. Returns: tokens, and how many of them are expected to hit."""
    token_ids: list[int] = []
    probability, score = 1.0, 0.0
    while len(token_ids) < max_tokens and automaton.following[state]:
        token_id, state, share = automaton.likeliest(state)
        probability *= share
        if probability < min_probability:
            break
        token_ids.append(token_id)
        score += probability
    return token_ids, score
