"""What `outrider bench disaggregated` measured, as JSON values and as lines of tables."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from server.commands.bench_disaggregated_frontier import SHARED, Results, Turn, summarised
from server.commands.bench_disaggregated_transfer import COPY, PLAIN, Timing
from server.commands.bench_disaggregated_ttft import Timed
from server.commands.bench_disaggregated_verdict import Point, Verdict, crossover, judge
from server.commands.bench_median import summary

_FRONTIER_COLUMNS: Mapping[str, tuple[str, float, str]] = {
    "TTFT p50": ("ttft_p50_s", 1e3, ".0f"),
    "p95": ("ttft_p95_s", 1e3, ".0f"),
    "stream TTFT": ("stream_ttft_p50_s", 1e3, ".0f"),
    "gap p50": ("gap_p50_s", 1e3, ".1f"),
    "gap p99": ("gap_p99_s", 1e3, ".1f"),
    "2nd token": ("second_token_p50_s", 1e3, ".1f"),
    "tok/s": ("tokens_per_s", 1.0, ".1f"),
}
"""What a column is of, in which unit, and how it is written; times in ms."""


def verdicts_of(results: Results) -> dict[float, Verdict]:
    """What each load says under which two nodes and one node were measured: medians over its turns."""
    verdicts = {}
    for rate, found in results.items():
        points = {
            name: Point(name, *(statistics.median(values[key]) for key in ("ttft_p50_s", "gap_p99_s", "tokens_per_s")))
            for name, values in summarised(found).items()
        }
        shared = points.pop(SHARED, None)
        if shared is not None and points:
            verdicts[rate] = judge(shared, list(points.values()))
    return verdicts


def frontier_report(results: Results) -> dict[str, Any]:
    """Every set-up under every load, with its turns, and what follows; less of it if the run has ended early."""
    verdicts = verdicts_of(results)
    return {
        "rates": [
            {
                "prompts_per_s": rate,
                "setups": [
                    {
                        "name": name,
                        **{key: summary(each) for key, each in values.items()},
                        "turns": [_turn(turn) for turn in found[name]],
                    }
                    for name, values in summarised(found).items()
                ],
                "verdict": asdict(verdicts[rate]) if rate in verdicts else None,
            }
            for rate, found in results.items()
        ],
        "crossover": crossover(verdicts) if verdicts else None,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    result = turn.result
    by_kind = {kind: measurements.report(result.duration_s) for kind, measurements in result.by_kind.items()}
    return {
        "duration_s": result.duration_s,
        "client_cpu_s": result.client_cpu_s,
        "loaded_share": turn.loaded_share,
        **by_kind,
    }


def frontier_lines(rate: float, results: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    """A table of medians for one load, with the spread of what the verdict is of, and failures."""
    titles = " ".join(f"{title:>11}" for title in _FRONTIER_COLUMNS)
    yield f"{f'{rate:g} prompts/s, ms':<22} {titles}   p99 min-max"
    for name, values in summarised(results).items():
        cells = " ".join(
            f"{statistics.median(values[key]) * unit:>11,{form}}" for key, unit, form in _FRONTIER_COLUMNS.values()
        )
        gaps = [1e3 * gap for gap in values["gap_p99_s"]]
        yield f"{name:<22} {cells}   {min(gaps):.1f}-{max(gaps):.1f}"
        yield from _remarks(results[name])


def _remarks(turns: Sequence[Turn]) -> Iterator[str]:
    """What a line of the table does not tell: with it, its numbers are not those of what was to be measured."""
    failures = sum(each.failures.total() for turn in turns for each in turn.result.by_kind.values())
    if failures:
        yield f"  {failures} requests failed"
    shares = [turn.loaded_share for turn in turns if turn.loaded_share is not None]
    if shares and min(shares) < 1:
        yield f"  of the long prompts' KV {min(shares):.0%} came to the decode node, which computed the rest"


def ttft_report(connector: str, timed: Sequence[Timed]) -> dict[str, Any]:
    """One connector; the ratio is that of each turn."""
    return {
        "connector": connector,
        "found_s": summary([each.found_s for each in timed]),
        "recomputed_s": summary([each.recomputed_s for each in timed]),
        "found_per_recomputed": summary([each.found_s / each.recomputed_s for each in timed]),
        "found_tokens": summary([each.num_found for each in timed]),
    }


TTFT_HEADING = f"{'TTFT, ms':<12} {'KV found':>24} {'recomputed':>24} {'ratio':>19} {'found tokens':>12}"


def ttft_line(cell: Mapping[str, Any]) -> str:
    """The same as a line of a table."""
    return (
        f"{cell['connector']:<12} {_spread(cell['found_s'], 1e3, '.1f'):>24} "
        f"{_spread(cell['recomputed_s'], 1e3, '.1f'):>24} {_spread(cell['found_per_recomputed'], 1, '.3f'):>19} "
        f"{cell['found_tokens']['median']:>12.0f}"
    )


def transfer_report(connector: str, block_kib: int, timings: Mapping[str, Sequence[Timing]]) -> dict[str, Any]:
    """One connector and size of block; ratios are those of each turn."""
    return {
        "connector": connector,
        "block_kib": block_kib,
        "ways": {
            what: {
                "gb_per_s": summary([each.gb_per_s for each in found]),
                **{f"per_{what_else}": ratio for what_else, ratio in _ratios(found, timings)},
                **{
                    f"{side}_cpu_s_per_gb": summary(
                        [getattr(each, f"{side}_cpu_s") / each.nbytes * 1e9 for each in found]
                    )
                    for side in ("sender", "receiver", "server")
                },
            }
            for what, found in timings.items()
        },
    }


def _ratios(found: Sequence[Timing], timings: Mapping[str, Sequence[Timing]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for name, other in (("plain", PLAIN), ("copy", COPY)):
        if other in timings:
            pairs = zip(found, timings[other], strict=True)
            yield name, summary([each.gb_per_s / reference.gb_per_s for each, reference in pairs])


TRANSFER_HEADING = (
    f"{'transfer':<12} {'block':>9} {'way':<13} {'GB/s':>20} {'of plain (95%)':>17} {'of copy':>8} "
    f"{'CPU s per GB: sender':>20} {'receiver':>9} {'server':>7}"
)


def transfer_lines(cell: Mapping[str, Any]) -> Iterator[str]:
    """The same as lines of a table."""
    for what, way in cell["ways"].items():
        sides = [way[f"{side}_cpu_s_per_gb"]["median"] for side in ("sender", "receiver", "server")]
        plain = _certainty(way["per_plain"]) if "per_plain" in way else "-"
        yield (
            f"{cell['connector']:<12} {cell['block_kib']:>5} KiB {what:<13} {_spread(way['gb_per_s'], 1, '.2f'):>20} "
            f"{plain:>17} {way['per_copy']['median']:>8.2f} {sides[0]:>20.3f} {sides[1]:>9.3f} {sides[2]:>7.3f}"
        )


def _spread(values: Mapping[str, float], unit: float, form: str) -> str:
    median, least, most = (format(values[key] * unit, form) for key in ("median", "min", "max"))
    return f"{median} ({least}-{most})"


def _certainty(values: Mapping[str, Any]) -> str:
    """A median with its interval, if there are enough values for one."""
    interval = "" if values["interval"] is None else " ({:.2f}-{:.2f})".format(*values["interval"])
    return f"{values['median']:.2f}{interval}"
