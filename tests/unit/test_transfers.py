"""The worker's view of a connector: what is told to whom, and in which order."""

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from connectors.base import Finished, KVCaches, KVGroup, TransferPlan
from proposers.network import Follower
from server.worker.transfers import Transfers
from tests.fakes.scripted_connector import ScriptedWorker


class RecordingFollower:
    """Keeps one number for each block."""

    def __init__(self, heard: list[str]) -> None:
        self._heard = heard

    def kv_groups(self) -> Sequence[KVGroup]:
        return [KVGroup("draft", "d1", torch.zeros(5, 1))]

    def void(self, block_ids: Sequence[int]) -> None:
        self._heard.append(f"void {list(block_ids)}")

    def adopt(self, block_ids: Sequence[int]) -> None:
        self._heard.append(f"adopt {list(block_ids)}")


class RegisteringWorker(ScriptedWorker):
    """Keeps what it was registered with."""

    def register_kv_caches(self, caches: KVCaches) -> None:
        super().register_kv_caches(caches)
        self.caches = caches


@pytest.fixture
def worker() -> RegisteringWorker:
    return RegisteringWorker()


@pytest.fixture
def transfers(worker: RegisteringWorker) -> Transfers:
    follower = cast(Follower, RecordingFollower(worker.heard))
    made = Transfers(worker, torch.zeros(5, 2, 1, 16, 8), "f1", [follower])
    worker.heard.clear()
    return made


PLAN = TransferPlan("load and save", (3, 4))


def test_all_that_is_kept_for_a_block_is_registered(worker: RegisteringWorker, transfers: Transfers) -> None:
    assert [(group.name, group.fingerprint) for group in worker.caches.groups] == [("target", "f1"), ("draft", "d1")]
    assert worker.caches.block_size == 16
    assert worker.caches.target.block_nbytes == 2 * 16 * 8 * 4


def test_a_step_begins_what_was_ordered_and_frees_the_blocks_behind_it(
    worker: RegisteringWorker, transfers: Transfers
) -> None:
    with transfers.step(PLAN):
        worker.heard.append("forward")
    assert worker.heard == ["void [3, 4]", "load and save", "forward", "wait for saves"]


def test_a_step_without_transfers(worker: RegisteringWorker, transfers: Transfers) -> None:
    with transfers.step(None):
        worker.heard.append("forward")
    assert worker.heard == ["forward", "wait for saves"]


def test_a_step_that_fails_has_begun_what_was_ordered(worker: RegisteringWorker, transfers: Transfers) -> None:
    def fail() -> None:
        with transfers.step(PLAN):
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert worker.heard == ["void [3, 4]", "load and save", "wait for saves"]


def test_whoever_drafts_hears_which_blocks_came_in_full(worker: RegisteringWorker, transfers: Transfers) -> None:
    worker.errors = frozenset({4})
    assert transfers.poll() == (Finished(), frozenset())
    assert worker.heard == [], "nothing has ended"
    worker.finished = Finished(loaded=(7,), complete=(3,))
    assert transfers.poll() == (Finished(loaded=(7,), complete=(3,)), frozenset({4}))
    assert worker.heard == ["adopt [3]"]
