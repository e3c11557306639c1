"""What the scheduler counts."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Counts since the start; read through Scheduler.statistics()."""

    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def count_drafts(self, num_drafted: int, num_accepted: int) -> None:
        """Add one row's drafts, by position."""
        for counts, number in ((self.drafted, num_drafted), (self.accepted, num_accepted)):
            counts.extend([0] * (number - len(counts)))
            for position in range(number):
                counts[position] += 1
