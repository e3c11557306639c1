"""Metadata that a call cannot carry is refused by its key, before anything is sent."""

from collections.abc import Callable
from typing import Any

import grpc
import pytest

from clients.aio import AsyncClient
from clients.disaggregated import DisaggregatedClient
from clients.errors import InvalidRequestError
from clients.metadata import checked_metadata
from clients.sync import Client
from protos.outrider.v1 import inference_pb2 as pb
from protos.outrider.v1.inference_pb2_grpc import InferenceStub

NOBODY = "unix:/none/of/this"
LEGAL: list[tuple[str, str | bytes]] = [
    ("traceparent", "00-aa-bb-01"),
    ("x_1.y", ""),
    ("x", " ~ with spaces "),
    ("x-bin", b"\x00\xff"),
]
ILLEGAL: list[tuple[str, str | bytes]] = [
    ("", "a"),
    ("X-Tenant", "a"),
    ("a b", "a"),
    (":path", "a"),
    ("größe", "a"),
    ("x\n", "a"),
    ("x", "a\n"),
    ("x", "größe"),
    ("x", b"\xff"),
    ("x-bin", "text"),
]


def outcome(pair: tuple[str, str | bytes]) -> grpc.StatusCode | type[TypeError]:
    """What gRPC itself makes of it."""
    with grpc.insecure_channel(NOBODY) as channel:
        try:
            InferenceStub(channel).GetStats(pb.GetStatsRequest(), metadata=(pair,))
        except grpc.RpcError as error:
            return error.code()
        except TypeError:
            return TypeError
    pytest.fail("nobody answers there")


@pytest.mark.parametrize("pair", LEGAL)
def test_what_grpc_takes_is_taken(pair: tuple[str, str | bytes]) -> None:
    assert checked_metadata([pair]) == (pair,)
    assert outcome(pair) == grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("pair", ILLEGAL)
def test_what_grpc_refuses_is_refused_by_its_key(pair: tuple[str, str | bytes]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        checked_metadata([*LEGAL, pair])
    assert [violation.field for violation in caught.value.violations] == [f"metadata[{pair[0]!r}]"]
    assert outcome(pair) in (grpc.StatusCode.INTERNAL, TypeError)


@pytest.mark.parametrize("metadata", [{"a": "b"}, "ab", ["ab"], [("a",)], [(1, "b")]])
def test_what_is_no_list_of_pairs_is_told_so(metadata: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"^metadata: must be pairs of a key and a value, got "):
        checked_metadata(metadata)


@pytest.mark.parametrize(
    "make",
    [Client, AsyncClient, lambda target: DisaggregatedClient(prefill=[target], decode=[target])],
    ids=["sync", "aio", "disaggregated"],
)
async def test_clients_refuse_it(make: Callable[[str], Client | AsyncClient | DisaggregatedClient]) -> None:
    client = make(NOBODY)
    with pytest.raises(InvalidRequestError, match=r"^metadata\['X-Tenant'\]: keys are of lower-case letters"):
        client.generate("hello", metadata=[("X-Tenant", "a")])
    if isinstance(client, Client):
        client.close()
    else:
        await client.close()
