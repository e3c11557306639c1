"""A host proposer that knows the answers, and does what a broken one would when it is told to."""

from collections.abc import Sequence

from proposers.base import HostProposer, SequenceText


class ScriptedHostProposer(HostProposer):
    """Drafts what follows in one of the given texts, of all of which the first token differs.

    Args: nonsense: comes behind every draft, whatever was asked for.
    Attributes: fails_after: raise once a sequence has so many tokens.
    """

    def __init__(self, k: int, texts: Sequence[Sequence[int]], *, nonsense: Sequence[int] = ()) -> None:
        self._k = k
        self._by_first = {text[0]: list(text) for text in texts}
        self._nonsense = list(nonsense)
        self._known: dict[int, list[int]] = {}
        self.fails_after: int | None = None

    @property
    def num_speculative_tokens(self) -> int:
        """As many as it was made for."""
        return self._k

    def start(self, slot: int, text: SequenceText) -> None:
        """Note the text."""
        self._known[slot] = list(text.token_ids)

    def extend(self, slot: int, token_ids: Sequence[int]) -> None:
        """Note more of it; it must be one of those it knows."""
        known = self._known[slot]
        known += token_ids
        if self.fails_after is not None and len(known) >= self.fails_after:
            raise RuntimeError("told to fail")

    def propose(self, slot: int, max_drafts: int) -> list[int]:
        """What follows."""
        known = self._known[slot]
        text = self._by_first[known[0]]
        following = text[len(known) : len(known) + max_drafts] if text[: len(known)] == known else []
        return [*following, *self._nonsense]
