"""The parts of `outrider bench disaggregated`."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clients.measurements import Measurements
from clients.mixed_load import MixedResult
from server.commands.bench_disaggregated_arguments import add_arguments, fill_in
from server.commands.bench_disaggregated_connectors import chosen_connectors
from server.commands.bench_disaggregated_cores import divide_cores
from server.commands.bench_disaggregated_frontier import SHARED, Turn, candidate_names, check
from server.commands.bench_disaggregated_load import LONG, PARTS, STREAM, TURNS, Load, arrivals
from server.commands.bench_disaggregated_process import LoggedProcess
from server.commands.bench_disaggregated_report import (
    TRANSFER_HEADING,
    TTFT_HEADING,
    frontier_lines,
    frontier_report,
    transfer_lines,
    transfer_report,
    ttft_line,
    ttft_report,
)
from server.commands.bench_disaggregated_transfer import COPY, PLAIN, Timing
from server.commands.bench_disaggregated_ttft import Timed
from server.commands.bench_disaggregated_verdict import Point, Verdict, crossover, judge, verdict_lines
from server.errors import ConfigError, OutriderError

LOAD = Load(
    budgets=(128, 32, 32),
    rates=(1.0,),
    burst_size=2,
    prompt_len=20,
    output_len=4,
    stream_rate=5.0,
    stream_input_len=3,
    stream_output_len=8,
    duration=10.0,
    turns=TURNS,
    hop_connector="tcp",
    block_kib=(64,),
    mib=1,
    seed=0,
)
CORE = max(os.sched_getaffinity(0))
TWO = Point(SHARED, ttft_s=1.0, gap_p99_s=0.05, tokens_per_s=100.0)


def one(budget: int, ttft_s: float, gap_p99_s: float, tokens_per_s: float = 100.0) -> Point:
    return Point(f"budget {budget}", ttft_s, gap_p99_s, tokens_per_s)


def test_the_best_single_node_is_the_smoothest_of_those_with_as_early_first_tokens() -> None:
    late, equal, early = one(32, 1.2, 0.04), one(64, 1.1, 0.12), one(128, 1.0, 0.3)
    verdict = judge(TWO, [late, equal, early])
    assert verdict.best == equal, "its first tokens are within the margin, and its gap is the smallest of these"
    assert verdict.gap_ratio == pytest.approx(0.05 / 0.12)
    assert verdict.is_reached
    assert verdict.beaten == (equal, early)
    assert verdict.unbeaten == (late,), "whose gap is shorter"


def test_where_no_single_node_is_as_early_the_earliest_is_compared() -> None:
    verdict = judge(TWO, [one(32, 3.0, 0.06), one(64, 2.0, 0.2)])
    assert verdict.best.name == "budget 64"
    assert verdict.is_reached


@pytest.mark.parametrize(
    ("shared", "reason"),
    [
        (replace(TWO, gap_p99_s=0.051), "more than half of the gap"),
        (replace(TWO, ttft_s=1.2), "first tokens come later than within the margin"),
        (replace(TWO, tokens_per_s=80.0), "it does not keep up"),
    ],
)
def test_the_goal_is_missed(shared: Point, reason: str) -> None:
    single = one(64, 1.0, 0.1)
    assert judge(TWO, [single]).is_reached
    verdict = judge(shared, [single])
    assert not verdict.is_reached, reason


def test_a_single_node_that_does_not_keep_up_is_not_the_best_one() -> None:
    slow, equal = one(32, 1.0, 0.06, tokens_per_s=50.0), one(64, 1.0, 0.2)
    assert judge(TWO, [slow, equal]).best == equal


def verdict_of(*, is_reached: bool) -> Verdict:
    verdict = judge(TWO, [one(64, 1.0, 0.2 if is_reached else 0.06)])
    assert verdict.is_reached == is_reached
    return verdict


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        ({0.5: True, 1.0: True}, "the goal is reached at every rate that was measured"),
        ({0.5: False, 1.0: False}, "the goal is reached at no rate that was measured"),
        ({2.0: True, 0.5: False, 1.0: True}, "the goal is reached from 1 prompts/s on, not at 0.5"),
        ({0.5: True, 1.0: False}, "the goal is reached at 0.5 prompts/s, not at 1"),
    ],
)
def test_the_crossover_is_stated(outcomes: dict[float, bool], words: str) -> None:
    assert crossover({rate: verdict_of(is_reached=reached) for rate, reached in outcomes.items()}) == words


def test_the_verdict_names_what_is_dominated_and_what_is_not() -> None:
    lines = list(verdict_lines({0.5: judge(TWO, [one(32, 1.0, 0.01), one(64, 1.0, 0.2)])}))
    assert lines[0].startswith("0.5 prompts/s: goal missed: p99 gap 50.0 ms, x5.00 of budget 32's (goal x0.5)")
    assert lines[1] == f"  {SHARED} dominates budget 64; not budget 32"
    assert lines[2].startswith("crossover: ")


def test_every_set_up_gets_the_same_streams_and_bursts() -> None:
    sent = arrivals(LOAD, 1.0, 512, seed=4)
    assert sent == arrivals(LOAD, 1.0, 512, seed=4)
    assert sent != arrivals(LOAD, 1.0, 512, seed=6)
    assert [each.at_s for each in sent] == sorted(each.at_s for each in sent)
    assert [each.at_s for each in sent if each.kind == LONG] == [1, 1, 3, 3, 5, 5, 7, 7, 9, 9]
    streams = [each for each in sent if each.kind == STREAM]
    assert 25 <= len(streams) <= 75
    assert max(each.at_s for each in sent) < LOAD.duration
    prompts = [each.prompt.token_ids for each in sent]
    assert len(set(prompts)) == len(prompts), "nothing is found in a prefix cache"
    assert {len(prompt or ()) for prompt in prompts} == {20, 3}


def test_a_quick_run_does_less_of_everything_but_what_it_is_told() -> None:
    def load_of(*arguments: str) -> Load:
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        args = parser.parse_args(arguments)
        fill_in(args)
        return Load.of(args)

    full, quick = load_of(), load_of("--quick")
    assert set(quick.budgets) < set(full.budgets)
    assert quick.duration < full.duration
    assert all(quick.turns[part] <= full.turns[part] for part in PARTS)
    assert quick.turns != full.turns
    assert load_of("--quick", "--budgets", "8,16", "--repeat", "3") == load_of(
        *("--budgets", "8,16", "--repeat", "3", "--duration", "20", "--block-kib", "1024", "--mib", "64")
    )


def test_token_budgets_are_measured_once_and_in_order() -> None:
    assert candidate_names(LOAD) == ["budget 32", "budget 128", SHARED]


def test_lengths_that_the_model_does_not_take_are_refused() -> None:
    LOAD.check_lengths(24)
    with pytest.raises(ConfigError, match="is 24 tokens, and the model takes 23"):
        LOAD.check_lengths(23)


def test_both_set_ups_have_the_same_cores() -> None:
    cores = divide_cores([], None, available=[2, 3, 5])
    assert (cores.prefill, cores.decode, cores.both) == ((2,), (3, 5), (2, 3, 5))
    assert cores.client == (2, 3, 5)
    assert not cores.is_client_apart
    apart = divide_cores([3, 5], 1, available=[2, 3, 5])
    assert (apart.prefill, apart.decode, apart.client) == ((3,), (5,), (2,))
    assert apart.is_client_apart


@pytest.mark.parametrize(
    ("given", "num_prefill", "message"),
    [([], 3, "needs a core"), ([2], None, "needs a core"), ([2, 9], None, "--cores: this process may not use 9")],
)
def test_cores_that_there_are_not_are_refused(given: list[int], num_prefill: int | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        divide_cores(given, num_prefill, available=[2, 3, 5])


def test_a_connector_that_is_not_installed_is_left_out_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert chosen_connectors(None) == ["filesystem", "tcp", "memory"]
    with pytest.raises(ConfigError, match=r"nixl is not installed: pip install 'outrider\[nixl\]'"):
        chosen_connectors(["tcp", "nixl"])


def result_of(*, ttft_s: float, gap_s: float) -> MixedResult:
    """Two kinds, each with a request of three tokens."""
    by_kind = {kind: Measurements() for kind in (LONG, STREAM)}
    for measurements in by_kind.values():
        measurements.ttft.add(ttft_s)
        measurements.record_gap(gap_s, 1, is_first=True)
        measurements.record_gap(gap_s, 1)
        measurements._num_completed = 1
        measurements._num_output_tokens = 3
    return MixedResult(by_kind, duration_s=2.0, client_cpu_s=0.1)


def test_a_frontier_is_of_medians_over_turns() -> None:
    results = {
        1.0: {
            "budget 32": [Turn(result_of(ttft_s=ttft_s, gap_s=0.1), None) for ttft_s in (1.0, 9.0, 2.0)],
            SHARED: [Turn(result_of(ttft_s=1.0, gap_s=gap_s), 1.0) for gap_s in (0.01, 0.02, 0.5)],
        }
    }
    report = frontier_report(results)
    (rate,) = report["rates"]
    single, shared = rate["setups"]
    assert single["ttft_p50_s"]["median"] == pytest.approx(2.0, rel=0.01)
    assert shared["gap_p99_s"]["median"] == pytest.approx(0.02, rel=0.01)
    assert shared["gap_p99_s"]["max"] == pytest.approx(0.5, rel=0.01)
    assert single["tokens_per_s"]["all"] == [3.0, 3.0, 3.0]
    assert [turn["duration_s"] for turn in shared["turns"]] == [2.0, 2.0, 2.0]
    assert rate["verdict"]["is_reached"]
    assert report["crossover"] == "the goal is reached at every rate that was measured"
    heading, *lines = frontier_lines(1.0, results[1.0])
    assert heading.startswith("1 prompts/s, ms")
    assert [line[:22].strip() for line in lines] == ["budget 32", SHARED]
    end = heading.index("p99 min-max")
    assert {len(line[:end].rstrip()) for line in (heading, *lines)} == {end - 3}, "columns line up"


def test_a_line_says_what_makes_its_numbers_others() -> None:
    failed = result_of(ttft_s=1.0, gap_s=0.1)
    failed.by_kind[STREAM].failures["UNAVAILABLE"] = 2
    results = {
        "budget 32": [Turn(failed, None)],
        SHARED: [Turn(result_of(ttft_s=1.0, gap_s=0.1), share) for share in (1.0, 0.25)],
    }
    _, _, failures, _, share = frontier_lines(1.0, results)
    assert failures == "  2 requests failed"
    assert share == "  of the long prompts' KV 25% came to the decode node, which computed the rest"


def test_a_set_up_that_answers_nothing_of_a_kind_is_an_error() -> None:
    result = result_of(ttft_s=1.0, gap_s=0.1)
    check(result, "budget 32")
    failed = Measurements()
    failed.failures["RESOURCE_EXHAUSTED"] = 4
    with pytest.raises(OutriderError, match="budget 32: no long request was answered: 4 x RESOURCE_EXHAUSTED"):
        check(replace(result, by_kind={**result.by_kind, LONG: failed}), "budget 32")


def test_ratios_are_those_of_each_turn() -> None:
    cell = ttft_report("tcp", [Timed(1.0, 0.5, 32), Timed(4.0, 1.0, 32), Timed(2.0, 0.2, 32)])
    assert cell["found_per_recomputed"]["all"] == [0.5, 0.25, 0.1]
    assert cell["found_tokens"]["median"] == 32
    assert len(ttft_line(cell)) == len(TTFT_HEADING)


def test_rates_and_costs_of_transfers() -> None:
    def timed(wall_s: float) -> Timing:
        return Timing(2 * 10**9, wall_s, sender_cpu_s=1.0, receiver_cpu_s=3.0)

    timings = {COPY: [timed(0.5), timed(0.25)], PLAIN: [timed(1.0), timed(2.0)], "load": [timed(2.0), timed(2.0)]}
    cell: dict[str, Any] = transfer_report("tcp", 64, timings)
    load = cell["ways"]["load"]
    assert load["gb_per_s"]["median"] == 1.0
    assert load["per_plain"]["all"] == [0.5, 1.0]
    assert load["per_copy"]["all"] == [0.25, 0.125]
    assert (load["sender_cpu_s_per_gb"]["median"], load["receiver_cpu_s_per_gb"]["median"]) == (0.5, 1.5)
    lines = list(transfer_lines(cell))
    assert "0.75 " in lines[-1], "two turns are too few for an interval"
    many = transfer_report("tcp", 64, {what: found * 3 for what, found in timings.items()})
    assert "0.75 (0.50-1.00)" in list(transfer_lines(many))[-1]
    assert [len(line) for line in lines] == [len(TRANSFER_HEADING)] * 3
    alone = transfer_report("memory", 64, {COPY: timings[COPY], "save": timings["load"]})
    assert "per_plain" not in alone["ways"]["save"], "within one process there is no socket"


def test_a_process_that_ends_is_explained_by_the_last_line_of_its_log(tmp_path: Path) -> None:
    code = "import sys; print('loading', flush=True); sys.exit('no such model')"
    process = LoggedProcess("budget 32", [sys.executable, "-c", code], tmp_path, [CORE])
    process.popen.wait()
    with pytest.raises(OutriderError, match=r"^budget 32 ended with exit code 1: no such model$"):
        process.check_alive()
    process.close()


def test_a_process_runs_on_its_cores_and_does_not_see_settings_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_PORT", "1")
    code = "import os; print(os.sched_getaffinity(0), [name for name in os.environ if name.startswith('OUTRIDER')])"
    process = LoggedProcess("one", [sys.executable, "-c", code], tmp_path, [CORE], hidden_prefix="OUTRIDER_")
    process.popen.wait()
    assert (tmp_path / "one.log").read_text().strip() == f"{{{CORE}}} []"
    process.close()
