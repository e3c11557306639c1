"""Builds the messages of the contract from keyword arguments; the same for both clients."""

import json
from collections.abc import Iterable, Mapping
from typing import Any, TypedDict

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from clients.errors import InvalidRequestError
from protos.outrider.v1 import inference_pb2 as pb

_METRICS: Mapping[str, pb.SpeculationMetrics] = {
    "summary": pb.SPECULATION_METRICS_SUMMARY,
    "detailed": pb.SPECULATION_METRICS_DETAILED,
}

_CONSTRAINTS = tuple(field.name for field in pb.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields)

_INTEGERS: Mapping[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
}
"""What fields of whole numbers can carry, by their type."""
_KINDS: Mapping[int, str] = {
    FieldDescriptor.TYPE_STRING: "text",
    FieldDescriptor.TYPE_BOOL: "true or false",
    **dict.fromkeys(_INTEGERS, "an integer"),
}
"""What other values than numbers are called."""

Message = Mapping[str, str]
"""One message of a conversation: {"role": ..., "content": ...}."""


class SamplingOptions(TypedDict, total=False):
    """How tokens are chosen and when to stop. Unset or None: the model's default, then the contract's.

    The last five say what the text must look like, at most one of them: JSON of a schema, any JSON object, a regular
    expression, a Lark grammar, one of some texts.
    """

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    logit_bias: Mapping[int, float] | None
    bad_words: Iterable[str] | None
    allowed_token_ids: Iterable[int] | None
    seed: int | None
    n: int | None
    max_tokens: int | None
    min_tokens: int | None
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    include_stop_str_in_output: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    skip_special_tokens: bool | None
    json_schema: str | Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    grammar: str | None
    choice: Iterable[str] | None


class GenerateOptions(SamplingOptions, total=False):
    """Everything of a generation but a text prompt.

    Exactly one prompt is given: the text, `token_ids`, or `messages`.
    `speculation` False turns speculative decoding off; `num_speculative_tokens` bounds it. `speculation_metrics`
    is "summary" or "detailed": what the closing message says of it.
    """

    token_ids: Iterable[int] | None
    messages: Iterable[Message] | None
    speculation: bool | None
    num_speculative_tokens: int | None
    speculation_metrics: str | None
    priority: int | None
    cache_salt: str | None
    request_id: str | None


def generate_request(prompt: str | None, options: GenerateOptions) -> pb.GenerateRequest:
    """The request. Raises: InvalidRequestError for what the wire cannot carry, TypeError for unknown options."""
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = pb.GenerateRequest()
    token_ids, messages = given.pop("token_ids", None), given.pop("messages", None)
    if sum(value is not None for value in (prompt, token_ids, messages)) != 1:
        raise InvalidRequestError.of("prompt", "give exactly one of text, token_ids and messages")
    if prompt is not None:
        _assign(request, "text", prompt, "text")
    elif token_ids is not None:
        request.token_ids.SetInParent()
        _extend(request.token_ids, "ids", token_ids, "token_ids.ids")
    else:
        request.chat.CopyFrom(_chat(messages))
    for name in ("priority", "cache_salt", "request_id"):
        if name in given:
            _assign(request, name, given.pop(name), name)
    for option, name in (("speculation", "enabled"), ("num_speculative_tokens", "num_speculative_tokens")):
        if option in given:
            _assign(request.speculation, name, given.pop(option), f"speculation.{name}")
    if "speculation_metrics" in given:
        request.speculation.metrics = _metrics(given.pop("speculation_metrics"))
    if len(constraints := [name for name in _CONSTRAINTS if name in given]) > 1:
        raise InvalidRequestError.of(
            "sampling.constraint", f"give at most one of {', '.join(_CONSTRAINTS)}, got {constraints}"
        )
    for name, value in given.items():
        _set_sampling(request.sampling, name, value)
    return request


def tokenize_request(
    text: str | None, messages: Iterable[Message] | None, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """The request.

    Raises: InvalidRequestError unless exactly one of text and messages is given, or for what the wire cannot carry.
    """
    if (text is None) == (messages is None):
        raise InvalidRequestError.of("prompt", "give exactly one of text and messages")
    request = pb.TokenizeRequest(chat=None if messages is None else _chat(messages))
    if text is not None:
        _assign(request, "text", text, "text")
    if add_special_tokens is not None:
        _assign(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    return request


def detokenize_request(token_ids: Iterable[int], skip_special_tokens: bool | None) -> pb.DetokenizeRequest:
    """The request. Raises: InvalidRequestError for what the wire cannot carry."""
    request = pb.DetokenizeRequest()
    _extend(request, "token_ids", token_ids, "token_ids")
    if skip_special_tokens is not None:
        _assign(request, "skip_special_tokens", skip_special_tokens, "skip_special_tokens")
    return request


def abort_request(request_ids: Iterable[str]) -> pb.AbortRequest:
    """The request. Raises: InvalidRequestError for ids that are no text."""
    request = pb.AbortRequest()
    _extend(request, "request_ids", request_ids, "request_ids")
    return request


def _chat(messages: Iterable[Message]) -> pb.ChatMessages:
    """The conversation as a message; what lacks a role or content is refused by name."""
    chat = pb.ChatMessages()
    for i, message in enumerate(messages):
        if unknown := set(message) ^ {"role", "content"}:
            raise InvalidRequestError.of(
                f"chat.messages[{i}]", f"needs role and content and no more, see {sorted(unknown)}"
            )
        added = chat.messages.add()
        for name in ("role", "content"):
            _assign(added, name, message[name], f"chat.messages[{i}].{name}")
    return chat


def _metrics(name: object) -> pb.SpeculationMetrics:
    if name not in _METRICS:
        raise InvalidRequestError.of("speculation.metrics", f"must be one of {', '.join(_METRICS)}, got {name!r}")
    return _METRICS[str(name)]


def _set_sampling(sampling: pb.SamplingParams, name: str, value: Any) -> None:
    field, path = sampling.DESCRIPTOR.fields_by_name.get(name), f"sampling.{name}"
    if field is None:
        raise TypeError(f"no option {name!r}; there are {sorted(GenerateOptions.__annotations__)}")
    match name:
        case "logit_bias":
            if not isinstance(value, Mapping):
                raise InvalidRequestError.of(path, f"must be a mapping from token ids to numbers, got {value!r}")
            for token_id, bias in value.items():
                try:
                    sampling.logit_bias[token_id] = bias
                except (TypeError, ValueError) as error:
                    raise InvalidRequestError.of(f"{path}[{token_id}]", str(error)) from error
        case "allowed_token_ids":
            sampling.allowed_token_ids.SetInParent()
            _extend(sampling.allowed_token_ids, "ids", value, path)
        case "json_schema" if not isinstance(value, str):
            sampling.json_schema = _schema_text(value, path)
        case "choice":
            sampling.choice.SetInParent()
            _extend(sampling.choice, "choices", [value] if isinstance(value, str) else value, path)
        case "stop" | "bad_words" | "stop_token_ids":
            _extend(sampling, name, [value] if isinstance(value, str) else value, path)
        case _:
            _assign(sampling, name, value, path)


def _schema_text(schema: object, path: str) -> str:
    try:
        return json.dumps(schema)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError.of(path, str(error)) from error


def _assign(message: ProtoMessage, name: str, value: object, path: str) -> None:
    field_type = message.DESCRIPTOR.fields_by_name[name].type
    limits = _INTEGERS.get(field_type)
    if limits is not None and isinstance(value, bool):  # which would pass for 0 or 1
        raise InvalidRequestError.of(path, f"must be an integer, got {value}")
    if limits is not None and isinstance(value, int) and not limits[0] <= value <= limits[1]:
        # Narrower limits are the server's to know; it never sees these.
        raise InvalidRequestError.of(path, f"must be from {limits[0]} to {limits[1]}, got {value}")
    try:
        setattr(message, name, value)
    except TypeError as error:
        kind = _KINDS.get(field_type, "a number")
        raise InvalidRequestError.of(path, f"must be {kind}, got {value!r}") from error
    except ValueError as error:
        raise InvalidRequestError.of(path, str(error)) from error


def _extend(message: ProtoMessage, name: str, values: Iterable[object], path: str) -> None:
    is_text = message.DESCRIPTOR.fields_by_name[name].type == FieldDescriptor.TYPE_STRING
    try:
        listed = list(values)
        if is_text and (wrong := [i for i, value in enumerate(listed) if not isinstance(value, str)]):
            raise InvalidRequestError.of(f"{path}[{wrong[0]}]", f"must be text, got {listed[wrong[0]]!r}")
        getattr(message, name).extend(listed)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError.of(path, str(error)) from error
