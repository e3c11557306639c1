"""How much of a text repeats itself: such texts are easy to foretell, and say little of a head."""

from collections.abc import Sequence

NGRAM = 8
MOST_REPEATED = 0.2
"""Outputs with a larger share of repeated n-grams are left out where it is said so."""


def repeated_share(token_ids: Sequence[int]) -> float:
    """Of its 8-grams, the share that occurred before in the same text; 0 if it is too short to have any."""
    ngrams = [tuple(token_ids[start : start + NGRAM]) for start in range(len(token_ids) - NGRAM + 1)]
    return 1 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
