"""What was generated for earlier requests, and for those that run now, in bounded memory."""

from collections.abc import Sequence

from proposers.suffix_automaton import ROOT, SuffixAutomaton

MAX_HALF_TOKENS = 1 << 17
"""About 55 MB of states."""


class EarlierOutputs:
    """Two halves of the same size, an older and a younger one; once the younger is full, the older is dropped.

    Outputs of different cache salts never meet.
    """

    def __init__(self, max_requests: int, *, num_counted: int) -> None:
        """Args: max_requests: outputs to keep, both halves together. num_counted: see SuffixAutomaton."""
        self._half_requests = -(-max_requests // 2)
        self._num_counted = num_counted
        self._num_requests = self._num_tokens = 0
        self._young: dict[str, SuffixAutomaton] = {}
        self._old: dict[str, SuffixAutomaton] = {}

    def resize(self, max_requests: int, *, num_counted: int) -> None:
        """Keep as many from now on; what is too much goes as others come. Args: see __init__."""
        self._half_requests = -(-max_requests // 2)
        self._num_counted = num_counted
        self._make_room(0, 0)

    def begin(self, cache_salt: str) -> "OutputCursor":
        """A new output, and the place of its text among all."""
        self._make_room(1, 0)
        return OutputCursor(self, cache_salt)

    def written(self, cache_salt: str, num_tokens: int) -> SuffixAutomaton:
        """Where so many tokens are to be added."""
        self._make_room(0, num_tokens)
        automaton = self._young.get(cache_salt)
        if automaton is None:
            automaton = self._young[cache_salt] = SuffixAutomaton(self._num_counted)
        return automaton

    def read(self, cache_salt: str) -> list[SuffixAutomaton]:
        """Where to look, the older first."""
        return [half[cache_salt] for half in (self._old, self._young) if cache_salt in half]

    def _make_room(self, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        if self._num_requests > self._half_requests or self._num_tokens > MAX_HALF_TOKENS:
            self._old, self._young = self._young, {}
            self._num_requests, self._num_tokens = num_requests, num_tokens


class OutputCursor:
    """One sequence among the outputs: it is added to them, and looks for its own suffixes in them."""

    def __init__(self, outputs: EarlierOutputs, cache_salt: str) -> None:
        self._outputs = outputs
        self._salt = cache_salt
        self._written: SuffixAutomaton | None = None
        self._last = ROOT
        self._places: list[tuple[SuffixAutomaton, int, int]] = []

    def follow(self, token_ids: Sequence[int]) -> None:
        """Tokens of the prompt: they are looked for, not added."""
        places = []
        for automaton in self._outputs.read(self._salt):
            state, num_matched = next((place[1:] for place in self._places if place[0] is automaton), (ROOT, 0))
            for token_id in token_ids:
                state, num_matched = automaton.follow(state, num_matched, token_id)
            places.append((automaton, state, num_matched))
        self._places = places

    def extend(self, token_ids: Sequence[int]) -> None:
        """Tokens of the output."""
        self.follow(token_ids)  # first, or the text would find itself
        automaton = self._outputs.written(self._salt, len(token_ids))
        if automaton is not self._written:
            self._written, self._last = automaton, ROOT
        for token_id in token_ids:
            self._last = automaton.extend(self._last, token_id)

    def matches(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """The longest suffixes that something followed: index, state and tokens."""
        found = []
        for automaton, place, num_matched in self._places:
            for state in automaton.suffixes(place):
                if automaton.following[state]:
                    found.append((automaton, state, min(num_matched, automaton.length[state])))
                    break
        return found
