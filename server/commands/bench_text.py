"""A benchmark's result for reading in a terminal."""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from clients.bench import BenchResult
from clients.distribution import Distribution

_MAX_BINS = 12
_BAR_WIDTH = 40
_COLUMNS = ("mean", "p50", "p90", "p95", "p99", "max")


def render(result: BenchResult) -> str:
    """The figures, the latency table and two histograms, as lines of plain text."""
    report = cast("dict[str, Any]", result.report())
    return "\n".join((*_figures(report), "", *_latency_table(result, report["bursts"]), *_histograms(result)))


def _figures(report: Mapping[str, Any]) -> Iterator[str]:
    requests, tokens, throughput = report["requests"], report["tokens"], report["throughput"]
    yield f"{requests['completed']} requests completed in {report['duration_s']:.2f} s, {requests['failed']} failed"
    for status, count in requests["failed_by_status"].items():
        yield f"  {status}: {count}"
    yield f"requests/s            {throughput['requests_per_s']:.2f}"
    yield f"output tokens/s       {throughput['output_tokens_per_s']:.1f}  ({tokens['output']} tokens)"
    yield f"total tokens/s        {throughput['total_tokens_per_s']:.1f}  ({tokens['cached']} of the prompt's cached)"
    if (goodput := report["goodput"]) is not None:
        yield (
            f"goodput               {goodput['requests_per_s']:.2f} requests/s, {goodput['share']:.1%} within "
            f"TTFT {goodput['ttft_ms']:g} ms and TPOT {goodput['tpot_ms']:g} ms"
        )
    if drafts := report["speculation"]["draft_tokens"]:
        accepted = report["speculation"]["accepted_tokens"]
        yield f"drafts                {drafts} proposed, {accepted} accepted ({accepted / drafts:.1%})"
    cpu = report["client_cpu"]
    yield f"client's own CPU      {cpu['cpu_s']:.2f} s, {cpu['share_of_one_core']:.0%} of one core"


def _latency_table(result: BenchResult, bursts: Mapping[str, Any]) -> Iterator[str]:
    measurements = result.measurements
    rows: tuple[tuple[str, Distribution], ...] = (
        ("time to first token", measurements.ttft),
        ("time per output token", measurements.tpot),
        ("inter-message gap", measurements.message_gap),
        ("inter-token gap" + (" *" if bursts["messages"] else ""), measurements.token_gap),
        ("end to end", measurements.latency),
        ("sent after schedule", measurements.send_delay),
    )
    yield f"{'ms':<22}" + "".join(f"{column:>10}" for column in _COLUMNS)
    for name, values in rows:
        summary: Mapping[str, float | int] = values.summary_ms()
        cells = (f"{summary[column]:>10.2f}" if column in summary else f"{'-':>10}" for column in _COLUMNS)
        yield f"{name:<22}" + "".join(cells)
    if bursts["messages"]:
        yield f"* {bursts['tokens']} tokens came in {bursts['messages']} bursts; each burst is spread over its gap"


def _histograms(result: BenchResult) -> Iterator[str]:
    for name, values in (
        ("time to first token", result.measurements.ttft),
        ("time per output token", result.measurements.tpot),
    ):
        bins = values.histogram(_MAX_BINS)
        if not bins:
            continue
        most = max(count for _, _, count in bins)
        yield ""
        yield f"{name}, ms"
        for low, high, count in bins:
            bar = "█" * max(round(count / most * _BAR_WIDTH), 1 if count else 0)
            yield f"{low * 1e3:>10.2f} - {high * 1e3:>10.2f} |{bar} {count}"
