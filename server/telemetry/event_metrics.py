"""Histograms of what events report: latencies as clients and operators feel them."""

from collections.abc import Sequence

from opentelemetry.metrics import Histogram, Meter
from opentelemetry.semconv._incubating.attributes import rpc_attributes as rpc
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics, rpc_metrics

from server.events import CallFinished, Event, StepFinished, TokensStreamed
from server.telemetry.call_attributes import GENERATE, gen_ai_attributes, rpc_attributes

# The GenAI conventions' bounds, and finer ones below: a small model steps in under a millisecond.
_TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BOUNDS = (
    *(0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075),
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
)
_DRAFT_BOUNDS = (0.00002, 0.00005, 0.0001, *_TPOT_BOUNDS)
# Up to 5 ms it is other threads' turns of the lock, beyond that a thread that holds it longer or has no core.
_LOCK_WAIT_BOUNDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
_DURATION_BOUNDS = tuple(0.01 * 2**i for i in range(14))
_QUEUE_BOUNDS = (0.0, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class EventMetrics:
    """Records events in histograms. Lives on the telemetry thread."""

    def __init__(self, meter: Meter, model: str) -> None:
        def histogram(name: str, description: str, bounds: Sequence[float]) -> Histogram:
            return meter.create_histogram(
                name, unit="s", description=description, explicit_bucket_boundaries_advisory=bounds
            )

        self._model = model
        self._time_to_first_token = histogram(
            gen_ai_metrics.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN,
            "From arrival to the first token of a call's first choice, of successful calls.",
            _TTFT_BOUNDS,
        )
        self._time_per_output_token = histogram(
            gen_ai_metrics.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN,
            "Mean time per token after the first, per choice of a successful call.",
            _TPOT_BOUNDS,
        )
        self._request_duration = histogram(
            gen_ai_metrics.GEN_AI_SERVER_REQUEST_DURATION,
            "Duration of a generation call, by how it ended.",
            _DURATION_BOUNDS,
        )
        self._call_duration = histogram(
            rpc_metrics.RPC_SERVER_CALL_DURATION, "Duration of any call, by how it ended.", _DURATION_BOUNDS
        )
        self._inter_token_gap = histogram(
            "outrider_inter_token_gap",
            "Time between tokens of a choice; tokens that came together (burst) share the gap before them evenly.",
            _TPOT_BOUNDS,
        )
        self._queue_time = histogram(
            "outrider_queue_time", "From arrival to being scheduled for the first time.", _QUEUE_BOUNDS
        )
        self._step_duration = histogram("outrider_step_duration", "From launch to settle of one step.", _TPOT_BOUNDS)
        self._step_lock_wait = histogram(
            "outrider_step_lock_wait",
            "Time the step thread lost to the interpreter lock, per step; an upper bound.",
            _LOCK_WAIT_BOUNDS,
        )

        self._draft_time = histogram(
            "outrider_draft_time",
            "Time that proposers of drafts took, per step in which they did.",
            _DRAFT_BOUNDS,
        )
        self._verify_time = histogram(
            "outrider_verify_time",
            "Time of a step that verified draft tokens, without what proposers took.",
            _TPOT_BOUNDS,
        )

    def __call__(self, event: Event) -> None:
        """Record whatever the event reports."""
        if isinstance(event, StepFinished):
            self._step_duration.record(event.duration_s)
            self._step_lock_wait.record(event.lock_wait_s)
            if event.draft_s > 0:
                self._draft_time.record(event.draft_s)
            if event.verify_s > 0:
                self._verify_time.record(event.verify_s)
        elif isinstance(event, TokensStreamed):
            self._record_gap(event)
        else:
            self._record_call(event)

    def _record_gap(self, event: TokensStreamed) -> None:
        if event.gap_s is None or event.num_tokens == 0:
            return  # the first tokens have no gap: their wait is the time to first token
        attributes = {"burst": "true" if event.num_tokens > 1 else "false"}
        gap_s = event.gap_s / event.num_tokens
        for _ in range(event.num_tokens):  # the SDK has no weighted observation
            self._inter_token_gap.record(gap_s, attributes)

    def _record_call(self, call: CallFinished) -> None:
        duration_s = (call.end_unix_ns - call.start_unix_ns) / 1e9
        self._call_duration.record(duration_s, rpc_attributes(call))
        if call.method != GENERATE:
            return
        attributes = gen_ai_attributes(call, self._model)
        self._request_duration.record(duration_s, attributes | {rpc.RPC_RESPONSE_STATUS_CODE: call.status})
        if queue_times_s := [c.timing.queue_s for c in call.choices if c.timing.queue_s > 0]:
            self._queue_time.record(min(queue_times_s))
        if call.status != "OK":  # the conventions define the following for successful responses
            return
        if first_token_times_s := [c.timing.ttft_s for c in call.choices if c.timing.ttft_s > 0]:
            self._time_to_first_token.record(min(first_token_times_s), attributes)
        for choice in call.choices:
            if choice.num_completion_tokens > 1:
                self._time_per_output_token.record(
                    choice.timing.decode_s / (choice.num_completion_tokens - 1), attributes
                )
