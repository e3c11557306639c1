"""What the fingerprint of KV follows from, in a form that people compare: name=value, with spaces in between."""

from collections.abc import Mapping

MAX_CHARS = 512


def describe(parts: Mapping[str, object]) -> str:
    """The parts as text. Neither names nor values have spaces."""
    return " ".join(f"{name}={value}" for name, value in parts.items())


def differences(ours: str, theirs: str) -> str:
    """The parts that are not the same, with both values; empty if there are none, or if either side is unknown.

    Args: theirs: from another node, not trusted; no more than MAX_CHARS of it are looked at.
    """
    here, there = _parts(ours), _parts(theirs[:MAX_CHARS])
    if not here or not there:
        return ""
    names = [*here, *(name for name in there if name not in here)]
    return "; ".join(
        f"{name} {there.get(name, 'unknown')} there, {here.get(name, 'unknown')} here"
        for name in names
        if here.get(name) != there.get(name)
    )


def _parts(description: str) -> dict[str, str]:
    pairs = (word.partition("=") for word in description.split())
    return {name: value for name, equals, value in pairs if equals}
