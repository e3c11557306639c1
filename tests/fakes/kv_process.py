"""A node with KV blocks in a process of its own, so that it can be killed and stopped."""

import contextlib
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from typing import Any

import torch

from server.kv_handle import KVHandle
from tests.fakes.kv_node import KVNode

ANSWER_TIMEOUT_S = 60.0


def _serve(orders: Connection, settings: dict[str, Any], seed: int) -> None:
    """Hand on what is asked for; between orders, do what an engine does between steps."""
    torch.set_num_threads(1)
    node = KVNode(**settings)
    node.fill(seed)
    orders.send(None)
    while (order := orders.recv()) is not None:
        name, arguments = order
        if name == "hand_on":
            orders.send(node.hand_on(*arguments))
        elif name == "cancel":
            node.scheduler.cancel(node.sequences[arguments[0].lease_id])
            node.step()
            orders.send(None)
        elif name == "hold":
            assert node.matched(node.request(2, source=arguments[0])) == 2
            node.step()
            orders.send(None)
        else:
            node.wait_for_release(*arguments)
            orders.send(None)
    node.close()


class KVProcess:
    """That process."""

    def __init__(self, *, seed: int = 0, **settings: Any) -> None:
        """Args: seed: of its blocks, see `KVNode.fill`. settings: of KVNode. Raises: EOFError if it does not start."""
        forkserver = multiprocessing.get_context("forkserver")
        forkserver.set_forkserver_preload([__name__])  # imports torch once for all of them
        self._orders, theirs = forkserver.Pipe()
        self._process = forkserver.Process(target=_serve, args=(theirs, settings, seed), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def _answer(self) -> Any:
        if not self._orders.poll(ANSWER_TIMEOUT_S):
            raise TimeoutError("the process does not answer")
        return self._orders.recv()

    def hand_on(self, *block_ids: int) -> KVHandle:
        """See KVNode."""
        self._orders.send(("hand_on", block_ids))
        handle = self._answer()
        assert isinstance(handle, KVHandle)
        return handle

    def hold(self, handle: KVHandle) -> None:
        """Tell its node that a load of these two blocks is to come; none does."""
        self._orders.send(("hold", (handle,)))
        self._answer()

    def cancel(self, handle: KVHandle) -> None:
        """Nobody is to get what was handed on."""
        self._orders.send(("cancel", (handle,)))
        self._answer()

    def wait_for_release(self, handle: KVHandle) -> None:
        """See KVNode."""
        self._orders.send(("wait_for_release", (handle,)))
        self._answer()

    def signal(self, number: int) -> None:
        """Send it a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def close(self) -> None:
        """End it, in whatever state it is."""
        with contextlib.suppress(ProcessLookupError, BrokenPipeError):
            self.signal(signal.SIGCONT)
            self._orders.send(None)
        self._process.join(30.0)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        self._orders.close()
