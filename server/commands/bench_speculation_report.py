"""What the rounds of `outrider bench speculation` come to, as JSON values and as lines of a table."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from server.commands.bench_speculation_load import GOALS
from server.commands.bench_speculation_rounds import AUTO, OFF, Candidate, Measured

_RATIOS = {"auto_per_off": "auto/off", "auto_per_best": "auto/best"}


def cell_report(workload: str, concurrency: int, measured: Mapping[Candidate, Sequence[Measured]]) -> dict[str, Any]:
    """One workload at one concurrency, decoding alone: from the latest first token to the last one."""
    rates = {candidate: [_tokens_per_s(each, concurrency) for each in found] for candidate, found in measured.items()}
    return {
        "workload": workload,
        "concurrency": concurrency,
        "candidates": [
            {"drafts": candidate.name, "tokens_per_s": _summary(rates[candidate]), **_candidate_report(found)}
            for candidate, found in measured.items()
        ],
        **_ratios(rates),
    }


def phase_report(workload: str, concurrency: int, rates: Mapping[Candidate, Sequence[float]]) -> dict[str, Any]:
    """One phase of the run that changes. Args: rates: tokens/s of each turn."""
    return {
        "workload": workload,
        "concurrency": concurrency,
        "candidates": [
            {"drafts": candidate.name, "tokens_per_s": _summary(found)} for candidate, found in rates.items()
        ],
        **_ratios(rates),
    }


def _ratios(rates: Mapping[Candidate, Sequence[float]]) -> dict[str, Any]:
    """Auto against the others, turn by turn: what drifts is the same for both."""
    fixed = [candidate for candidate in rates if candidate is not AUTO]
    best = max(fixed, key=lambda candidate: statistics.median(rates[candidate]))
    return {
        "best_fixed": best.k,
        "auto_per_off": _summary(_divided(rates[AUTO], rates[OFF])),
        "auto_per_best": _summary(_divided(rates[AUTO], rates[best])),
    }


def _divided(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [our / their for our, their in zip(ours, theirs, strict=True)]


def _candidate_report(found: Sequence[Measured]) -> dict[str, Any]:
    rounds = [each.round for each in found]
    drafts, accepted = sum(each.num_drafts for each in rounds), sum(each.num_accepted for each in rounds)
    draft_rows, num_steps = sum(each.num_draft_rows for each in rounds), sum(each.num_steps for each in found)
    return {
        "step_ms": _summary([1e3 * each.decode_s / each.num_steps for each in rounds]),
        "acceptance_rate": accepted / drafts if drafts else None,
        "mean_acceptance_length": 1 + accepted / draft_rows if draft_rows else None,
        "draft_time_share": sum(each.draft_s for each in found) / sum(each.ttft_s + each.decode_s for each in rounds),
        "mean_drafts_chosen": sum(each.num_drafts_chosen for each in found) / num_steps,
    }


def _tokens_per_s(measured: Measured, concurrency: int) -> float:
    return (measured.round.num_tokens - concurrency) / measured.round.decode_s


def _summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "all": list(values)}


def heading(names: Sequence[str]) -> str:
    """The columns. Args: names: of the candidates."""
    rates = " ".join(f"{_title(name):>8}" for name in names)
    ratios = " ".join(f"{words:>18}" for words in _RATIOS.values())
    return f"{'workload':<8} {'batch':>5} {rates} {'best':>5} {ratios} {'auto k':>6} {'accepted':>8} {'length':>6}"


def cell_line(cell: Mapping[str, Any]) -> str:
    """Medians of tokens/s, the ratios with their spread, and what the largest k accepted."""
    *fixed, auto = cell["candidates"]
    rates = " ".join(f"{each['tokens_per_s']['median']:>8,.1f}" for each in cell["candidates"])
    ratios = " ".join(f"{_spread(cell[name]):>18}" for name in _RATIOS)
    tail = (
        _or_dash(auto.get("mean_drafts_chosen"), "6.1f"),
        _or_dash(fixed[-1].get("acceptance_rate"), "8.2f"),
        _or_dash(fixed[-1].get("mean_acceptance_length"), "6.2f"),
    )
    best = f"{_title(str(cell['best_fixed'])):>5}"
    return f"{cell['workload']:<8} {cell['concurrency']:>5} {rates} {best} {ratios} {' '.join(tail)}"


def verdict(cells: Sequence[Mapping[str, Any]], where: str) -> Iterator[str]:
    """How many of the cells reached each goal, and which did not. Args: where: what the cells are of."""
    for name, goal in GOALS.items():
        missed = [cell for cell in cells if cell[name]["median"] < goal]
        line = f"{where}, {_RATIOS[name]} >= {goal}: {len(cells) - len(missed)} of {len(cells)}"
        listed = [f"{cell['workload']} x {cell['concurrency']} ({cell[name]['median']:.3f})" for cell in missed]
        yield line + (f"; not {', '.join(listed)}" if listed else "")


def _title(name: str) -> str:
    return {"auto": "auto", "0": "off"}.get(name, f"k={name}")


def _spread(summary: Mapping[str, float]) -> str:
    return f"{summary['median']:.2f} ({summary['min']:.2f}-{summary['max']:.2f})"


def _or_dash(value: float | None, form: str) -> str:
    return f"{'-':>{form.partition('.')[0]}}" if value is None else format(value, form)
