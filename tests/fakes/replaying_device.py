"""Decoding on a device that replays captured steps: with drafts or without, and the next one launched meanwhile."""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from server.scheduler.draft_policy import Allowance, DraftPolicy


@dataclass(frozen=True)
class ReplayingDevice:
    """What steps take in seconds; as much for one draft as for all.

    Attributes:
        row_s: what each row adds. verify_s, draft_s: what verifying and proposing take. crowded_s: what each row adds
            to verifying besides.
        catch_up_s: of a step that proposes behind one that did not.
        noise: each step takes up to so much longer or shorter.
        held_up: steps without drafts wait for the host: their time is multiplied by 1 + a number with an exponential
            distribution of this mean, the same for some steps on end.
    """

    base_s: float = 1.0
    row_s: float = 0.01
    verify_s: float = 0.15
    draft_s: float = 0.9
    crowded_s: float = 0.0
    catch_up_s: float = 1.0
    noise: float = 0.05
    held_up: float = 0.0

    def duration_s(self, allowance: Allowance, num_rows: int, *, is_behind: bool) -> float:
        """A step of so many rows; the more rows, the more drafts take, too."""
        parts = (self.verify_s + self.crowded_s * num_rows) * (allowance.max_drafts > 0)
        if allowance.next_drafts:
            parts += self.draft_s + self.catch_up_s * is_behind
        return (self.base_s + parts) * (1.0 + self.row_s * num_rows)


@dataclass(frozen=True)
class Decoded:
    """A step: the tokens of its rows, and how long it took."""

    num_tokens: int
    duration_s: float
    num_drafts: int


class Decoding:
    """Rows without an end, under a policy, which begin with a prompt's step."""

    def __init__(self, policy: DraftPolicy, device: ReplayingDevice, seed: int = 0) -> None:
        self._policy = policy
        self._device = device
        self._random = random.Random(seed)
        self._host = random.Random(seed)  # holds up alike whatever the policy does
        self._held_up = 0.0
        self._under_way: deque[tuple[Allowance, int, float]] = deque()
        self.begin()

    def begin(self) -> None:
        """All rows end, and a prompt's step begins new ones, which are ahead of no proposer."""
        self._under_way.clear()
        self._is_behind = not self._policy.allow(0).next_drafts

    def run(self, num_rows: int, num_steps: int, acceptance: float, drafting: float = 1.0) -> list[Decoded]:
        """Args: acceptance: chance of a draft if those before it are kept. drafting: share of rows that have any."""
        done: list[Decoded] = []
        while len(done) < num_steps:
            allowance = self._policy.allow(num_rows)
            duration_s = self._device.duration_s(allowance, num_rows, is_behind=self._is_behind)
            duration_s *= self._random.uniform(1 - self._device.noise, 1 + self._device.noise)
            if self._device.held_up and self._host.random() < 0.125:
                self._held_up = self._host.expovariate(1 / self._device.held_up)
            if not (allowance.next_drafts or allowance.max_drafts):
                duration_s *= 1 + self._held_up
            else:
                self._is_behind = not allowance.next_drafts
            self._under_way.append((allowance, num_rows, duration_s))
            if len(self._under_way) > 1:
                done.append(self._settle(acceptance, drafting))
        return done

    def _settle(self, acceptance: float, drafting: float) -> Decoded:
        allowance, num_rows, duration_s = self._under_way.popleft()
        num_tokens = num_rows
        for _ in range(round(num_rows * drafting) if allowance.max_drafts else 0):
            kept = 0
            while kept < allowance.max_drafts and self._random.random() < acceptance:
                kept += 1
            self._policy.settle_row(allowance, allowance.max_drafts, kept)
            num_tokens += kept
        self._policy.settle_step(allowance, num_rows, duration_s)
        return Decoded(num_tokens, duration_s, allowance.max_drafts)


def rate(steps: Sequence[Decoded]) -> float:
    """Tokens per second."""
    return sum(step.num_tokens for step in steps) / sum(step.duration_s for step in steps)
