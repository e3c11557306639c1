"""Which node a request goes to, and what is known of a prompt without a tokenizer."""

from collections import Counter
from collections.abc import AsyncIterator

import pytest

from clients.nodes import MAX_EXTRA_LOAD, Node, NodePool
from clients.prompt_key import KEY_BYTES, beginning_of, estimated_tokens, identity_of
from clients.recent_prompts import MAX_AGE_S, MAX_PROMPTS, RecentPrompts
from clients.requests import GenerateOptions, generate_request
from clients.trace_context import with_trace_context
from protos.outrider.v1 import inference_pb2 as pb
from tests.fakes.core import Clock

TARGETS = [f"127.0.0.1:{port}" for port in range(1, 5)]
KEYS = [i.to_bytes(4, "big") for i in range(400)]


@pytest.fixture
async def pool() -> AsyncIterator[NodePool]:
    pool = NodePool(TARGETS)
    yield pool
    await pool.close()


def request(prompt: str | None = None, **options: object) -> pb.GenerateRequest:
    return generate_request(prompt, GenerateOptions(**options))  # type: ignore[typeddict-item]


def targets(pool: NodePool) -> list[str]:
    return [node.target for key in KEYS if (node := pool.pick(key))]


async def test_prompts_spread_and_stay(pool: NodePool) -> None:
    before = targets(pool)
    assert min(Counter(before).values()) > len(KEYS) / 8
    pool.nodes[2].is_up = False
    after = targets(pool)
    moved = {old for old, new in zip(before, after, strict=True) if old != new}
    assert moved == {TARGETS[2]}, "only what the lost node had goes elsewhere"


async def test_load_goes_before_what_a_node_may_know(pool: NodePool, monkeypatch: pytest.MonkeyPatch) -> None:
    favourite = pool.pick(b"key")
    assert favourite is not None
    loads = {favourite: MAX_EXTRA_LOAD}
    monkeypatch.setattr(Node, "load", property(lambda node: loads.get(node, 0)))
    assert pool.pick(b"key") is favourite
    assert pool.is_idle_enough(favourite)
    loads[favourite] += 1
    assert pool.pick(b"key") is not favourite
    assert not pool.is_idle_enough(favourite)


async def test_nobody_is_left(pool: NodePool) -> None:
    for node in pool.nodes:
        node.is_up = False
    assert pool.pick(b"key") is None
    assert pool.pick(b"key", is_up=False) is not None
    assert pool.pick(b"key", without=pool.nodes, is_up=False) is None
    assert not pool.is_idle_enough(pool.nodes[0])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (request("a" * KEY_BYTES + "b"), request("a" * KEY_BYTES + "c")),
        (request(token_ids=[7] * 256 + [8]), request(token_ids=[7] * 256 + [9])),
        (
            request(messages=[{"role": "system", "content": "x" * KEY_BYTES}, {"role": "user", "content": "b"}]),
            request(messages=[{"role": "system", "content": "x" * KEY_BYTES}, {"role": "user", "content": "c"}]),
        ),
    ],
)
def test_prompts_that_begin_alike_have_one_key(one: pb.GenerateRequest, other: pb.GenerateRequest) -> None:
    assert beginning_of(one) == beginning_of(other)
    assert identity_of(one) != identity_of(other)


def test_a_salt_makes_another_prompt() -> None:
    assert beginning_of(request("hello")) != beginning_of(request("hello", cache_salt="s"))
    assert identity_of(request("hello", cache_salt="a")) != identity_of(request("lo", cache_salt="ahel"))


def test_lengths_are_exact_for_ids() -> None:
    assert estimated_tokens(request(token_ids=[7] * 300)) == 300
    assert estimated_tokens(request("é" * 100)) == 50
    assert estimated_tokens(request(messages=[{"role": "user", "content": "x" * 395}])) == 100


async def test_prompts_are_remembered_for_a_while(pool: NodePool) -> None:
    clock = Clock()
    recent = RecentPrompts(clock)
    recent.remember(b"first", pool.nodes[0])
    assert recent.find(b"first") is pool.nodes[0]
    assert recent.find(b"other") is None
    clock.now_s = MAX_AGE_S + 1
    assert recent.find(b"first") is None
    for i in range(MAX_PROMPTS):
        recent.remember(i.to_bytes(4, "big"), pool.nodes[1])
    recent.remember((0).to_bytes(4, "big"), pool.nodes[2])
    recent.remember(b"last", pool.nodes[3])
    assert recent.find((0).to_bytes(4, "big")) is pool.nodes[2]
    assert recent.find((1).to_bytes(4, "big")) is None, "the one that was not asked for longest has made way"


def test_a_trace_is_the_callers_or_a_new_one() -> None:
    given = (("Traceparent", "00-ab-cd-00"), ("x", "y"))
    assert with_trace_context(given) == given
    (key, first), (_, second) = (with_trace_context([("x", "y")])[-1] for _ in range(2))
    assert key == "traceparent"
    version, trace_id, span_id, flags = str(first).split("-")
    assert (version, len(trace_id), len(span_id), flags) == ("00", 32, 16, "01")
    assert first != second
