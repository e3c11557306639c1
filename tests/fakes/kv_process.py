"""A node with KV blocks in a process of its own.

    python -m tests.fakes.kv_process SETTINGS

reads a line for each prompt to hand on, the numbers of its blocks, and writes the handle; "released N" waits for N
leases to end. SETTINGS are the arguments of KVNode as JSON.
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
from functools import partial

from server.kv_handle import KVHandle
from tests.fakes.kv_node import Ended, KVNode


class KVProcess:
    """The process, from outside."""

    def __init__(self, **settings: object) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "tests.fakes.kv_process", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def _ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the process has ended"
        return answer

    def hand_on(self, *block_ids: int) -> KVHandle:
        """Hold these blocks for another node."""
        fields = json.loads(self._ask(" ".join(map(str, block_ids))))
        return KVHandle(**{**fields, "block_ids": tuple(fields["block_ids"])})

    def wait_for_releases(self, count: int) -> None:
        """Return once so many leases have ended. Raises: AssertionError if they do not."""
        assert self._ask(f"released {count}") == "yes\n"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()


def _has_released(count: int, ended: Ended) -> bool:
    return len(ended.released) == count


def main() -> None:
    """Do what is asked for until nothing is any more."""
    node = KVNode(**json.loads(sys.argv[1]))
    node.fill()
    for line in sys.stdin:
        words = line.split()
        if words[0] == "released":
            node.wait_for(partial(_has_released, int(words[1])))
            print("yes", flush=True)
        else:
            print(json.dumps(dataclasses.asdict(node.hand_on(*map(int, words)))), flush=True)
    node.close()


if __name__ == "__main__":
    main()
