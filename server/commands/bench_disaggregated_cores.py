"""Which cores the processes of `outrider bench disaggregated` run on."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from server.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Cores:
    """The same cores for both set-ups.

    Attributes:
        prefill, decode: of the two nodes.
        client: of this process: those that no server has, or all if there are none.
    """

    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    client: tuple[int, ...]

    @property
    def both(self) -> tuple[int, ...]:
        """Of one node that does all of it."""
        return self.prefill + self.decode

    @property
    def is_client_apart(self) -> bool:
        """Whether the client takes nothing from the servers."""
        return not set(self.client) & set(self.both)


def divide_cores(given: Sequence[int], num_prefill: int | None, available: Sequence[int] | None = None) -> Cores:
    """Args:
        given: cores of the servers; all that there are if empty.
        num_prefill: how many of them are the prefill node's; half if None.
        available: to this process; asked of the system if None.
    Raises: ConfigError.
    """
    if available is None:
        if not hasattr(os, "sched_setaffinity"):
            raise ConfigError("bench disaggregated: processes can be bound to cores on Linux only")
        available = sorted(os.sched_getaffinity(0))
    if missing := sorted(set(given) - set(available)):
        raise ConfigError(
            f"--cores: this process may not use {', '.join(map(str, missing))}, only {_listed(available)}"
        )
    cores = tuple(dict.fromkeys(given or available))
    count = len(cores) // 2 if num_prefill is None else num_prefill
    if not 0 < count < len(cores):
        raise ConfigError(
            f"--prefill-cores: each of the two nodes needs a core; there are {len(cores)}, {count} of them for prefill"
        )
    rest = tuple(core for core in available if core not in cores)
    return Cores(cores[:count], cores[count:], rest or tuple(available))


def _listed(cores: Sequence[int]) -> str:
    return ", ".join(map(str, cores))
