"""Suffix decoding: what followed the longest suffix of the text before, in this text or in earlier answers."""

from collections.abc import Sequence
from typing import ClassVar

from pydantic import Field

from proposers.base import HostProposer, SequenceText, TargetView
from proposers.config import ProposerConfig
from proposers.earlier_outputs import EarlierOutputs, OutputCursor
from proposers.suffix_automaton import ROOT, SuffixAutomaton
from server.plan import MAX_PROPOSED

CATCH_UP = 2048
"""Tokens of prompts, and of what came while drafts were off, that are taken in with a step: one or two milliseconds."""
LEAST_CATCH_UP = 1 + MAX_PROPOSED
"""Of each sequence in any case, and of its output for others: what a step may bring."""
OTHERS_CATCH_UP = 256
"""For others, of outputs of sequences that nothing is drafted for any more."""


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

    Tokens are noted as they settle, and taken in when a draft is wanted, some with each step: while drafts are off
    they cost next to nothing. Until all are, the end of a text is looked for in what is.

    A text costs about 440 bytes a token until its slot is taken again; earlier outputs are bounded, see
    EarlierOutputs.
    Source: Oliaro et al. 2024, arXiv:2411.04975.
    """

    def __init__(self, config: SuffixConfig) -> None:
        self._config = config
        self._texts: dict[int, _Text] = {}
        num_kept, depth = config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth
        self._earlier = EarlierOutputs(num_kept, depth=depth) if num_kept else None
        self._noted: set[int] = set()  # slots that were told of tokens and not drafted for since
        self._drafted: set[int] = set()  # slots that were drafted for with this step
        self._left = CATCH_UP  # of this step

    @property
    def num_speculative_tokens(self) -> int:
        """Most tokens proposed per step."""
        return self._config.num_speculative_tokens

    def reconfigure(self, config: SuffixConfig) -> None:
        """Draft by other settings at once; what is indexed already keeps its depth."""
        self._config = config
        num_kept, depth = config.suffix_decoding_max_cached_requests, config.suffix_decoding_max_tree_depth
        if not num_kept:
            self._earlier = None
            for text in self._texts.values():
                text.output = None
        elif self._earlier is None:
            self._earlier = EarlierOutputs(num_kept, depth=depth)
        else:
            self._earlier.resize(num_kept, depth=depth)

    def start(self, slot: int, text: SequenceText) -> None:
        """Keep the text; what is left of the one before it waits for those that come."""
        ended = self._texts.get(slot)
        if ended is not None and ended.output is not None and self._earlier is not None:
            self._earlier.end(ended.output)
        depth, output = self._config.suffix_decoding_max_tree_depth, None
        if self._earlier is not None:
            output = OutputCursor(self._earlier, text.cache_salt, text.token_ids[-depth:])
        self._texts[slot] = _Text(text.token_ids, output, depth)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note tokens, for this sequence and for those that come after it."""
        self._texts[slot].note(token_ids)
        self._noted.add(slot)

    def propose(self, slot: int, max_drafts: int) -> list[int]:
        """What most often followed."""
        if slot in self._drafted or not self._drafted:
            self._begin_step()
        self._drafted.add(slot)
        self._noted.discard(slot)
        text = self._texts[slot]
        self._left -= text.take_in(max(self._left, LEAST_CATCH_UP))
        config = self._config
        best: list[int] = []
        best_score = 0.0
        for automaton, state, num_matched in text.matches():
            counted = min(num_matched, config.suffix_decoding_max_tree_depth)
            limit = min(max_drafts, int(config.suffix_decoding_max_spec_factor * counted))
            if limit <= best_score:
                continue
            drafts, score = automaton.continued(state, limit, config.suffix_decoding_min_token_prob)
            if score > best_score:
                best, best_score = drafts, score
        return best

    def _begin_step(self) -> None:
        """No sequence is drafted for twice in a step. Those that were not in the last one may have ended."""
        others = self._noted - self._drafted
        self._drafted.clear()
        self._left = CATCH_UP
        if self._earlier is None:
            return
        left = OTHERS_CATCH_UP - self._earlier.take_in_ended(OTHERS_CATCH_UP)
        for slot in others:
            output = self._texts[slot].output
            left -= 0 if output is None else output.take_in(left)
            if left <= 0:
                break
            self._noted.discard(slot)


class _Text:
    """One sequence's own index, and its place among earlier outputs.

    Attributes:
        output: None while earlier outputs are of no interest.
    """

    def __init__(self, token_ids: Sequence[int], output: OutputCursor | None, depth: int) -> None:
        self.output = output
        self._own = SuffixAutomaton(depth)
        self._last = ROOT
        self._waiting = list(token_ids)

    def note(self, token_ids: Sequence[int]) -> None:
        """Tokens to be taken in later."""
        self._waiting += token_ids
        if self.output is not None:
            self.output.note(token_ids)

    def take_in(self, max_tokens: int) -> int:
        """Index what was noted first, at most so many tokens. Returns: how many.

        What others may find of it can wait: it looks for itself among theirs whatever is taken in.
        """
        token_ids = self._waiting[:max_tokens]
        del self._waiting[:max_tokens]
        self._last = self._own.extend(self._last, token_ids)
        if self.output is not None:
            self.output.take_in(LEAST_CATCH_UP)
        return len(token_ids)

    def matches(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """The longest suffixes that something followed: index, state and tokens."""
        found = [] if self.output is None else self.output.matches()
        if match := self._own.longest_followed(self._last, self._own.length[self._last], self._waiting):
            found.append((self._own, *match))
        return found
