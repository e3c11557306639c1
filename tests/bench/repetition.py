"""Text that repeats, as logs, tables and edited code do."""

import random

_NAMES = ("Anna", "Boris", "Chen", "Dilek", "Emeka", "Farah", "Goran", "Hana")
_PLACES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Kyoto", "Quito", "Tallinn", "Perth")
_VERBS = ("opened", "closed", "renamed", "copied", "moved", "deleted", "printed", "shared")


def repeating_text(seed: int, num_words: int) -> str:
    """A log whose lines come again and again, of at least `num_words` words; others for other seeds."""
    source = random.Random(seed)
    lines = [
        f"{source.choice(_NAMES)} in {source.choice(_PLACES)} {source.choice(_VERBS)} file {source.randrange(100)}."
        for _ in range(2)
    ]
    once = "\n".join(lines) + "\n"
    return once * -(-num_words // len(once.split()))
