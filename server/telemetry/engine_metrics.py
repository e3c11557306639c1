"""Gauges and counters read from the engine's own statistics when somebody collects."""

from collections.abc import Callable, Iterable, Mapping

from opentelemetry.metrics import CallbackOptions, Meter, Observation

from server.engine.protocol import EngineStatistics

_Read = Callable[[EngineStatistics], int | float | None]
_ReadMany = Callable[[EngineStatistics], tuple[int, ...]]
_ReadNamed = Callable[[EngineStatistics], Mapping[str, int]]
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
    (
        "outrider_held_blocks",
        "{block}",
        "KV blocks that are held for loads, saves and other nodes.",
        lambda s: s.num_held_blocks,
    ),
    (
        "outrider_draft_acceptance_ratio",
        "1",
        "Share of the verified draft tokens that were accepted, since the start; once there were some.",
        lambda s: s.draft_acceptance_rate if any(s.draft_tokens_per_position) else None,
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
    (
        "outrider_external_queried_tokens",
        "{token}",
        "Prompt tokens that were not in the prefix cache when the connector was asked for them.",
        lambda s: s.external_queried_tokens,
    ),
    ("outrider_external_loaded_tokens", "{token}", "Those whose KV it brought.", lambda s: s.external_loaded_tokens),
    (
        "outrider_failed_loads",
        "{load}",
        "Loads that brought less than they should, or nothing in time.",
        lambda s: s.num_failed_loads,
    ),
    (
        "outrider_unsaved_blocks",
        "{block}",
        "KV blocks that were used for something else before it was their turn to be saved.",
        lambda s: s.num_unsaved_blocks,
    ),
    (
        "outrider_unreadable_handles",
        "{request}",
        "Requests whose KV is said to be where no connector of this node reads, or to be of another model or form.",
        lambda s: s.num_unreadable_handles,
    ),
    ("outrider_steps", "{step}", "Steps the worker has run.", lambda s: s.num_steps),
)

_LIST_COUNTERS: tuple[tuple[str, str, str, str, _ReadMany], ...] = (
    (
        "outrider_draft_tokens",
        "{token}",
        "position",
        "Draft tokens verified, by position in the draft, from 0.",
        lambda s: s.draft_tokens_per_position,
    ),
    (
        "outrider_accepted_draft_tokens",
        "{token}",
        "position",
        "Draft tokens accepted, by position in the draft, from 0.",
        lambda s: s.accepted_tokens_per_position,
    ),
    (
        "outrider_speculation_steps",
        "{step}",
        "num_speculative_tokens",
        "Settled steps of answers that may be drafted for, by the most draft tokens a row was to verify; 0 is off.",
        lambda s: s.steps_per_draft_limit,
    ),
)


_NAMED_COUNTERS: tuple[tuple[str, str, str, str, _ReadNamed], ...] = (
    (
        "outrider_save_failures",
        "{block}",
        "reason",
        "KV blocks that a store did not keep, by why; once for each store.",
        lambda s: s.save_failures,
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
    for name, unit, attribute, description, read_many in _LIST_COUNTERS:
        meter.create_observable_counter(name, [_observe_list(statistics, attribute, read_many)], unit, description)
    for name, unit, attribute, description, read_named in _NAMED_COUNTERS:
        meter.create_observable_counter(name, [_observe_named(statistics, attribute, read_named)], unit, description)
    meter.create_observable_gauge(
        "outrider_speculation_advice",
        [_observe_advice(statistics)],
        "{problem}",
        "1 while speculation does not pay as it should, with what is wrong (problem) and what to do (change).",
    )


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
        value = read(statistics())
        if value is not None:
            yield Observation(value)

    return callback


def _observe_list(statistics: Callable[[], EngineStatistics], attribute: str, read: _ReadMany) -> _Callback:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        for index, count in enumerate(read(statistics())):
            yield Observation(count, {attribute: index})

    return callback


def _observe_named(statistics: Callable[[], EngineStatistics], attribute: str, read_named: _ReadNamed) -> _Callback:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        for name, count in read_named(statistics()).items():
            yield Observation(count, {attribute: name})

    return callback


def _observe_advice(statistics: Callable[[], EngineStatistics]) -> _Callback:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        for problem, change in statistics().speculation_advice.items():
            yield Observation(1, {"problem": problem, "change": change})

    return callback
