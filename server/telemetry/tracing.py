"""One server span per call, with the phases of each choice as its children."""

from collections.abc import Iterable
from itertools import zip_longest

import grpc
from opentelemetry.context import Context
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes import rpc_attributes as rpc
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from server.engine.protocol import Finished, SpeculationStats
from server.events import CallFinished, Event
from server.telemetry.call_attributes import (
    GENERATE,
    AttributeValue,
    gen_ai_attributes,
    is_server_error,
    rpc_attributes,
)

_CANCEL_REASONS = {"CANCELLED": "client", "DEADLINE_EXCEEDED": "deadline"}


class CallTracer:
    """Turns CallFinished into spans, all at once when the call is over.

    The bounds are given explicitly, so nothing is kept for a live call and no outcome
    can leave a span open. Lives on the telemetry thread.
    """

    def __init__(self, tracer: Tracer, model: str) -> None:
        self._tracer = tracer
        self._model = model
        self._propagator = TraceContextTextMapPropagator()

    def __call__(self, event: Event) -> None:
        """Make the spans of a finished call; other events are none of its business."""
        if not isinstance(event, CallFinished):
            return
        span = self._tracer.start_span(
            f"{event.service}/{event.method}",
            context=self._parent(event),
            kind=SpanKind.SERVER,
            attributes=self._attributes(event),
            start_time=event.start_unix_ns,
        )
        if is_server_error(event.status):
            span.set_status(Status(StatusCode.ERROR, event.error))
        if span.is_recording():
            for choice in event.choices:
                self._trace_phases(span, event, choice)
        span.end(end_time=event.end_unix_ns)

    def _parent(self, call: CallFinished) -> Context:
        """The caller's span, or an empty context where the metadata names none."""
        return self._propagator.extract({key.lower(): value for key, value in call.metadata.items()}, Context())

    def _attributes(self, call: CallFinished) -> dict[str, AttributeValue]:
        attributes = rpc_attributes(call)
        # Superseded names that tracing backends still group by; unlike rpc.method, they can stand beside the new ones.
        attributes[rpc.RPC_SYSTEM] = "grpc"
        attributes[rpc.RPC_SERVICE] = call.service
        attributes[rpc.RPC_GRPC_STATUS_CODE] = grpc.StatusCode[call.status].value[0]
        if call.error:
            attributes["outrider.error.message"] = call.error
        if call.status in _CANCEL_REASONS:
            attributes["outrider.cancel.reason"] = _CANCEL_REASONS[call.status]
        if call.method == GENERATE:
            attributes |= gen_ai_attributes(call, self._model) | _generation_attributes(call)
        return attributes | dict(call.attributes)

    def _trace_phases(self, parent: Span, call: CallFinished, choice: Finished) -> None:
        """Queue, transfer, prefill and decode as consecutive spans [start, end) from the call's start.

        A phase that was never reached has no span. Durations come from the engine's
        monotonic clock; whatever the wall clock makes of them ends with the call.
        """
        context = set_span_in_context(parent)
        timing = choice.timing
        start_ns = call.start_unix_ns
        for name, duration_s, attributes in (
            ("queue", timing.queue_s - timing.transfer_s, {}),
            ("transfer", timing.transfer_s, {}),
            ("prefill", timing.prefill_s, _prefill_attributes(choice)),
            ("decode", timing.decode_s, _decode_attributes(choice)),
        ):
            if duration_s <= 0:
                continue
            end_ns = min(start_ns + round(duration_s * 1e9), call.end_unix_ns)
            span = self._tracer.start_span(
                name,
                context=context,
                attributes={"outrider.choice.index": choice.index, **attributes},
                start_time=start_ns,
            )
            span.end(end_time=end_ns)
            start_ns = end_ns


def _generation_attributes(call: CallFinished) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: call.num_prompt_tokens,
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: call.num_completion_tokens,
    }
    if call.request_id:
        attributes[gen_ai.GEN_AI_RESPONSE_ID] = call.request_id
    if call.choices:
        attributes |= {
            gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: [choice.finish_reason.value for choice in call.choices],
            gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: call.choices[0].num_cached_tokens,
            **_speculation_attributes(_sum(choice.speculation for choice in call.choices)),
        }
    return attributes


def _sum(choices: Iterable[SpeculationStats]) -> SpeculationStats:
    """What all choices come to. Their times are left out: choices share steps."""
    stats = list(choices)
    histograms = zip_longest(*(each.acceptance_histogram for each in stats), fillvalue=0)
    return SpeculationStats(
        num_spec_steps=sum(each.num_spec_steps for each in stats),
        num_draft_tokens=sum(each.num_draft_tokens for each in stats),
        num_accepted_draft_tokens=sum(each.num_accepted_draft_tokens for each in stats),
        acceptance_histogram=tuple(map(sum, histograms)),
    )


def _speculation_attributes(stats: SpeculationStats) -> dict[str, AttributeValue]:
    return {
        "outrider.speculation.steps": stats.num_spec_steps,
        "outrider.speculation.draft_tokens": stats.num_draft_tokens,
        "outrider.speculation.accepted_tokens": stats.num_accepted_draft_tokens,
        "outrider.speculation.mean_acceptance_length": stats.mean_acceptance_length,
        "outrider.speculation.draft_acceptance_rate": stats.draft_acceptance_rate,
        "outrider.speculation.num_speculative_tokens": stats.num_speculative_tokens,
    }


def _prefill_attributes(choice: Finished) -> dict[str, AttributeValue]:
    return {
        gen_ai.GEN_AI_USAGE_INPUT_TOKENS: choice.num_prompt_tokens,
        gen_ai.GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: choice.num_cached_tokens,
    }


def _decode_attributes(choice: Finished) -> dict[str, AttributeValue]:
    attributes: dict[str, AttributeValue] = {
        gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: choice.num_completion_tokens,
        gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: [choice.finish_reason.value],
        **_speculation_attributes(choice.speculation),
        "outrider.speculation.acceptance_histogram": list(choice.speculation.acceptance_histogram),
        "outrider.speculation.draft_seconds": choice.speculation.draft_s,
        "outrider.speculation.verify_seconds": choice.speculation.verify_s,
    }
    if choice.stop_reason is not None:
        attributes["outrider.stop_reason"] = choice.stop_reason
    return attributes
