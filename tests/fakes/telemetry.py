"""What telemetry sees of a server: an engine's statistics, and events."""

import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import cast

from server.engine.protocol import (
    Engine,
    EngineStatistics,
    Finished,
    FinishReason,
    SpeculationStats,
    Timing,
)
from server.events import CallFinished

STATISTICS = EngineStatistics(
    num_running=3,
    num_waiting=2,
    kv_blocks_total=100,
    kv_blocks_free=75,
    prefix_query_tokens=1000,
    prefix_hit_tokens=640,
    prompt_tokens=2000,
    generation_tokens=500,
    num_preemptions=4,
    num_steps=321,
    draft_tokens_per_position=(90, 60, 30),
    accepted_tokens_per_position=(70, 40, 10),
    steps_per_draft_limit=(200, 0, 21, 100),
    external_queried_tokens=360,
    external_loaded_tokens=320,
    num_failed_loads=5,
    num_unsaved_blocks=6,
    save_failures={"full": 8, "unavailable": 9},
    num_unreadable_handles=10,
    num_held_blocks=7,
    speculation_advice={"slow_drafts": "change_method"},
)


def engine_with(statistics: EngineStatistics = STATISTICS) -> Engine:
    """An engine that does nothing but report."""
    return cast(
        Engine, SimpleNamespace(model_info=SimpleNamespace(served_model_name="tiny"), statistics=lambda: statistics)
    )


def finished(
    index: int = 0,
    *,
    queue_s: float = 0.1,
    prefill_s: float = 0.2,
    decode_s: float = 0.9,
    num_completion_tokens: int = 10,
    finish_reason: FinishReason = FinishReason.LENGTH,
) -> Finished:
    """A choice that ran for queue_s + prefill_s + decode_s seconds."""
    return Finished(
        index=index,
        finish_reason=finish_reason,
        stop_reason=None,
        num_prompt_tokens=20,
        num_completion_tokens=num_completion_tokens,
        num_cached_tokens=16,
        timing=Timing(queue_s, prefill_s, decode_s, queue_s + prefill_s, queue_s + prefill_s + decode_s),
        speculation=SpeculationStats(
            num_spec_steps=4,
            num_draft_tokens=12,
            num_accepted_draft_tokens=5,
            acceptance_histogram=(1, 2, 0, 1),
            draft_s=0.125,
            verify_s=0.5,
        ),
    )


def call_finished(
    *,
    method: str = "Generate",
    status: str = "OK",
    error: str = "",
    metadata: Mapping[str, str] | None = None,
    choices: tuple[Finished, ...] = (),
    request_id: str = "req-1",
    duration_s: float = 1.5,
    attributes: Mapping[str, str | int | float | bool] | None = None,
) -> CallFinished:
    """A call that ends now and began `duration_s` ago."""
    end_ns = time.time_ns()
    return CallFinished(
        method=method,
        metadata=metadata or {},
        status=status,
        error=error,
        start_unix_ns=end_ns - round(duration_s * 1e9),
        end_unix_ns=end_ns,
        request_id=request_id,
        choices=choices,
        num_prompt_tokens=20,
        num_completion_tokens=sum(choice.num_completion_tokens for choice in choices),
        attributes=attributes or {},
    )
