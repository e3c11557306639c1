"""Every substring of some texts, and how often it occurred, in time and memory linear in their length.

A state stands for substrings that end at the same places; its longest one is `length` tokens. Its link leads to the
state of the longest suffix that ends at more places. So the longest suffix of a text that occurred before, and what
followed it there, is found without searching.
Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", for many texts at a time.
"""

from collections.abc import Iterator

ROOT = 0
"""The state of the empty string: where each text begins."""


class SuffixAutomaton:
    """Grows by one token at the end of any of its texts; a text is known by its last state, which the caller keeps.

    A token adds at most two states, of about 300 bytes each. Counts are kept for the longest `num_counted`
    suffixes of each place, so that a text that repeats one token stays as cheap as any other.

    Attributes:
        following: of each state, the state that each next token leads to.
        length: of each state, tokens of its longest string.
    """

    def __init__(self, num_counted: int) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.length = [0]
        self._link = [-1]
        self._count = [0]
        self._num_counted = num_counted

    def extend(self, last: int, token_id: int) -> int:
        """Append a token to the text whose last state is given. Returns: the new one."""
        following, length = self.following, self.length
        known = following[last].get(token_id)
        if known is not None:  # another text went the same way
            new = known if length[known] == length[last] + 1 else self._split(last, token_id, known)
        else:
            new = self._add({}, length[last] + 1, ROOT, 0)
            state = last
            while state >= 0 and token_id not in following[state]:
                following[state][token_id] = new
                state = self._link[state]
            if state >= 0:
                known = following[state][token_id]
                is_whole = length[known] == length[state] + 1
                self._link[new] = known if is_whole else self._split(state, token_id, known)
        state, left = new, self._num_counted
        while state > ROOT and left:
            self._count[state] += 1
            state, left = self._link[state], left - 1
        return new

    def follow(self, state: int, num_matched: int, token_id: int) -> tuple[int, int]:
        """From the longest suffix of a text that occurs here to that of the text with one more token.

        Args: num_matched: tokens of that suffix, at most the state's length.
        Returns: its state and tokens.
        """
        while state > ROOT and num_matched <= self.length[self._link[state]]:
            state = self._link[state]  # the state was split since
        while token_id not in self.following[state]:
            if state == ROOT:
                return ROOT, 0
            state = self._link[state]
            num_matched = self.length[state]
        return self.following[state][token_id], num_matched + 1

    def suffixes(self, state: int) -> Iterator[int]:
        """The state itself, then those of its shorter suffixes, the longest first, without the empty one."""
        while state > ROOT:
            yield state
            state = self._link[state]

    def likeliest(self, state: int) -> tuple[int, int, float]:
        """What followed most often. Returns: the token, its state, and its share; the state must have followers."""
        counts = self._count
        followers = self.following[state]
        if len(followers) == 1:
            ((token_id, after),) = followers.items()
            return token_id, after, 1.0
        total = best = 0
        token_id = after = -1
        for candidate, reached in followers.items():
            count = counts[reached] or 1
            total += count
            if count >= best:  # of equals the one that came last
                best, token_id, after = count, candidate, reached
        return token_id, after, best / total

    def _split(self, state: int, token_id: int, known: int) -> int:
        """Give the shorter strings of a state a state of their own, as they end at more places from now on."""
        clone = self._add(dict(self.following[known]), self.length[state] + 1, self._link[known], self._count[known])
        self._link[known] = clone
        while state >= 0 and self.following[state].get(token_id) == known:
            self.following[state][token_id] = clone
            state = self._link[state]
        return clone

    def _add(self, following: dict[int, int], length: int, link: int, count: int) -> int:
        self.following.append(following)
        self.length.append(length)
        self._link.append(link)
        self._count.append(count)
        return len(self.length) - 1
