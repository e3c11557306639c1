"""Whether what another node is said to have done of a request can be gone on with."""

from collections.abc import Iterator

from server.errors import FieldViolation, InvalidRequest
from server.kv_handle import ChoiceState, KVHandle
from server.request import Request

MAX_HANDLE_CHARS = 512
MAX_VIOLATIONS = 16


def check_continuation(request: Request, vocab_size: int) -> None:
    """Check all of a request's continuation that needs no text.

    Raises: InvalidRequest that names what is wrong by its path in the wire contract.
    """
    continuation, sampling = request.continuation, request.sampling
    assert continuation is not None
    choices = continuation.choices
    if len(choices) != sampling.n:
        raise InvalidRequest.of("continuation.choices", f"must be sampling.n ({sampling.n}), got {len(choices)}")
    if all(state is None for state in choices):
        raise InvalidRequest.of("continuation.choices", "all have ended: there is nothing to go on with")
    found = [
        FieldViolation(f"continuation.choices[{i}].{name}", description)
        for i, state in enumerate(choices)
        if state is not None
        for name, description in _wrong_in_choice(state, request, vocab_size)
    ]
    if continuation.source is not None:
        found += [
            FieldViolation(f"continuation.source.{name}", description)
            for name, description in _wrong_in_handle(continuation.source, len(request.prompt_token_ids))
        ]
    if found:
        raise InvalidRequest(*found[:MAX_VIOLATIONS])


def _wrong_in_choice(state: ChoiceState, request: Request, vocab_size: int) -> Iterator[tuple[str, str]]:
    count, max_tokens = len(state.token_ids), request.sampling.max_tokens
    assert max_tokens is not None
    if count >= max_tokens:
        yield "token_ids", f"must be fewer than max_tokens ({max_tokens}), got {count}"
        return
    first_eligible = 0 if request.grammar is not None else request.sampling.min_tokens
    for i, token_id in enumerate(state.token_ids):
        if not 0 <= token_id < vocab_size:
            yield f"token_ids[{i}]", f"must be below vocab_size ({vocab_size}), got {token_id}"
            return
        if token_id in request.stop_token_ids and i >= first_eligible:
            yield f"token_ids[{i}]", f"is a stop token: the choice has ended with {token_id}"
            return
    if state.key is not None and state.key >= 1 << 63:
        yield "key", "must be below 2^63"
    if state.num_delivered_tokens > count:
        yield "delivered_tokens", f"must be at most the {count} tokens, got {state.num_delivered_tokens}"
        return
    num_wanted = 0 if request.sampling.logprobs is None else count - state.num_delivered_tokens
    if len(state.logprobs) != num_wanted:
        yield "logprobs", f"must be {num_wanted}, one for each token that was not delivered, got {len(state.logprobs)}"
    for i, position in enumerate(state.logprobs):
        if any(token.token_id >= vocab_size for token in (position.chosen, *position.top)):
            yield f"logprobs[{i}]", f"every token_id must be below vocab_size ({vocab_size})"


def _wrong_in_handle(handle: KVHandle, prompt_len: int) -> Iterator[tuple[str, str]]:
    for name in ("connector", "engine_id", "address", "lease_id", "fingerprint", "description"):
        text: str = getattr(handle, name)
        if len(text) > MAX_HANDLE_CHARS:
            yield name, f"at most {MAX_HANDLE_CHARS} characters, got {len(text)}"
        elif not text.isprintable():  # it stands in logs
            yield name, "must not have control characters"
    if handle.num_tokens > prompt_len:
        yield "num_tokens", f"must be at most the prompt's {prompt_len}, got {handle.num_tokens}"
    elif handle.num_tokens and (handle.block_size == 0 or handle.num_tokens % handle.block_size):
        yield "num_tokens", f"must be whole blocks of block_size ({handle.block_size}), got {handle.num_tokens}"
    elif handle.block_ids and len(handle.block_ids) * handle.block_size != handle.num_tokens:
        yield "block_ids", f"must be one for each block of {handle.block_size} tokens, got {len(handle.block_ids)}"
