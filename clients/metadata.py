"""Metadata of calls: what gRPC would refuse without a word about which key it was."""

import re
from collections.abc import Iterable, Mapping
from typing import cast

from clients.errors import InvalidRequestError

Metadata = Iterable[tuple[str, str | bytes]]
"""Keys and values; those of keys that end in -bin are bytes."""

_KEY = re.compile(r"[0-9a-z_.-]+")
_VALUE = re.compile(r"[ -~]*")


def checked_metadata(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """The metadata, if a call can carry it. Raises: InvalidRequestError naming the key that it cannot."""
    if isinstance(metadata, str | bytes | Mapping):
        raise InvalidRequestError.of("metadata", f"must be pairs of a key and a value, got {metadata!r}")
    given = tuple(metadata)
    for pair in cast("tuple[object, ...]", given):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InvalidRequestError.of("metadata", f"must be pairs of a key and a value, got {pair!r}")
    for key, value in given:
        field = f"metadata[{key!r}]"
        if not _KEY.fullmatch(key):
            raise InvalidRequestError.of(field, "keys are of lower-case letters, digits, '_', '-' and '.'")
        if key.endswith("-bin"):
            if not isinstance(value, bytes):
                raise InvalidRequestError.of(field, "the value of a key that ends in -bin must be bytes")
        elif not isinstance(value, str) or not _VALUE.fullmatch(value):
            raise InvalidRequestError.of(field, f"the value must be printable ASCII text, got {value!r}")
    return given
