"""What a caller may claim another node has done."""

from dataclasses import replace

import pytest

from server.continuation_check import MAX_HANDLE_CHARS, check_continuation
from server.errors import InvalidRequest
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.request import Request, SamplingParams
from server.token_logprobs import PositionLogprobs, TokenLogprob

STATE = ChoiceState((5, 6), 2**63 - 1, num_delivered_tokens=1)
SOURCE = KVHandle("tcp", "engine", "127.0.0.1:7000", "lease", 32, (4, 5), 16, "ab")
POSITION = PositionLogprobs(TokenLogprob(5, -1.0, 1), ())


def request(continuation: Continuation, sampling: SamplingParams, *stop_token_ids: int) -> Request:
    """With 40 prompt tokens, for a vocabulary of 100."""
    return Request(
        request_id="r",
        prompt_token_ids=tuple(range(40)),
        sampling=sampling,
        stop_token_ids=frozenset(stop_token_ids),
        continuation=continuation,
    )


def refused(continuation: Continuation, *stop_token_ids: int, **sampling: int | None) -> list[str]:
    """The fields that are refused."""
    params = SamplingParams(**{"max_tokens": 8, "n": len(continuation.choices), **sampling})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as caught:
        check_continuation(request(continuation, params, *stop_token_ids), 100)
    return [violation.field for violation in caught.value.violations]


@pytest.mark.parametrize(
    ("continuation", "sampling"),
    [
        (Continuation((STATE,)), SamplingParams(max_tokens=3)),
        (Continuation((replace(STATE, key=None), ChoiceState((), None))), SamplingParams(n=2)),
        (Continuation((None, STATE), SOURCE), SamplingParams(n=2)),
        (Continuation((STATE,), replace(SOURCE, block_ids=())), SamplingParams()),
        (Continuation((STATE,), replace(SOURCE, num_tokens=0, block_ids=(), block_size=0)), SamplingParams()),
        (Continuation((replace(STATE, logprobs=(POSITION,)),)), SamplingParams(logprobs=0)),
    ],
)
def test_what_nodes_make_is_taken(continuation: Continuation, sampling: SamplingParams) -> None:
    check_continuation(request(continuation, sampling), 100)


def test_choices_are_those_of_the_request() -> None:
    assert refused(Continuation((STATE, STATE)), n=3) == ["continuation.choices"]
    assert refused(Continuation((None, None))) == ["continuation.choices"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"token_ids": (5,) * 8}, "token_ids"),
        ({"token_ids": (5, 100)}, "token_ids[1]"),
        ({"key": 2**63}, "key"),
        ({"num_delivered_tokens": 3}, "delivered_tokens"),
        ({"logprobs": (POSITION,)}, "logprobs"),
    ],
)
def test_a_choice_that_cannot_be_is_named(changes: dict[str, object], field: str) -> None:
    state = replace(STATE, **changes)  # type: ignore[arg-type]
    assert refused(Continuation((STATE, state))) == [f"continuation.choices[1].{field}"]


def test_a_choice_that_has_ended_is_not_gone_on_with() -> None:
    """As its caller cannot know when the node that ended it is lost before it says so."""
    assert refused(Continuation((STATE,)), 6) == ["continuation.choices[0].token_ids[1]"]
    check_continuation(request(Continuation((STATE,)), SamplingParams(min_tokens=2), 6), 100)


def test_log_probabilities_go_with_what_is_held_back() -> None:
    outside = PositionLogprobs(TokenLogprob(5, -1.0, 1), (TokenLogprob(100, -1.0, 1),))
    assert refused(Continuation((STATE,)), logprobs=1) == ["continuation.choices[0].logprobs"]
    state = replace(STATE, logprobs=(outside,))
    assert refused(Continuation((state,)), logprobs=1) == ["continuation.choices[0].logprobs[0]"]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"address": "x" * (MAX_HANDLE_CHARS + 1)}, "address"),
        ({"lease_id": "a\nb"}, "lease_id"),
        ({"num_tokens": 48}, "num_tokens"),
        ({"num_tokens": 31}, "num_tokens"),
        ({"block_size": 0}, "num_tokens"),
        ({"block_ids": (4,)}, "block_ids"),
        ({"block_ids": (4,) * 1000}, "block_ids"),
    ],
)
def test_a_handle_that_cannot_be_is_named(changes: dict[str, object], field: str) -> None:
    source = replace(SOURCE, **changes)  # type: ignore[arg-type]
    assert refused(Continuation((STATE,), source)) == [f"continuation.source.{field}"]
