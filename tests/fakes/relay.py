"""A stretch of network between two nodes, which does what networks do."""

import contextlib
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

from server.kv_handle import KVHandle


class Relay:
    """Passes bytes on between whoever connects and a node.

    `change` sees what comes back from there: the bytes, and how many came before on this connection. It may wait, and
    returns what is to be passed on; None closes the connection.
    """

    def __init__(
        self, address: str, change: Callable[[bytes, int], bytes | None], *, at: tuple[str, int] = ("127.0.0.1", 0)
    ) -> None:
        """Args: address: of the node to connect to. at: where to listen."""
        host, _, port = address.rpartition(":")
        self._target = (host, int(port))
        self._change = change
        self._listener = socket.create_server(at)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def through(self, handle: KVHandle) -> KVHandle:
        """The handle with this address."""
        return replace(handle, address=self.address)

    def _start(self, run: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=run, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that little is on its way
                try:
                    far.connect(self._target)
                except OSError:
                    far.close()
                    near.close()
                    continue
                self._sockets += [near, far]
                self._start(self._pump, near, far, lambda data, _: data)
                self._start(self._pump, far, near, self._change)

    def _pump(self, source: socket.socket, to: socket.socket, change: Callable[[bytes, int], bytes | None]) -> None:
        num_before = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                changed = change(data, num_before)
                num_before += len(data)
                if changed is None:
                    break
                to.sendall(changed)
        for sock in (source, to):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections; `change` must not wait any more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        for sock in self._sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(5.0)
        for sock in (self._listener, *self._sockets):
            sock.close()
