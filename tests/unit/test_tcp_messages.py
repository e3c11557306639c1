"""What two nodes say to each other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.peer.layout import GroupLayout, NodeLayout, mismatch, shared_groups
from connectors.tcp.messages import (
    ALIGNMENT,
    HEADER,
    MAX_KEPT,
    MAX_SEGMENTS,
    PROTOCOL_VERSION,
    Data,
    Failed,
    Hello,
    Keep,
    Kind,
    Message,
    ProtocolError,
    Pull,
    Refused,
    Release,
    Welcome,
    leases_in_messages,
    pack,
    unpack,
    unpack_header,
)

TARGET = GroupLayout("target", "f", "float32", (2, 3, 4, 8), 768)
DRAFT = GroupLayout("draft", "d", "int8", (5,), 5)
LAYOUT = NodeLayout(4, (TARGET, DRAFT))
LEASE = "0123456789abcdef" * 2

MESSAGES: list[Message] = [
    Hello("engine-ä"),
    Welcome(LAYOUT),
    Refused("no"),
    Failed("no"),
    Pull(LEASE, 1, 2, 3, bytes(32)),
    Pull(LEASE, 0, (1 << 31) - 1, 1, b""),
    Data((1, None, (1 << 64) - 1)),
    Data((7,) * MAX_SEGMENTS),
    Keep((LEASE,) * MAX_KEPT),
    Release(()),
]


def read(data: bytes) -> Message:
    kind, nbytes = unpack_header(bytearray(data))
    return unpack(kind, data[HEADER.size : HEADER.size + nbytes])


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.kind.name)
def test_what_is_said_is_understood(message: Message) -> None:
    packed = pack(message)
    assert len(packed) % ALIGNMENT == 0
    assert read(packed) == message


@pytest.mark.parametrize("message", MESSAGES[:7], ids=lambda message: message.kind.name)
def test_no_message_is_shorter_or_longer(message: Message) -> None:
    body = message.encode()
    for wrong in (body[:-1], body + b"\0"):
        with pytest.raises(ProtocolError):
            unpack(message.kind, wrong)


@given(kind=st.sampled_from(Kind), body=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_an_error(kind: Kind, body: bytes) -> None:
    try:
        message = unpack(kind, body)
    except ProtocolError:
        return
    assert message.kind == kind
    if not isinstance(message, Hello) or message.version == PROTOCOL_VERSION:
        assert read(pack(message)) == message


@given(index=st.integers(0, len(MESSAGES) - 1), place=st.integers(0, 1 << 16), value=st.integers(0, 255))
def test_a_changed_byte_is_a_message_or_an_error(index: int, place: int, value: int) -> None:
    body = bytearray(MESSAGES[index].encode() or b"\0")
    body[place % len(body)] = value
    try:
        unpack(MESSAGES[index].kind, bytes(body))
    except ProtocolError:
        return


def test_of_another_version_only_that_is_read() -> None:
    assert Hello.decode(b"outrider\x07\x00 and whatever it says") == Hello("", 7)


def test_long_texts_are_cut() -> None:
    message = read(pack(Refused("ä" * 10_000)))
    assert isinstance(message, Refused)
    assert message.reason == "ä" * 256


def test_many_leases_take_several_messages() -> None:
    lease_ids = [f"{i:032x}" for i in range(2 * MAX_KEPT + 1)]
    packed = leases_in_messages(lease_ids, Release)
    found: list[str] = []
    while packed:
        message = read(packed)
        assert isinstance(message, Release)
        found += message.lease_ids
        packed = packed[len(pack(message)) :]
    assert found == lease_ids
    assert leases_in_messages([], Keep) == b""


@pytest.mark.parametrize(
    ("theirs", "reason"),
    [
        (TARGET, None),
        (GroupLayout("target", "g", "float32", (2, 3, 4, 8), 768), "fingerprint: f here, g there"),
        (GroupLayout("target", "f", "bfloat16", (2, 3, 4, 8), 384), "dtype: float32 here, bfloat16 there"),
        (GroupLayout("target", "f", "float32", (1, 3, 4, 8), 384), "geometry [layers, heads, 2 * head_dim]: [2, 3, 8]"),
        (GroupLayout("target", "f", "float32", (2, 3, 5, 8), 960), "shape of a block there is [2, 3, 5, 8], with 4"),
    ],
)
def test_what_does_not_fit_is_named(theirs: GroupLayout, reason: str | None) -> None:
    found = mismatch(LAYOUT, NodeLayout(4, (theirs,)))
    assert found is None if reason is None else found is not None and reason in found


def test_groups_that_are_the_same_on_both_sides_are_shared() -> None:
    other = GroupLayout("other", "o", "int8", (5,), 5)
    assert shared_groups(LAYOUT, NodeLayout(4, (TARGET, other, DRAFT))) == [(0, 0), (1, 2)]
    assert shared_groups(LAYOUT, NodeLayout(4, (TARGET, other))) == [(0, 0)]
    both = NodeLayout(4, (TARGET, DRAFT, other))
    assert shared_groups(both, NodeLayout(4, (TARGET, other, DRAFT))) == [(0, 0), (2, 1), (1, 2)], "as they are sent"
    larger = GroupLayout("target", "f", "float32", (2, 3, 8, 8), 1536)
    assert shared_groups(LAYOUT, NodeLayout(8, (larger, DRAFT))) == [(0, 0)]
