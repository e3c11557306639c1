"""What the engine says, as messages of the wire contract."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from protos.outrider.v1 import disaggregation_pb2, logprobs_pb2
from protos.outrider.v1 import inference_pb2 as pb
from server.engine.protocol import (
    Delta,
    EngineStatistics,
    Finished,
    FinishReason,
    PositionLogprobs,
    PromptLogprobs,
    Started,
    TokenLogprob,
)
from server.kv_handle import ChoiceState, KVHandle
from server.request import ModelInfo

_POSITION_NBYTES = 16 << 10
"""More than one position takes: 65 tokens of at most 250 bytes, of which text is nearly all."""

_FINISH_REASONS = {
    FinishReason.STOP: pb.FINISH_REASON_STOP,
    FinishReason.LENGTH: pb.FINISH_REASON_LENGTH,
    FinishReason.ABORT: pb.FINISH_REASON_ABORT,
    FinishReason.HANDED_ON: pb.FINISH_REASON_HANDED_ON,
}

TokenText = Callable[[int], str]
_Item = TypeVar("_Item")


def started_to_proto(event: Started) -> pb.GenerateResponse:
    """The message for a request that was scheduled."""
    return pb.GenerateResponse(
        started=pb.Started(
            request_id=event.request_id,
            prompt_tokens=event.num_prompt_tokens,
            cached_tokens=event.num_cached_tokens,
            prompt_token_ids=event.prompt_token_ids,
        )
    )


def positions_per_message(max_message_bytes: int) -> int:
    """How many positions' log probabilities fit into a message for certain."""
    return max(1, max_message_bytes // _POSITION_NBYTES)


def prompt_logprobs_to_proto(
    event: PromptLogprobs, token_text: TokenText, max_positions: int
) -> Iterator[pb.GenerateResponse]:
    """The messages for the prompt's log probabilities; at least one, each of at most `max_positions`."""
    for part in _chunks(event.positions, max_positions) or [()]:
        yield pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(positions=_positions(part, token_text)))


def delta_to_proto(event: Delta, token_text: TokenText, max_positions: int) -> Iterator[pb.GenerateResponse]:
    """The messages for one delta: one, unless a slow reader let too many log probabilities gather."""
    if len(event.logprobs) <= max_positions:
        yield _delta(event.index, event.text, event.token_ids, event.logprobs, token_text)
        return
    token_chunks = _chunks(event.token_ids, max_positions)
    for i, (token_ids, logprobs) in enumerate(zip(token_chunks, _chunks(event.logprobs, max_positions), strict=True)):
        # Text leaves with the last of its tokens, as it does when they leave together.
        text = event.text if i == len(token_chunks) - 1 else ""
        yield _delta(event.index, text, token_ids, logprobs, token_text)


def finished_to_proto(event: Finished) -> pb.GenerateResponse:
    """The message for a choice that ended."""
    message = pb.Finished(
        index=event.index,
        finish_reason=_FINISH_REASONS[event.finish_reason],
        usage=pb.Usage(
            prompt_tokens=event.num_prompt_tokens,
            completion_tokens=event.num_completion_tokens,
            cached_tokens=event.num_cached_tokens,
        ),
        timing=pb.Timing(
            queue_seconds=event.timing.queue_s,
            prefill_seconds=event.timing.prefill_s,
            decode_seconds=event.timing.decode_s,
            time_to_first_token_seconds=event.timing.ttft_s,
            total_seconds=event.timing.total_s,
            transfer_seconds=event.timing.transfer_s,
        ),
        speculation=pb.SpeculationStats(
            num_spec_steps=event.speculation.num_spec_steps,
            num_draft_tokens=event.speculation.num_draft_tokens,
            num_accepted_draft_tokens=event.speculation.num_accepted_draft_tokens,
            mean_acceptance_length=event.speculation.mean_acceptance_length,
            draft_acceptance_rate=event.speculation.draft_acceptance_rate,
            acceptance_histogram=event.speculation.acceptance_histogram,
            proposed_per_step=event.speculation.proposed_per_step,
            accepted_per_step=event.speculation.accepted_per_step,
            is_synthetic=event.speculation.is_synthetic,
        ),
        handed_on=None if event.handed_on is None else _choice_state(event.handed_on),
        source=None if event.source is None else _kv_handle(event.source),
    )
    if isinstance(event.stop_reason, str):
        message.stop_string = event.stop_reason
    elif event.stop_reason is not None:
        message.stop_token_id = event.stop_reason
    return pb.GenerateResponse(finished=message)


def model_info_to_proto(info: ModelInfo, *, has_chat_template: bool, version: str) -> pb.GetModelInfoResponse:
    """The loaded model and its limits."""
    return pb.GetModelInfoResponse(
        served_model_name=info.served_model_name,
        model=info.model,
        architecture=info.architecture,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        dtype=info.dtype,
        device=info.device,
        has_chat_template=has_chat_template,
        speculative_method=info.speculative_method,
        num_speculative_tokens=info.num_speculative_tokens,
        block_size=info.block_size,
        num_kv_blocks=info.num_kv_blocks,
        version=version,
        rejection_sample_method=info.rejection_sample_method,
    )


def statistics_to_proto(statistics: EngineStatistics) -> pb.GetStatsResponse:
    """The snapshot; the fields have the same names on both sides."""
    return pb.GetStatsResponse(
        **{field.name: getattr(statistics, field.name) for field in pb.GetStatsResponse.DESCRIPTOR.fields}
    )


def _choice_state(state: ChoiceState) -> disaggregation_pb2.ChoiceState:
    return disaggregation_pb2.ChoiceState(
        token_ids=state.token_ids,
        key=state.key,
        delivered_tokens=state.num_delivered_tokens,
        logprobs=_positions(state.logprobs, lambda _: ""),
    )


def _kv_handle(handle: KVHandle) -> disaggregation_pb2.KvHandle:
    return disaggregation_pb2.KvHandle(
        **{field.name: getattr(handle, field.name) for field in disaggregation_pb2.KvHandle.DESCRIPTOR.fields}
    )


def _delta(
    index: int,
    text: str,
    token_ids: Sequence[int],
    logprobs: Iterable[PositionLogprobs],
    token_text: TokenText,
) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        delta=pb.Delta(index=index, text=text, token_ids=token_ids, logprobs=_positions(logprobs, token_text))
    )


def _positions(positions: Iterable[PositionLogprobs], token_text: TokenText) -> list[logprobs_pb2.PositionLogprobs]:
    return [
        logprobs_pb2.PositionLogprobs(
            chosen=_token(position.chosen, token_text), top=[_token(token, token_text) for token in position.top]
        )
        for position in positions
    ]


def _token(token: TokenLogprob, token_text: TokenText) -> logprobs_pb2.TokenLogprob:
    return logprobs_pb2.TokenLogprob(
        token_id=token.token_id, logprob=token.logprob, rank=token.rank, text=token_text(token.token_id)
    )


def _chunks(items: Sequence[_Item], size: int) -> list[Sequence[_Item]]:
    return [items[i : i + size] for i in range(0, len(items), size)]
