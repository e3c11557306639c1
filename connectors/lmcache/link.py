"""A connection to LMCache's multi-process server, which keeps objects of bytes for us (its engine-driven mode).

The server keeps a chunk of tokens' KV under the hash of these tokens and of all in front of them, and knows it as a
tensor of a shape that was registered. Here a chunk is one of our blocks: the words of the block's hash, padded to the
server's chunk size, are its tokens, and the shape is a row of bytes. So the server hashes our hashes, and any block
can be asked for by itself, whatever the server's chunk size and our block size are.

What is known of the server (0.5.6), and why calls are as they are:
- A call that fails there is not answered at all: everything has a time limit.
- `lookup` locks what it finds for 300 s. Ending the session does not let go of it, `free_lookup_locks` does, and only
  while the session is there: its answer is waited for before the session is ended.
- It tells retrievals that are under way from each other by instance and object only: of two at a time, one lock stays.
- Calls of one session may be carried out at the same time, so each waits for the one before it.
- Registrations end with the server, and after an hour of silence; then lookups are answered with nothing found. They
  are renewed by time.
"""

import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connectors.lmcache.failure import LMCacheFailure
from connectors.lmcache.pool import LMCachePool
from connectors.wire import HASH_NBYTES, namespace_digest

RENEW_AFTER_S = 60.0
"""Registrations are renewed with the first use after so long."""
WINDOW = 64
"""Blocks that are looked up at a time."""

LINGER_MS = 100
"""How long what was said last may still be sent after a connection was closed."""
NUM_WORDS = HASH_NBYTES // 4
MAX_CHUNK_SIZE = 1 << 16
"""Every call for a block has so many words."""

_WORDS = struct.Struct(f">{NUM_WORDS}I")


@dataclass(frozen=True, slots=True)
class _Space:
    """A namespace as the server knows it: a model, an instance of it, and bytes of each object."""

    model: str
    instance_id: int
    nbytes: int
    renewed_s: float


class LMCacheLink:
    """Calls of one connection; used from several threads, within `in_use`. After a failure another one is made."""

    def __init__(self, url: str, timeout_s: float) -> None:
        """Args: timeout_s: of all calls for one block, or for the look-up of some. Raises: LMCacheFailure."""
        import zmq
        from lmcache.v1.multiprocess.custom_types import IPCCacheServerKey, RegisterEngineDrivenContextPayload
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory

        self._key_type: Any = IPCCacheServerKey
        self._registration_type: Any = RegisterEngineDrivenContextPayload
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._num_users = 0
        self._being_read: set[tuple[str, bytes]] = set()
        self._read_ended = threading.Condition()
        self._is_retired = False
        self._spaces: dict[str, _Space] = {}
        self._pool: LMCachePool | None = None
        self._context = zmq.Context()
        self._context.setsockopt(zmq.LINGER, LINGER_MS)
        try:
            self._client: Any = RequestClientFactory.create(url, context=self._context)
        except zmq.ZMQError as error:
            self._context.term()
            raise LMCacheFailure(f"it cannot be connected to: {error}") from error
        try:
            self._chunk_size = int(self._answer(self._client.get_chunk_size(), self._deadline()))
            if not NUM_WORDS <= self._chunk_size <= MAX_CHUNK_SIZE:
                raise LMCacheFailure(f"its --chunk-size, {self._chunk_size}, is not {NUM_WORDS} to {MAX_CHUNK_SIZE}")
        except LMCacheFailure:
            self._close()
            raise

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Nothing is closed within the context."""
        with self._lock:
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                is_last = self._is_retired and self._num_users == 0
            if is_last:
                self._close()

    def retire(self) -> None:
        """Close the connection once nobody uses it."""
        with self._lock:
            self._is_retired = True
            is_unused = self._num_users == 0
        if is_unused:
            self._close()

    def is_current(self) -> bool:
        """Whether the server is the one that was connected to, as far as that is known without asking it."""
        return self._pool is None or self._pool.is_current()

    def register(self, namespace: str, nbytes: int) -> None:
        """Have the server know objects of so many bytes; again after a while. Raises: LMCacheFailure."""
        with self._lock:
            space = self._spaces.get(namespace)
            now_s = time.monotonic()
            if space is not None and now_s - space.renewed_s < RENEW_AFTER_S:
                return
            instance_id = secrets.randbits(62) if space is None else space.instance_id
            space = _Space(f"outrider-{namespace_digest(namespace).hex()}", instance_id, nbytes, now_s)
            payload = self._registration_type(
                instance_id=space.instance_id,
                model_name=space.model,
                world_size=1,
                block_size=1,
                num_layers=1,
                hidden_dim_size=nbytes,
                dtype_str="uint8",
                use_mla=True,  # one plane instead of one of keys and one of values
                num_physical_slots=1,
            )
            answer = self._answer(self._client.register_kv_cache_engine_driven_context(payload), self._deadline())
            if self._pool is None:
                self._pool = LMCachePool(answer.shm_name, answer.pool_size)
            self._spaces[namespace] = space

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """How many objects of a registered namespace are there until one is missing. Raises: LMCacheFailure."""
        for start in range(0, len(hashes), WINDOW):
            window = hashes[start : start + WINDOW]
            found = self._look_up([self._key(namespace, block_hash) for block_hash in window])
            if not all(found):
                return start + found.index(False)
        return len(hashes)

    @contextmanager
    def reading(self, namespace: str, block_hash: bytes) -> Iterator[NDArray[np.uint8] | None]:
        """An object, which the server leaves alone within the context; None if it is not there.

        Raises: LMCacheFailure.
        """
        key, space, deadline = self._key(namespace, block_hash), self._spaces[namespace], self._deadline()
        with self._only_reader(namespace, block_hash, deadline), self._sessions([key]):
            if not self._is_locked(key, deadline):
                yield None
                return
            try:
                response = self._answer(self._client.prepare_retrieve(key, space.instance_id), deadline)
                yield self._slot(response.context, space.nbytes) if response.success else None
            finally:
                unlocked = self._client.commit_retrieve(key, space.instance_id)
            self._answer(unlocked, deadline)

    @contextmanager
    def writing(self, namespace: str, block_hash: bytes) -> Iterator[NDArray[np.uint8] | None]:
        """Room for an object, which others find after the context; None if it is there, or there is no room.

        Raises: LMCacheFailure.
        """
        key, space, deadline = self._key(namespace, block_hash), self._spaces[namespace], self._deadline()
        with self._sessions([key]):
            response = self._answer(self._client.prepare_store(key, space.instance_id), deadline)
            if not response.context.get("slots"):
                yield None
                return
            yield self._slot(response.context, space.nbytes)
            self._answer(self._client.commit_store(key, space.instance_id, b""), deadline)

    def _close(self) -> None:
        for space in self._spaces.values():
            self._client.unregister_kv_cache_engine_driven_context(space.instance_id)
        self._client.close()
        self._context.term()

    def _look_up(self, keys: Sequence[Any]) -> list[bool]:
        """Which of these objects are there; nothing stays locked."""
        client, deadline = self._client, self._deadline()
        with self._sessions(keys):
            locked: Sequence[Any] = keys
            try:
                for call in [client.lookup(key, 1) for key in keys]:
                    self._answer(call, deadline)
                left_s = max(0.0, deadline - time.monotonic())
                waits = [client.wait_prefetch_status(key.request_id, left_s) for key in keys]
                counts = [self._answer(wait, deadline) for wait in waits]
                locked = [key for key, count in zip(keys, counts, strict=True) if count != 0]
            finally:
                freed = [client.free_lookup_locks(key, 1) for key in locked]
            for call in freed:
                self._answer(call, deadline)
        return [bool(count) for count in counts]

    @contextmanager
    def _only_reader(self, namespace: str, block_hash: bytes, deadline: float) -> Iterator[None]:
        """Nobody else of this connection reads the object within the context. Raises: LMCacheFailure."""
        item = (namespace, block_hash)
        with self._read_ended:
            left_s = max(0.0, deadline - time.monotonic())
            if not self._read_ended.wait_for(lambda: item not in self._being_read, left_s):
                raise LMCacheFailure(f"it did not answer another thread within {self._timeout_s:g} s")
            self._being_read.add(item)
        try:
            yield
        finally:
            with self._read_ended:
                self._being_read.remove(item)
                self._read_ended.notify_all()

    @contextmanager
    def _sessions(self, keys: Sequence[Any]) -> Iterator[None]:
        """End them with the context; nobody waits for that."""
        try:
            yield
        finally:
            for key in keys:
                self._client.end_session(key.request_id)

    def _is_locked(self, key: Any, deadline: float) -> bool:
        """Look an object up for reading it; if that fails, nothing stays locked."""
        client = self._client
        num_chunks: int | None = None
        try:
            self._answer(client.lookup(key, 1), deadline)
            left_s = max(0.0, deadline - time.monotonic())
            num_chunks = self._answer(client.wait_prefetch_status(key.request_id, left_s), deadline)
        finally:
            if num_chunks is None:
                client.free_lookup_locks(key, 1)
        return bool(num_chunks)

    def _slot(self, context: dict[str, Any], nbytes: int) -> NDArray[np.uint8]:
        assert self._pool is not None
        try:
            (slot,) = context["slots"]
            offset, length = int(slot["offset"]), int(slot["length"])
        except (KeyError, TypeError, ValueError) as error:
            raise LMCacheFailure(f"it describes an object as {context}") from error
        if length != nbytes:
            raise LMCacheFailure(f"it has an object of {length} bytes instead of {nbytes}")
        return self._pool.slot(offset, nbytes)

    def _key(self, namespace: str, block_hash: bytes) -> Any:
        """The object as the only chunk of a request, which is new."""
        words = _WORDS.unpack(block_hash)
        return self._key_type(
            model_name=self._spaces[namespace].model,
            world_size=1,
            worker_id=0,
            token_ids=words + (0,) * (self._chunk_size - NUM_WORDS),
            start=0,
            end=self._chunk_size,
            request_id=f"outrider-{secrets.token_hex(8)}",
            num_kv_readers=1,
        )

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_s

    def _answer(self, call: Any, deadline: float) -> Any:
        if not call.wait(max(0.0, deadline - time.monotonic())):
            raise LMCacheFailure(f"it did not answer within {self._timeout_s:g} s")
        try:
            return call.result()
        except Exception as error:
            raise LMCacheFailure(f"a call failed: {error}") from error
