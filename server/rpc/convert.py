"""What the wire contract says, as values of the engine's side. Presence rules live here.

Runs in the tokenizer pool: a list of a million ids is not copied on the event loop.
"""

from collections.abc import Mapping

from protos.outrider.v1 import disaggregation_pb2, logprobs_pb2
from protos.outrider.v1 import inference_pb2 as pb
from server.errors import InvalidRequest
from server.guidance.params import StructuredOutputsParams
from server.kv_handle import ChoiceState, Continuation, KVHandle
from server.preprocess import ChatPrompt, Prompt, TextPrompt, TokensPrompt
from server.request import MAX_CHOICES, MAX_LOGPROBS, SamplingParams, SpeculationMetrics, SpeculationOptions
from server.token_logprobs import PositionLogprobs, TokenLogprob

_OPTIONAL_SCALARS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "seed",
    "n",
    "max_tokens",
    "min_tokens",
    "include_stop_str_in_output",
    "ignore_eos",
    "logprobs",
    "prompt_logprobs",
    "skip_special_tokens",
)
_METRICS: Mapping[int, SpeculationMetrics | None] = {
    pb.SPECULATION_METRICS_UNSPECIFIED: None,
    pb.SPECULATION_METRICS_SUMMARY: "summary",
    pb.SPECULATION_METRICS_DETAILED: "detailed",
}
_REPEATED = ("bad_words", "stop", "stop_token_ids")


def prompt_from_proto(request: pb.GenerateRequest | pb.TokenizeRequest) -> Prompt:
    """The request's prompt. Raises: InvalidRequest if none is set."""
    match request.WhichOneof("prompt"):
        case "text":
            return TextPrompt(request.text)
        case "token_ids" if isinstance(request, pb.GenerateRequest):
            return TokensPrompt(request.token_ids.ids)
        case "chat":
            return ChatPrompt([(message.role, message.content) for message in request.chat.messages])
    raise InvalidRequest.of("prompt", "must be set")


def sampling_from_proto(message: pb.SamplingParams, defaults: Mapping[str, float | int]) -> SamplingParams:
    """The sampling parameters, unset ones from the model's `defaults`, then SamplingParams' own.

    An unset max_tokens becomes None, "to the end of the context", whatever the defaults say.
    Raises: InvalidRequest naming every field out of range.
    """
    values: dict[str, object] = {**defaults, "max_tokens": None}
    values |= {name: getattr(message, name) for name in _OPTIONAL_SCALARS if message.HasField(name)}
    values |= {name: tuple(getattr(message, name)) for name in _REPEATED}
    values["logit_bias"] = dict(message.logit_bias)
    if message.HasField("allowed_token_ids"):
        values["allowed_token_ids"] = tuple(message.allowed_token_ids.ids)
    try:
        values["structured_outputs"] = _structured_outputs(message)
        return SamplingParams(**values)  # type: ignore[arg-type]  # each has the type of the field it was read from
    except InvalidRequest as error:
        raise error.under("sampling") from None


def _structured_outputs(message: pb.SamplingParams) -> StructuredOutputsParams | None:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return StructuredOutputsParams(json=message.json_schema)
        case "json_object":
            return StructuredOutputsParams(json_object=message.json_object)
        case "regex":
            return StructuredOutputsParams(regex=message.regex)
        case "grammar":
            return StructuredOutputsParams(grammar=message.grammar)
        case "choice":
            return StructuredOutputsParams(choice=tuple(message.choice.choices))
    return None


def continuation_from_proto(request: pb.GenerateRequest) -> Continuation | None:
    """What another node has done of it, None if nothing; whether it fits the request is checked with that.

    Raises: InvalidRequest for lists that no node makes, before they are copied.
    """
    if not request.HasField("continuation"):
        return None
    message = request.continuation
    if len(message.choices) > MAX_CHOICES:
        raise InvalidRequest.of("continuation.choices", f"at most {MAX_CHOICES}, got {len(message.choices)}")
    choices = tuple(
        None if state.ended else _choice_state(state, f"continuation.choices[{i}]")
        for i, state in enumerate(message.choices)
    )
    return Continuation(choices, _kv_handle(message.source) if message.HasField("source") else None)


def _choice_state(message: disaggregation_pb2.ChoiceState, path: str) -> ChoiceState:
    for i, position in enumerate(message.logprobs):
        if len(position.top) > MAX_LOGPROBS:
            raise InvalidRequest.of(f"{path}.logprobs[{i}].top", f"at most {MAX_LOGPROBS}, got {len(position.top)}")
    return ChoiceState(
        token_ids=tuple(message.token_ids),
        key=message.key if message.HasField("key") else None,
        num_delivered_tokens=message.delivered_tokens,
        logprobs=tuple(
            PositionLogprobs(_token_logprob(position.chosen), tuple(map(_token_logprob, position.top)))
            for position in message.logprobs
        ),
    )


def _token_logprob(message: logprobs_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.logprob, message.rank)


def _kv_handle(message: disaggregation_pb2.KvHandle) -> KVHandle:
    return KVHandle(
        connector=message.connector,
        engine_id=message.engine_id,
        address=message.address,
        lease_id=message.lease_id,
        num_tokens=message.num_tokens,
        block_ids=tuple(message.block_ids),
        block_size=message.block_size,
        fingerprint=message.fingerprint,
        description=message.description,
    )


def speculation_from_proto(message: pb.SpeculationOptions) -> SpeculationOptions:
    """Speculation as this request wants it; unset fields leave it to the server.

    Raises: InvalidRequest for metrics that this server does not know.
    """
    if message.metrics not in _METRICS:
        raise InvalidRequest.of("speculation.metrics", f"must be SUMMARY (1) or DETAILED (2), got {message.metrics}")
    return SpeculationOptions(
        enabled=message.enabled if message.HasField("enabled") else True,
        num_speculative_tokens=message.num_speculative_tokens if message.HasField("num_speculative_tokens") else None,
        metrics=_METRICS[message.metrics],
    )
