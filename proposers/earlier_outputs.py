"""What was generated for earlier requests, and for those that run now, in bounded memory."""

from collections import deque
from collections.abc import Sequence

from proposers.suffix_automaton import ROOT, SuffixAutomaton

MAX_HALF_TOKENS = 1 << 17
"""About 55 MB of states."""


class EarlierOutputs:
    """Two halves of the same size, an older and a younger one; once the younger is full, the older is dropped.

    Outputs of different cache salts never meet. Ended ones that are not taken in yet wait, as many as a half holds.
    """

    def __init__(self, max_requests: int, *, depth: int) -> None:
        """Args: max_requests: outputs to keep, both halves together. depth: see SuffixAutomaton."""
        self._half_requests = -(-max_requests // 2)
        self._depth = depth
        self._num_requests = self._num_tokens = 0
        self._young: dict[str, SuffixAutomaton] = {}
        self._old: dict[str, SuffixAutomaton] = {}
        self._ended: deque[OutputCursor] = deque()
        self._num_waiting = 0

    def resize(self, max_requests: int, *, depth: int) -> None:
        """Keep as many from now on; what is too much goes as others come. Args: see __init__."""
        self._half_requests = -(-max_requests // 2)
        self._depth = depth
        self._make_room(0, 0)

    def written(self, cache_salt: str, num_tokens: int, *, is_new: bool) -> SuffixAutomaton:
        """Where so many tokens are to be added. Args: is_new: whether they are the first of an output."""
        self._make_room(int(is_new), num_tokens)
        automaton = self._young.get(cache_salt)
        if automaton is None:
            automaton = self._young[cache_salt] = SuffixAutomaton(self._depth)
        return automaton

    def older(self, cache_salt: str) -> SuffixAutomaton | None:
        """Where to look besides."""
        return self._old.get(cache_salt)

    def end(self, output: "OutputCursor") -> None:
        """Nothing is added to an output any more; what it noted is taken in later, unless too much comes after it."""
        if not output.num_waiting:
            return
        self._ended.append(output)
        self._num_waiting += output.num_waiting
        while self._num_waiting > MAX_HALF_TOKENS or len(self._ended) > self._half_requests:
            self._num_waiting -= self._ended.popleft().num_waiting

    def take_in_ended(self, max_tokens: int) -> int:
        """Take in what waits of ended outputs, the first ones first. Returns: how many tokens."""
        left = max_tokens
        while self._ended and left > 0:
            left -= self._ended[0].take_in(left)
            if not self._ended[0].num_waiting:
                self._ended.popleft()
        self._num_waiting -= max_tokens - left
        return max_tokens - left

    def _make_room(self, num_requests: int, num_tokens: int) -> None:
        self._num_requests += num_requests
        self._num_tokens += num_tokens
        if self._num_requests > self._half_requests or self._num_tokens > MAX_HALF_TOKENS:
            self._old, self._young = self._young, {}
            self._num_requests, self._num_tokens = num_requests, num_tokens


class OutputCursor:
    """One sequence among the outputs: it is added to them, and looks for its own suffixes in them.

    In the younger half its own text, which is there, leads to them; in the older one it is followed.
    """

    def __init__(self, outputs: EarlierOutputs, cache_salt: str, prompt_end: Sequence[int]) -> None:
        """Args: prompt_end: the last tokens of its prompt, which are looked for, not added."""
        self._outputs = outputs
        self._salt = cache_salt
        self._prompt_end = prompt_end
        self._waiting: list[int] = []
        self._young: SuffixAutomaton | None = None
        self._last = ROOT
        self._old: SuffixAutomaton | None = None
        self._place = ROOT, 0

    @property
    def num_waiting(self) -> int:
        """Tokens that are noted, not taken in."""
        return len(self._waiting)

    def note(self, token_ids: Sequence[int]) -> None:
        """Tokens of the output, to be taken in later."""
        self._waiting += token_ids

    def take_in(self, max_tokens: int) -> int:
        """Add what was noted first, at most so many tokens. Returns: how many."""
        token_ids = self._waiting[:max_tokens]
        if not token_ids:
            return 0
        del self._waiting[:max_tokens]
        young = self._outputs.written(self._salt, len(token_ids), is_new=self._young is None)
        old = self._outputs.older(self._salt)
        if old is not None:
            if old is not self._old:
                is_own = old is self._young  # until now
                self._place = (self._last, old.length[self._last]) if is_own else old.follow(ROOT, 0, self._prompt_end)
            self._place = old.follow(*self._place, token_ids)
        if young is not self._young:
            self._last = young.beginning(self._prompt_end)
        self._last = young.extend(self._last, token_ids)
        self._young, self._old, self._prompt_end = young, old, ()
        return len(token_ids)

    def matches(self) -> list[tuple[SuffixAutomaton, int, int]]:
        """The longest suffixes that something followed: index, state and tokens; none before anything is taken in."""
        found = []
        old, young, waiting = self._old, self._young, self._waiting
        if old is not None and (match := old.longest_followed(*self._place, waiting)):
            found.append((old, *match))
        if young is not None and (match := young.longest_followed(self._last, young.length[self._last], waiting)):
            found.append((young, *match))
        return found
