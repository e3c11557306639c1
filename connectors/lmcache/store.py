"""Blocks as objects of an LMCache server."""

import logging
import threading
from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np

from connectors.lmcache.link import LMCacheLink
from connectors.lmcache.server import LMCacheServer
from connectors.rare_log import RareLog
from connectors.save_failure import SaveFailure
from connectors.wire import HEADER_NBYTES, find_fault, pack_header

MOST_SPOILT = 1024

logger = logging.getLogger(__name__)


class LMCacheStore:
    """Implements connectors.store.BlockStore: an object of the server for each block, in the form of connectors.wire.

    The server has no checksum, and may hand out what was never written: an engine that dies while it saves leaves
    such an object behind. Nobody can remove it, so it is remembered here, as one that is not there.
    """

    def __init__(self, server: LMCacheServer) -> None:
        """Args: server: closed with this."""
        self._server = server
        self._nbytes: dict[str, int] = {}
        self._spoilt: dict[tuple[str, bytes], None] = {}
        self._spoilt_lock = threading.Lock()
        self._log = RareLog(logger)

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """The server wants to know the size before it looks for any."""
        self._nbytes[namespace] = HEADER_NBYTES + block_nbytes

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """A few calls for each block, many at a time; stops behind those in which the first is missing."""
        with self._spoilt_lock:
            good = next((i for i, item in enumerate(hashes) if (namespace, item) in self._spoilt), len(hashes))
        return self._server.attempt(partial(self._find, namespace, hashes[:good]), 0)

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """One copy, out of memory that the server shares."""
        return self._server.attempt(partial(self._load, namespace, block_hash, into), False)

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """One copy, into memory that the server shares."""
        unreached = cast("SaveFailure | None", SaveFailure.UNAVAILABLE)
        return self._server.attempt(partial(self._save, namespace, block_hash, data), unreached)

    def close(self) -> None:
        """Leave the server."""
        self._server.close()

    def _find(self, namespace: str, hashes: Sequence[bytes], link: LMCacheLink) -> int:
        link.register(namespace, self._nbytes[namespace])
        return link.find(namespace, hashes)

    def _load(self, namespace: str, block_hash: bytes, into: memoryview, link: LMCacheLink) -> bool:
        link.register(namespace, self._nbytes[namespace])
        with link.reading(namespace, block_hash) as kept:
            if kept is None:
                return False
            header = kept[:HEADER_NBYTES].tobytes()
            np.copyto(np.frombuffer(into, np.uint8), kept[HEADER_NBYTES:])
        fault = find_fault(header, namespace, block_hash, into)
        if fault is None:
            return True
        self._log.warning("fault", "block %s of the LMCache server is not used: %s", block_hash.hex(), fault)
        with self._spoilt_lock:
            self._spoilt[namespace, block_hash] = None
            if len(self._spoilt) > MOST_SPOILT:
                del self._spoilt[next(iter(self._spoilt))]
        return False

    def _save(self, namespace: str, block_hash: bytes, data: memoryview, link: LMCacheLink) -> SaveFailure | None:
        link.register(namespace, self._nbytes[namespace])
        with link.writing(namespace, block_hash) as room:
            if room is not None:
                room[:HEADER_NBYTES] = np.frombuffer(pack_header(namespace, block_hash, data), np.uint8)
                np.copyto(room[HEADER_NBYTES:], np.frombuffer(data, np.uint8))
        if room is None:  # it is there, or there is no room for it
            return None if link.find(namespace, [block_hash]) else SaveFailure.FULL
        with self._spoilt_lock:
            self._spoilt.pop((namespace, block_hash), None)
        return None
