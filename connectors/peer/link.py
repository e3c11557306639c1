"""All that goes on with one other node: loads, the threads they run on, and signs of life."""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from connectors.peer.address import PeerAddress
from connectors.peer.loading import Cancelled, Loading
from connectors.peer.signs import SignsOfLife
from connectors.rare_log import RareLog
from connectors.threads import Threads

logger = logging.getLogger(__name__)


class PeerLink(ABC):
    """One for each start of another node, so that one that hangs keeps no other waiting."""

    errors: tuple[type[Exception], ...]
    """What `fetch` raises if blocks do not come."""

    def __init__(
        self, address: PeerAddress, signs: SignsOfLife, clock: Callable[[], float], *, name: str, num_threads: int
    ) -> None:
        """Args: name: of the threads. num_threads: loads at a time."""
        self._address = address
        self._signs = signs
        self._clock = clock
        self._threads = Threads(name, num_threads)
        self._log = RareLog(logger, clock)
        self._lock = threading.Lock()
        self._loadings: dict[int, Loading] = {}

    @abstractmethod
    def fetch(self, loading: Loading) -> None:
        """Bring in a load. Raises: one of `errors`, Cancelled."""

    @abstractmethod
    def free(self) -> None:
        """Nothing will be fetched any more."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lost by closing it."""
        with self._lock:
            return not self._loadings and self._signs.is_idle

    def hold(self, lease_id: str) -> None:
        """See PeerTransport.hold."""
        self._signs.hold(lease_id)

    def release(self, lease_id: str) -> None:
        """See PeerTransport.release."""
        self._signs.release(lease_id)

    def load(self, loading: Loading) -> None:
        """Begin it as soon as a thread is free."""
        with self._lock:
            self._loadings[loading.load.seq_id] = loading
        self._signs.use(loading.load.source.lease_id)
        self._threads.submit(partial(self._run, loading))

    def cancel(self, seq_id: int) -> None:
        """End a load soon, if it is one of these."""
        with self._lock:
            loading = self._loadings.get(seq_id)
        if loading is not None and loading.cancel():
            self._end(loading)

    def _run(self, loading: Loading) -> None:
        if not loading.begin():
            return
        try:
            self.fetch(loading)
        except Cancelled:
            pass
        except self.errors as error:
            if not loading.is_cancelled:
                self._log.warning(
                    type(error).__name__,
                    "%d of %d blocks did not come from %s: %s",
                    len(loading.load.block_ids) - loading.num_done,
                    len(loading.load.block_ids),
                    self._address,
                    error,
                )
        finally:
            self._end(loading)

    def _end(self, loading: Loading) -> None:
        with self._lock:
            self._loadings.pop(loading.load.seq_id, None)
        self._signs.leave(loading.load.source.lease_id)
        loading.end()

    def stop(self) -> None:
        """Cancel all loads."""
        with self._lock:
            loadings = list(self._loadings)
        for seq_id in loadings:
            self.cancel(seq_id)

    def close(self, timeout_s: float) -> None:
        """Cancel all loads, tell the other node, and end all threads."""
        until_s = time.monotonic() + timeout_s
        self.stop()
        self._threads.end(timeout_s)
        signs = self._signs.close()
        if signs is not None:
            signs.join(max(0.0, until_s - time.monotonic()))
        self.free()
