"""Every substring of some texts, and how often it occurred, in time and memory linear in their length.

A state stands for substrings that end at the same places; its longest one is `length` tokens. Its link leads to the
state of the longest suffix that ends at more places. So the longest suffix of a text that occurred before, and what
followed it there, is found without searching.
Source: Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text", for many texts at a time.
"""

from collections.abc import Iterable, Sequence

ROOT = 0
"""The state of the empty string: where each text begins."""


class SuffixAutomaton:
    """Grows by tokens at the end of any of its texts; a text is known by its last state, which the caller keeps.

    A token adds at most two states, of about 300 bytes each. Only strings of up to `depth` tokens are sure to be
    there, with what followed them and how often: a text that has said more tokens than that before goes on as if it
    had begun there, and adds nothing until it says something else.

    Attributes:
        following: of each state, the state that each next token leads to.
        length: of each state, tokens of its longest string.
    """

    def __init__(self, depth: int) -> None:
        self.following: list[dict[int, int]] = [{}]
        self.length = [0]
        self._link = [-1]
        self._count = [0]
        self._depth = depth

    def extend(self, last: int, token_ids: Iterable[int]) -> int:
        """Append tokens to the text whose last state is given. Returns: the new one."""
        following, length, link, count, depth = self.following, self.length, self._link, self._count, self._depth
        for token_id in token_ids:
            followers = following[last]
            new = followers.get(token_id)
            if new is None:
                new = followers[token_id] = self._add({}, length[last] + 1, ROOT, 0)
                state = link[last]
                while state >= 0:
                    followers = following[state]
                    known = followers.get(token_id)
                    if known is not None:
                        is_whole = length[known] == length[state] + 1
                        link[new] = known if is_whole else self._split(state, token_id, known)
                        break
                    followers[token_id] = new
                    state = link[state]
            elif length[new] != length[last] + 1:  # another text went the same way
                new = self._split(last, token_id, new)
            state = new
            while state > ROOT:
                count[state] += 1
                state = link[state]
            last = link[new] if length[link[new]] >= depth else new
        return last

    def follow(self, state: int, num_matched: int, token_ids: Iterable[int]) -> tuple[int, int]:
        """From the longest suffix of a text that occurs here to that of the text with more tokens.

        Args: num_matched: tokens of that suffix, at most the state's length.
        Returns: its state and tokens.
        """
        following, length, link = self.following, self.length, self._link
        for token_id in token_ids:
            while state > ROOT and num_matched <= length[link[state]]:
                state = link[state]  # the state was split since
            after = following[state].get(token_id)
            while after is None and state > ROOT:
                state = link[state]
                num_matched = length[state]
                after = following[state].get(token_id)
            state, num_matched = (ROOT, 0) if after is None else (after, num_matched + 1)
        return state, num_matched

    def beginning(self, token_ids: Iterable[int]) -> int:
        """The state behind which a text may begin that follows these tokens: their longest suffix that fills one."""
        state, num_matched = self.follow(ROOT, 0, token_ids)
        return state if num_matched == self.length[state] else self._link[state]

    def longest_followed(self, state: int, num_matched: int, ahead: Sequence[int]) -> tuple[int, int] | None:
        """The longest suffix of a text that something followed, or one of `depth` tokens, as more do not count.

        Args: state, num_matched: as of `follow`. ahead: tokens behind those, which the text goes on with.
        Returns: its state and tokens.
        """
        if len(ahead) >= self._depth:
            state, num_matched = self.follow(ROOT, 0, ahead[-self._depth :])
        elif ahead:
            state, num_matched = self.follow(state, num_matched, ahead)
        while state > ROOT:
            if self.following[state]:
                return state, min(num_matched, self.length[state])
            state = self._link[state]
        return None

    def continued(self, state: int, max_tokens: int, min_probability: float) -> tuple[list[int], float]:
        """What followed most often, and then again, while it is likely enough.

        Returns: tokens, and how many of them are expected to be right.
        """
        following, length, link, count, depth = self.following, self.length, self._link, self._count, self._depth
        token_ids: list[int] = []
        probability, score = 1.0, 0.0
        while len(token_ids) < max_tokens:
            followers = following[state]
            while not followers and length[link[state]] >= depth:  # a text has ended here that had said it before
                state = link[state]
                followers = following[state]
            if not followers:
                break
            total = best = 0
            token_id = ROOT
            for candidate, reached in followers.items():
                occurred = count[reached]
                total += occurred
                if occurred >= best:  # of equals the one that came last
                    best, token_id, state = occurred, candidate, reached
            probability *= best / total
            if probability < min_probability:
                break
            token_ids.append(token_id)
            score += probability
        return token_ids, score

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
