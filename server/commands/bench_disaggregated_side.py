"""One side of a transfer that `outrider bench disaggregated` measures: a process with blocks and a connector.

It takes orders as lines of JSON on its standard input, and answers each with one on its standard output. Nothing else
goes there, whatever libraries say.
"""

import dataclasses
import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from connectors.base import BlockLoad, BlockSave, ConnectorContext, Finished, KVCaches, KVGroup, KVRequest
from connectors.choice import read_choice
from server.kernels import huge_pages
from server.kv_handle import KVHandle

_FINGERPRINT = "be" * 32
_PATIENCE_S = 120.0


class Side:
    """Blocks of random bytes and a connector, driven as an engine does between its steps."""

    def __init__(self, choice: Mapping[str, Any], engine_id: str, num_blocks: int, block_nbytes: int) -> None:
        self._finished = threading.Event()
        self._blocks = _random_blocks(num_blocks, block_nbytes)
        self._views = [block.numpy().data for block in self._blocks.flatten(1)]
        self._source = _random_blocks(num_blocks, block_nbytes)
        self._num_blocks = num_blocks
        self._next_id = 0
        self._plain: socket.socket | None = None
        chosen = read_choice(choice, "")
        context = ConnectorContext(
            name=chosen.name,
            engine_id=engine_id,
            block_size=1,
            fingerprint=_FINGERPRINT,
            notify=self._finished.set,
            clock=time.monotonic,
        )
        self._connector = chosen.settings.build(context)
        self._connector.worker.register_kv_caches(KVCaches((KVGroup("target", _FINGERPRINT, self._blocks),), 1))

    def rest(self) -> None:
        """Do nothing, so that the answer tells the processor time."""

    def save(self, text: str) -> float:
        """Have the connector keep all blocks. Args: text: names their content. Returns: seconds."""
        begun_s = time.perf_counter()
        saves = [BlockSave(*each) for each in enumerate(self._hashes(text))]
        self._connector.scheduler.save(saves)
        num_saved = 0

        def is_done(finished: Finished) -> bool:
            nonlocal num_saved
            num_saved += len(finished.saved)
            return num_saved == self._num_blocks

        self._run_until(is_done)
        return time.perf_counter() - begun_s

    def hand_on(self, text: str) -> dict[str, object]:
        """Hold all blocks for the other side. Returns: what that needs to know."""
        handle = self._connector.scheduler.request_finished(self._request(text, None), range(self._num_blocks))
        assert handle is not None
        return dataclasses.asdict(handle)

    def load(self, text: str, handle: Mapping[str, Any] | None) -> float:
        """Fill all blocks. Returns: seconds. Raises: RuntimeError if not all of them could be."""
        source = None if handle is None else KVHandle(**{**handle, "block_ids": tuple(handle["block_ids"])})
        begun_s = time.perf_counter()
        request = self._request(text, source)
        scheduler, worker = self._connector.scheduler, self._connector.worker
        while (num_found := scheduler.get_num_new_matched_tokens(request, 0)) is None:
            self._wait()
        if num_found < self._num_blocks:
            raise RuntimeError(f"{num_found} of {self._num_blocks} blocks were found")
        scheduler.update_state_after_alloc(
            BlockLoad(request.seq_id, tuple(range(self._num_blocks)), tuple(request.hashes), 0, source)
        )
        num_bad = 0

        def is_done(finished: Finished) -> bool:
            nonlocal num_bad
            num_bad += len(worker.get_block_ids_with_load_errors())
            return request.seq_id in finished.loaded

        self._run_until(is_done)
        if num_bad:
            raise RuntimeError(f"{num_bad} of {self._num_blocks} blocks could not be loaded")
        return time.perf_counter() - begun_s

    def listen(self) -> int:
        """Returns: the port that a plain socket may connect to, once."""
        self._plain = socket.create_server(("127.0.0.1", 0))
        port: int = self._plain.getsockname()[1]
        return port

    def accept(self) -> None:
        """Have the connection."""
        listener = self._plain_socket()
        with listener:
            self._plain, _ = listener.accept()

    def connect(self, port: int) -> None:
        """Have the other end of it."""
        self._plain = socket.create_connection(("127.0.0.1", port))

    def send(self) -> None:
        """All blocks over the plain socket."""
        plain = self._plain_socket()
        for block in self._views:
            plain.sendall(block)

    def receive(self) -> float:
        """All blocks over the plain socket. Returns: seconds, from the first byte of all."""
        plain = self._plain_socket()
        plain.recv(1, socket.MSG_PEEK)
        begun_s = time.perf_counter()
        for block in self._views:
            if plain.recv_into(block, 0, socket.MSG_WAITALL) != block.nbytes:
                raise RuntimeError("the plain socket was closed")
        return time.perf_counter() - begun_s

    def _plain_socket(self) -> socket.socket:
        assert self._plain is not None
        return self._plain

    def copy(self) -> float:
        """All blocks from another place in memory, by one thread. Returns: seconds."""
        begun_s = time.perf_counter()
        self._blocks.copy_(self._source)
        return time.perf_counter() - begun_s

    def close(self) -> None:
        """End all threads and connections."""
        if self._plain is not None:
            self._plain.close()
        self._connector.worker.shutdown(10.0)

    def _hashes(self, text: str) -> list[bytes]:
        return [hashlib.sha256(f"{text} {place}".encode()).digest() for place in range(self._num_blocks)]

    def _request(self, text: str, source: KVHandle | None) -> KVRequest:
        self._next_id += 1
        return KVRequest(self._next_id, f"{text}-{self._next_id}", self._num_blocks + 1, self._hashes(text), source)

    def _run_until(self, is_done: Callable[[Finished], bool]) -> None:
        while True:
            metadata = self._connector.scheduler.build_connector_meta()
            if metadata is not None:
                self._connector.worker.start_load_kv(metadata)
            if is_done(self._connector.worker.get_finished()):
                return
            self._wait()

    def _wait(self) -> None:
        if not self._finished.wait(_PATIENCE_S):
            raise RuntimeError(f"nothing has happened for {_PATIENCE_S:g} s")
        self._finished.clear()


def _random_blocks(num_blocks: int, nbytes: int) -> torch.Tensor:
    """[num_blocks, 1, 1, 1, nbytes] uint8, in the kind of memory that KV blocks of a server are in."""
    return huge_pages.zeros((num_blocks, 1, 1, 1, nbytes), torch.uint8).random_(0, 256)


def main() -> None:
    """Do as ordered until the input ends; an error ends it with a traceback, whose last line says what it was."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # NIXL, for one, logs to the standard output
    torch.set_num_threads(1)
    side = Side(**json.loads(sys.argv[1]))
    for line in sys.stdin:
        order = json.loads(line)
        value = getattr(side, order.pop("do"))(**order)
        print(json.dumps({"value": value, "cpu_s": time.process_time()}), file=answers, flush=True)
    side.close()


if __name__ == "__main__":
    main()
