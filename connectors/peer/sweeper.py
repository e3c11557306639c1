"""A thread that ends leases in time, whatever else happens or does not."""

import threading

from connectors.peer.leases import LeaseTable

LEAST_S = 1.0
"""Threads that wait for nothing but to be told are waited for so long at least: they end at once."""


class LeaseSweeper:
    """Looks at all leases every so often, and sleeps while there are none."""

    def __init__(self, leases: LeaseTable, period_s: float) -> None:
        self._leases = leases
        self._period_s = period_s
        self._thread = threading.Thread(target=self._run, name="outrider-kv-leases", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._leases.wait_for_any():
            self._leases.wait_until_closed(self._period_s)
            self._leases.sweep()

    def close(self, timeout_s: float) -> None:
        """End all leases and the thread, which takes no time to speak of; may be called twice."""
        self._leases.close()
        self._thread.join(max(timeout_s, LEAST_S))
