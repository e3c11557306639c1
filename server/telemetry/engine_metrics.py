"""Gauges and counters read from the engine's own statistics when somebody collects."""

from collections.abc import Callable, Iterable

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from server.engine.protocol import EngineStatistics

_Read = Callable[[EngineStatistics], int | float]
_ReadMany = Callable[[EngineStatistics], tuple[int, ...]]
_Callback = Callable[[CallbackOptions], Iterable[Observation]]

_GAUGES: tuple[tuple[str, str, str, _Read], ...] = (
    ("outrider_requests_running", "{sequence}", "Sequences that hold a seat in the batch.", lambda s: s.num_running),
    ("outrider_requests_waiting", "{request}", "Requests that wait, tokenising ones too.", lambda s: s.num_waiting),
    ("outrider_kv_blocks_total", "{block}", "Usable KV blocks.", lambda s: s.kv_blocks_total),
    (
        "outrider_kv_blocks_free",
        "{block}",
        "KV blocks that no sequence references, cached ones included.",
        lambda s: s.kv_blocks_free,
    ),
    (
        "outrider_kv_usage_ratio",
        "1",
        "Share of the KV blocks that sequences reference.",
        lambda s: 1 - s.kv_blocks_free / s.kv_blocks_total if s.kv_blocks_total else 0.0,
    ),
)

_COUNTERS: tuple[tuple[str, str, str, _Read], ...] = (
    (
        "outrider_prefix_query_tokens",
        "{token}",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.prefix_query_tokens,
    ),
    ("outrider_prefix_hit_tokens", "{token}", "Prompt tokens found there.", lambda s: s.prefix_hit_tokens),
    ("outrider_prompt_tokens", "{token}", "Prompt tokens computed or found.", lambda s: s.prompt_tokens),
    ("outrider_generation_tokens", "{token}", "Tokens generated.", lambda s: s.generation_tokens),
    ("outrider_preemptions", "{sequence}", "Sequences preempted for lack of KV blocks.", lambda s: s.num_preemptions),
    ("outrider_steps", "{step}", "Steps the worker has run.", lambda s: s.num_steps),
)

_POSITION_COUNTERS: tuple[tuple[str, str, _ReadMany], ...] = (
    (
        "outrider_draft_tokens",
        "Draft tokens verified, by position in the draft, from 0.",
        lambda s: s.draft_tokens_per_position,
    ),
    (
        "outrider_accepted_draft_tokens",
        "Draft tokens accepted, by position in the draft, from 0.",
        lambda s: s.accepted_tokens_per_position,
    ),
)


def observe_engine(meter: Meter, statistics: Callable[[], EngineStatistics]) -> None:
    """Register every instrument; the step loop pays nothing for them.

    Args:
        statistics: called on the thread that collects, once per instrument.
    """
    for name, unit, description, read in _GAUGES:
        meter.create_observable_gauge(name, [_observe(statistics, read)], unit, description)
    for name, unit, description, read in _COUNTERS:
        meter.create_observable_counter(name, [_observe(statistics, read)], unit, description)
    for name, description, read_many in _POSITION_COUNTERS:
        meter.create_observable_counter(name, [_observe_positions(statistics, read_many)], "{token}", description)


def count_dropped_events(meter: Meter, num_dropped: Callable[[], int]) -> None:
    """Show the events that telemetry itself had to discard; above 0, the histograms and spans lack them."""
    meter.create_observable_counter(
        "outrider_telemetry_dropped_events",
        [lambda _options: [Observation(num_dropped())]],
        "{event}",
        "Events discarded because telemetry fell behind.",
    )


def _observe(statistics: Callable[[], EngineStatistics], read: _Read) -> _Callback:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        yield Observation(read(statistics()))

    return callback


def _observe_positions(statistics: Callable[[], EngineStatistics], read: _ReadMany) -> _Callback:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        for position, count in enumerate(read(statistics())):
            yield Observation(count, {"position": position})

    return callback
