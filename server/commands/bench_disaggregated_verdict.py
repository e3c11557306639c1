"""Whether two nodes that share the work beat one that does all of it, by what was measured of them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

TTFT_MARGIN = 1.15
"""A time to first token within this factor counts as equal."""
GAP_GOAL = 0.5
"""The p99 of the decode gap that two nodes are to reach, of one node's."""
THROUGHPUT_MARGIN = 0.9
"""A throughput of at least this share counts as equal; who is below does not keep up. It is over the time to the last
answer, so at the same load one whose last answers take longer has less."""
GOALS: Mapping[str, float] = {"ttft_margin": TTFT_MARGIN, "gap_p99_ratio": GAP_GOAL, "throughput": THROUGHPUT_MARGIN}


@dataclass(frozen=True, slots=True)
class Point:
    """A set-up under one load.

    Attributes: ttft_s: median of the long prompts'. gap_p99_s: of the tokens of streams. tokens_per_s: delivered.
    """

    name: str
    ttft_s: float
    gap_p99_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one load says.

    Attributes:
        best: the single node that gives as early first tokens with the smallest gap; if none gives them as early, the
            one with the earliest.
        gap_ratio, ttft_ratio: of two nodes by the best one. is_reached: whether the goal is.
        beaten: single nodes whose gap is longer, and whose first tokens come no earlier than within the margin.
        unbeaten: the others.
    """

    shared: Point
    best: Point
    gap_ratio: float
    ttft_ratio: float
    is_reached: bool
    beaten: tuple[Point, ...]
    unbeaten: tuple[Point, ...]


def judge(shared: Point, single: Sequence[Point]) -> Verdict:
    """Compare two nodes with every token budget of one node. Args: single: at least one."""
    keeps_up = THROUGHPUT_MARGIN * max(point.tokens_per_s for point in (shared, *single)) <= shared.tokens_per_s
    as_early = [
        point
        for point in single
        if point.ttft_s <= TTFT_MARGIN * shared.ttft_s and point.tokens_per_s >= THROUGHPUT_MARGIN * shared.tokens_per_s
    ]
    smallest_gap = min(as_early, key=lambda point: point.gap_p99_s, default=None)
    best = smallest_gap or min(single, key=lambda point: point.ttft_s)
    beaten = tuple(point for point in single if keeps_up and _beats(shared, point))
    gap_ratio, ttft_ratio = shared.gap_p99_s / best.gap_p99_s, shared.ttft_s / best.ttft_s
    return Verdict(
        shared,
        best,
        gap_ratio,
        ttft_ratio,
        is_reached=keeps_up and gap_ratio <= GAP_GOAL and ttft_ratio <= TTFT_MARGIN,
        beaten=beaten,
        unbeaten=tuple(point for point in single if point not in beaten),
    )


def _beats(shared: Point, single: Point) -> bool:
    return shared.gap_p99_s < single.gap_p99_s and shared.ttft_s <= TTFT_MARGIN * single.ttft_s


def verdict_lines(verdicts: Mapping[float, Verdict]) -> Iterator[str]:
    """What each load says, then where the goal begins to be reached. Args: verdicts: by long prompts per second."""
    for rate, verdict in verdicts.items():
        shared, best = verdict.shared, verdict.best
        yield (
            f"{rate:g} prompts/s: goal {'reached' if verdict.is_reached else 'missed'}: "
            f"p99 gap {1e3 * shared.gap_p99_s:.1f} ms, x{verdict.gap_ratio:.2f} of {best.name}'s (goal x{GAP_GOAL:g}), "
            f"TTFT p50 {1e3 * shared.ttft_s:.0f} ms, x{verdict.ttft_ratio:.2f} (margin x{TTFT_MARGIN:g})"
        )
        yield f"  {shared.name} dominates {_names(verdict.beaten)}; not {_names(verdict.unbeaten)}"
    yield f"crossover: {crossover(verdicts)}"


def crossover(verdicts: Mapping[float, Verdict]) -> str:
    """From which rate on the goal is reached, in words."""
    rates = sorted(verdicts)
    missed = [rate for rate in rates if not verdicts[rate].is_reached]
    if not missed:
        return "the goal is reached at every rate that was measured"
    later = [rate for rate in rates if rate > missed[-1]]
    if later:
        return f"the goal is reached from {later[0]:g} prompts/s on, not at {missed[-1]:g}"
    reached = [rate for rate in rates if verdicts[rate].is_reached]
    if reached:
        return f"the goal is reached at {', '.join(f'{rate:g}' for rate in reached)} prompts/s, not at {missed[-1]:g}"
    return "the goal is reached at no rate that was measured"


def _names(points: Sequence[Point]) -> str:
    return ", ".join(point.name for point in points) or "none"
