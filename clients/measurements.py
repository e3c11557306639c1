"""What a benchmark learned, in memory that does not grow with the number of tokens."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from clients.distribution import RELATIVE_ERROR, Distribution
from clients.outputs import Finished


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """What a request must meet to count as good."""

    ttft_s: float
    tpot_s: float


class RequestTimer:
    """The messages of one request; times are on one clock, in seconds.

    Latencies count from the scheduled send, not the real one: a client or a server that
    falls behind must not hide the wait it causes.
    """

    def __init__(self, scheduled_s: float) -> None:
        self.scheduled_s = scheduled_s
        self._first_s: float | None = None
        self._last_s = scheduled_s
        self._num_later_tokens = 0
        self._num_gaps = 0

    @property
    def ttft_s(self) -> float | None:
        """From the scheduled send to the first message with tokens; None if there was none."""
        return None if self._first_s is None else self._first_s - self.scheduled_s

    @property
    def num_gaps(self) -> int:
        """Messages with tokens after the first."""
        return self._num_gaps

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first message; None if all came in one."""
        if self._first_s is None or not self._num_later_tokens:
            return None
        return (self._last_s - self._first_s) / self._num_later_tokens

    def message(self, num_tokens: int, now_s: float) -> float | None:
        """Note a message with tokens. Returns: the gap to the one before it, None for the first."""
        if self._first_s is None:
            self._first_s = self._last_s = now_s
            return None
        gap_s = now_s - self._last_s
        self._last_s = now_s
        self._num_later_tokens += num_tokens
        self._num_gaps += 1
        return gap_s


class Measurements:
    """Results of one run; owned by the task that runs it."""

    def __init__(self, goodput: Goodput | None = None) -> None:
        self._goodput = goodput
        self.ttft = Distribution()
        self.tpot = Distribution()
        self.message_gap = Distribution()
        self.token_gap = Distribution()
        self.second_gap = Distribution()
        self.latency = Distribution()
        self.send_delay = Distribution()
        self.failures: Counter[str] = Counter()
        self._num_completed = 0
        self._num_good = 0
        self._num_bursts = 0
        self._num_burst_tokens = 0
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._num_output_tokens = 0
        self._num_draft_tokens = 0
        self._num_accepted_tokens = 0

    @property
    def num_completed(self) -> int:
        """Requests that ended well."""
        return self._num_completed

    @property
    def num_output_tokens(self) -> int:
        """Generated for those."""
        return self._num_output_tokens

    def record_gap(self, gap_s: float, num_tokens: int, *, is_first: bool = False) -> None:
        """A message of several tokens is a burst; each of them had its share of the gap.

        Args: is_first: of its request; where nodes share the work, that is the gap in which the second one takes over.
        """
        self.message_gap.add(gap_s)
        if is_first:
            self.second_gap.add(gap_s)
        self.token_gap.add(gap_s / num_tokens, num_tokens)
        if num_tokens > 1:
            self._num_bursts += 1
            self._num_burst_tokens += num_tokens

    def record_success(self, timer: RequestTimer, finished: Finished, end_s: float) -> None:
        """A request whose stream closed with OK at `end_s`."""
        self._num_completed += 1
        self.latency.add(end_s - timer.scheduled_s)
        ttft_s, tpot_s = timer.ttft_s, timer.tpot_s
        if ttft_s is not None:
            self.ttft.add(ttft_s)
        if tpot_s is not None:
            self.tpot.add(tpot_s)
        self._num_prompt_tokens += finished.usage.prompt_tokens
        self._num_cached_tokens += finished.usage.cached_tokens
        self._num_output_tokens += finished.usage.completion_tokens
        self._num_draft_tokens += finished.speculation.num_draft_tokens
        self._num_accepted_tokens += finished.speculation.num_accepted_draft_tokens
        goal = self._goodput
        if goal is not None and ttft_s is not None and ttft_s <= goal.ttft_s and (tpot_s or 0.0) <= goal.tpot_s:
            self._num_good += 1

    def report(self, duration_s: float) -> dict[str, object]:
        """Everything as JSON values; rates are over `duration_s`."""
        return {
            "duration_s": duration_s,
            "requests": {
                "completed": self._num_completed,
                "failed": self.failures.total(),
                "failed_by_status": dict(self.failures),
            },
            "tokens": {
                "prompt": self._num_prompt_tokens,
                "cached": self._num_cached_tokens,
                "output": self._num_output_tokens,
            },
            "throughput": {
                "requests_per_s": self._num_completed / duration_s,
                "output_tokens_per_s": self._num_output_tokens / duration_s,
                "total_tokens_per_s": (self._num_prompt_tokens + self._num_output_tokens) / duration_s,
            },
            "latency_ms": self._latencies(),
            "bursts": {
                "messages": self._num_bursts,
                "tokens": self._num_burst_tokens,
                "spread": "a message of n tokens counts as n token gaps of 1/n of the gap before it",
            },
            "goodput": self._goodput_report(duration_s),
            "speculation": {
                "draft_tokens": self._num_draft_tokens,
                "accepted_tokens": self._num_accepted_tokens,
                "acceptance_rate": (
                    self._num_accepted_tokens / self._num_draft_tokens if self._num_draft_tokens else None
                ),
            },
        }

    def _latencies(self) -> Mapping[str, object]:
        return {
            "time_to_first_token": self.ttft.summary_ms(),
            "time_per_output_token": self.tpot.summary_ms(),
            "inter_message_gap": self.message_gap.summary_ms(),
            "inter_token_gap": self.token_gap.summary_ms(),
            "first_to_second_message": self.second_gap.summary_ms(),
            "end_to_end": self.latency.summary_ms(),
            "send_delay": self.send_delay.summary_ms(),
            "percentile_relative_error": RELATIVE_ERROR,
        }

    def _goodput_report(self, duration_s: float) -> Mapping[str, float] | None:
        if self._goodput is None:
            return None
        num_requests = self._num_completed + self.failures.total()
        return {
            "ttft_ms": self._goodput.ttft_s * 1e3,
            "tpot_ms": self._goodput.tpot_s * 1e3,
            "requests": self._num_good,
            "share": self._num_good / num_requests if num_requests else 0.0,
            "requests_per_s": self._num_good / duration_s,
        }
