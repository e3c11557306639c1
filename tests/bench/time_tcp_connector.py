"""KV over TCP against a plain socket and a copy in memory, between two processes.

    python -m tests.bench.time_tcp_connector [--block-kib 64 1024 4096] [--mib 256] [--rounds 5]

In each round the same blocks go over a plain socket (sendmsg and recv_into of whole blocks, no checksums), through the
connector (leases, checksums, acknowledgement), and from one place in memory to another. The two processes share the
machine with each other, and on few cores one takes from the other: compare within a round.
"""

import argparse
import multiprocessing
import platform
import socket
import statistics
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Semaphore
from typing import NamedTuple

import torch

from connectors.base import BlockLoad, Connector, ConnectorContext, KVCaches, KVGroup, KVRequest
from connectors.tcp.connector import TcpConfig
from server.kernels.huge_pages import zeros

HASH = bytes(32)


class Timing(NamedTuple):
    """One pass. Attributes: sender_cpu_s, receiver_cpu_s: processor time of each side."""

    nbytes: int
    wall_s: float
    sender_cpu_s: float
    receiver_cpu_s: float

    @property
    def gb_per_s(self) -> float:
        return self.nbytes / self.wall_s / 1e9


def connector_of(engine_id: str, blocks: torch.Tensor, notify: Semaphore) -> Connector:
    """A node of these blocks."""
    context = ConnectorContext(
        name="tcp",
        engine_id=engine_id,
        block_size=1,
        fingerprint="f",
        notify=notify.release,
        clock=time.monotonic,
    )
    connector = TcpConfig(transfer_timeout_seconds=60).build(context)
    connector.worker.register_kv_caches(KVCaches((KVGroup("target", "f", blocks),), 1))
    return connector


def blocks_of(count: int, nbytes: int) -> torch.Tensor:
    """Blocks of one layer, head and token."""
    blocks = zeros((count, 1, 1, 1, nbytes), torch.uint8)  # in huge pages, as KV blocks are
    return blocks.random_(0, 256)


def send(orders: Connection, count: int, nbytes: int) -> None:
    """The process that has the blocks."""
    torch.set_num_threads(1)
    blocks = blocks_of(count, nbytes)
    connector = connector_of("sender", blocks, multiprocessing.Semaphore(0))
    views = [block.numpy().data.cast("B") for block in blocks.flatten(1)]
    listener = socket.create_server(("127.0.0.1", 0))
    orders.send(listener.getsockname())
    plain, _ = listener.accept()
    while (order := orders.recv()) != "end":
        if order == "cpu":
            orders.send(time.process_time())
        elif order == "hand on":
            request = KVRequest(0, "r", count + 1, (HASH,) * count)
            orders.send(connector.scheduler.request_finished(request, range(count)))
        else:
            for view in views:
                plain.sendall(view)
    plain.close()
    listener.close()
    connector.worker.shutdown(5.0)


class Receiver:
    """The process that wants the blocks."""

    def __init__(self, orders: Connection, count: int, nbytes: int) -> None:
        self._orders = orders
        self._count = count
        self._blocks = blocks_of(count, nbytes)
        self._views = [block.numpy().data.cast("B") for block in self._blocks.flatten(1)]
        self._done = multiprocessing.Semaphore(0)
        self._connector = connector_of("receiver", self._blocks, self._done)
        self._plain = socket.create_connection(orders.recv())
        self._num_loads = 0

    def _sender_cpu_s(self) -> float:
        self._orders.send("cpu")
        cpu_s = self._orders.recv()
        assert isinstance(cpu_s, float)
        return cpu_s

    def _timed(self, what: str) -> Timing:
        handle = None
        if what == "connector":
            self._orders.send("hand on")
            handle = self._orders.recv()
        sender_s, cpu_s, wall_s = self._sender_cpu_s(), time.process_time(), time.perf_counter()
        if what == "plain":
            self._orders.send("plain")
            for view in self._views:
                self._plain.recv_into(view, len(view), socket.MSG_WAITALL)
        elif what == "copy":
            self._blocks.copy_(self._source)
        else:
            self._num_loads += 1
            request = KVRequest(self._num_loads, "r", self._count + 1, (HASH,) * self._count, handle)
            scheduler, worker = self._connector.scheduler, self._connector.worker
            assert scheduler.get_num_new_matched_tokens(request, 0) == self._count
            scheduler.update_state_after_alloc(
                BlockLoad(request.seq_id, tuple(range(self._count)), tuple(request.hashes), 0, handle)
            )
            worker.start_load_kv(scheduler.build_connector_meta())
            while not worker.get_finished().loaded:
                self._done.acquire()
            assert not worker.get_block_ids_with_load_errors()
        wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return Timing(self._blocks.nbytes, wall_s, self._sender_cpu_s() - sender_s, cpu_s)

    def rounds(self, count: int) -> dict[str, list[Timing]]:
        """All ways, in turns; the first of each is not counted."""
        self._source = blocks_of(self._count, len(self._views[0]))
        timings: dict[str, list[Timing]] = {"plain": [], "connector": [], "copy": []}
        for index in range(count + 1):
            for what, found in timings.items():
                timing = self._timed(what)
                if index:
                    found.append(timing)
        return timings

    def close(self) -> None:
        self._orders.send("end")
        self._plain.close()
        self._connector.worker.shutdown(5.0)


def measure(nbytes: int, total: int, num_rounds: int) -> None:
    """Print a line for each way."""
    count = max(1, total // nbytes)
    spawn = multiprocessing.get_context("spawn")
    orders, theirs = spawn.Pipe()
    process = spawn.Process(target=send, args=(theirs, count, nbytes))
    process.start()
    receiver = Receiver(orders, count, nbytes)
    timings = receiver.rounds(num_rounds)
    receiver.close()
    process.join()
    print(f"{count} blocks of {nbytes >> 10} KiB")
    for what, found in timings.items():
        rates = sorted(timing.gb_per_s for timing in found)
        share = statistics.median(
            timing.gb_per_s / plain.gb_per_s for timing, plain in zip(found, timings["plain"], strict=True)
        )
        gigabytes = sum(timing.nbytes for timing in found) / 1e9
        print(
            f"  {what:9} {statistics.median(rates):6.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f}), "
            f"{share:.2f} of plain; CPU seconds per GB: "
            f"{sum(timing.sender_cpu_s for timing in found) / gigabytes:.3f} sending, "
            f"{sum(timing.receiver_cpu_s for timing in found) / gigabytes:.3f} receiving"
        )


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--block-kib", nargs="+", type=int, default=[64, 1024, 4096], metavar="KIB")
    parser.add_argument("--mib", type=int, default=256, help="of each pass")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"Python {platform.python_version()}, torch {torch.__version__}, {multiprocessing.cpu_count()} cores")
    for size in arguments.block_kib:
        measure(size << 10, arguments.mib << 20, arguments.rounds)


if __name__ == "__main__":
    main()
