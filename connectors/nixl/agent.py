"""A NIXL agent, and the thread that alone calls it."""

import contextlib
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from connectors.nixl.transports import with_device_memory

POLL_S = 0.001
"""How often it is looked after while blocks are read, here or by others; NIXL's own thread for that never sleeps."""
IDLE_POLL_S = 1.0
AWAKE_S = 3.0
"""How long after the last word from another node it may be read from."""
LEAST_CLOSE_S = 1.0

_Result = TypeVar("_Result")


class NixlFailed(Exception):
    """NIXL refuses something, or a read has failed."""


class PeerLost(NixlFailed):
    """The other process is gone: nothing comes from there any more."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A read under way. Attributes: handle: NIXL's."""

    handle: Any
    ended: Future[None]


class NixlAgent:
    """Any thread leaves work for the agent's thread; nothing but that thread touches NIXL.

    Posting a read may take as long as all of it, or return at once, by transport. A read has no end of its own while
    the other process exists but does not run, and can not be called back: until its future is done, bytes may come.
    """

    def __init__(self, *, net_devices: str | None, transports: str | None, device: torch.device) -> None:
        """Start. Args: net_devices, transports: UCX's; None for what the environment says. device: of the blocks.

        Raises: NixlFailed.
        """
        self.name = uuid.uuid4().hex  # new with each start: what others know of an agent of this name stays true
        self._net_devices = net_devices
        self._transports = transports
        self._device = device
        self._work: queue.SimpleQueue[Callable[[Any], None] | None] = queue.SimpleQueue()
        self._reads: list[_Read] = []
        self._kept: list[object] = []
        self._awake_until_s = 0.0
        self._closing = threading.Lock()
        self._is_closed = False
        started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="outrider-nixl-agent", daemon=True)
        self._thread.start()
        started.result()

    def submit(self, work: Callable[[Any], _Result]) -> "Future[_Result]":
        """Have the thread do something with the nixl_agent; its callers get NixlFailed for what NIXL raises."""
        done: Future[_Result] = Future()
        with self._closing:
            if self._is_closed:
                done.set_exception(NixlFailed("the agent is closed"))
            else:
                self._work.put(partial(_settle, done, work))
        return done

    def read(self, local: Any, local_ids: Sequence[int], remote: Any, remote_ids: Sequence[int]) -> "Future[None]":
        """Read blocks. Args: local, remote: prepared lists of descriptors; local_ids, remote_ids: places in them.

        Returns: done when nothing is written to the local ones any more.
        """
        ended: Future[None] = Future()
        ended.set_running_or_notify_cancel()  # so that nobody who gives up takes it for done

        def begin(nixl: Any) -> None:
            ids = (np.array(local_ids, dtype=np.int32), np.array(remote_ids, dtype=np.int32))
            handle = nixl.make_prepped_xfer("READ", local, ids[0], remote, ids[1])
            self._follow(nixl, _Read(handle, ended), nixl.transfer)

        self.submit(begin).add_done_callback(partial(_pass_on_error, ended))
        return ended

    def keep(self, memory: object) -> None:
        """Do not free this before the agent is gone; the thread's."""
        self._kept.append(memory)

    def wake(self) -> None:
        """Another node may read from here soon."""
        was_asleep = time.monotonic() >= self._awake_until_s
        self._awake_until_s = time.monotonic() + AWAKE_S
        if was_asleep:
            self._work.put(lambda _: None)

    def _run(self, started: "Future[None]") -> None:
        try:
            nixl = self._open()
        except Exception as error:
            started.set_exception(NixlFailed(f"NIXL has no agent: {error!r}"))
            return
        started.set_result(None)
        while True:
            is_busy = self._reads or time.monotonic() < self._awake_until_s
            try:
                work = self._work.get(timeout=POLL_S if is_busy else IDLE_POLL_S)
            except queue.Empty:
                pass
            else:
                if work is None:
                    break
                work(nixl)
            nixl.get_new_notifs()  # the call that has it answer those who read from here
            reads, self._reads = self._reads, []
            for read in reads:
                self._follow(nixl, read, nixl.check_xfer_state)
        for read in self._reads:
            with contextlib.suppress(Exception):
                nixl.release_xfer_handle(read.handle)
        del nixl  # bytes that are on their way have nowhere to go from here on
        for read in self._reads:
            read.ended.set_exception(NixlFailed("the agent is closed"))
        self._reads.clear()
        self._kept.clear()

    def _open(self) -> Any:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        # UCX reads its settings from the environment alone, whenever an agent is made.
        transports = self._transports or os.environ.get("UCX_TLS")
        if transports is not None:
            os.environ["UCX_TLS"] = with_device_memory(transports)
        if self._net_devices is not None:
            os.environ["UCX_NET_DEVICES"] = self._net_devices
        os.environ.setdefault("UCX_NET_DEVICES", "lo")  # else it listens everywhere
        from nixl._api import nixl_agent, nixl_agent_config

        return nixl_agent(self.name, nixl_agent_config(enable_prog_thread=False, backends=["UCX"]))

    def _follow(self, nixl: Any, read: _Read, state_of: Callable[[Any], str]) -> None:
        """See how far a read is."""
        try:
            state = state_of(read.handle)
            if state == "PROC":
                self._reads.append(read)
                return
            nixl.release_xfer_handle(read.handle)
            if state != "DONE":
                raise NixlFailed(f"a read has ended as {state}")
        except Exception as error:
            read.ended.set_exception(_failed(error))
        else:
            read.ended.set_result(None)

    def close(self, timeout_s: float) -> None:
        """Break off all reads and end the thread; may be called twice.

        Gives the thread LEAST_CLOSE_S in any case: others read from the blocks of this node until it has ended.
        """
        with self._closing:
            if not self._is_closed:
                self._is_closed = True
                self._work.put(None)
        self._thread.join(max(LEAST_CLOSE_S, timeout_s))


def _settle(done: "Future[_Result]", work: Callable[[Any], _Result], nixl: Any) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = work(nixl)
    except Exception as error:
        done.set_exception(_failed(error))
    else:
        done.set_result(result)


def _failed(error: Exception) -> NixlFailed:
    if isinstance(error, NixlFailed):
        return error
    is_lost = type(error).__name__ == "nixlRemoteDisconnectError"
    return (PeerLost if is_lost else NixlFailed)(f"{type(error).__name__}: {error}")


def _pass_on_error(ended: "Future[None]", begun: "Future[None]") -> None:
    error = begun.exception()
    if error is not None:
        ended.set_exception(error)
