"""What a contest measures: a workload, and how one side did with it."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A batch that is sent at once and generated from greedily, to exactly `output_len` tokens each."""

    batch: int
    input_len: int
    output_len: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One round of one side; times in seconds.

    Attributes:
        ttft_s: from sending to the latest first token of the batch.
        decode_s: from there to the last token.
        wall_s: from sending to having it all.
        num_tokens: generated; num_first of them had come with the first message of each sequence.
        client_cpu_s: what the sender itself computed meanwhile; None where sender and engine are one process.
    """

    ttft_s: float
    decode_s: float
    wall_s: float
    num_tokens: int
    num_first: int
    client_cpu_s: float | None = None

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, by the time from the latest first token to the last one."""
        return (self.num_tokens - self.num_first) / self.decode_s

    @property
    def tokens_per_s(self) -> float:
        """All tokens by all the time, prompts included."""
        return self.num_tokens / self.wall_s

    def tokens_per_s_without_client(self, num_cpus: int) -> float:
        """The same as if the client were elsewhere: its CPU time, spread over the CPUs, is not counted."""
        return self.num_tokens / (self.wall_s - (self.client_cpu_s or 0.0) / num_cpus)


Prompts = Sequence[Sequence[int]]
"""Token ids of each sequence of a batch."""
