"""The committed stubs are what the .proto files give."""

from scripts.protos import stale_stubs


def test_stubs_are_fresh() -> None:
    assert stale_stubs() == []
