"""The worker's view of a connector: what is told to whom, and in which order."""

import logging
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn

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


class Layer(nn.Module):
    """One that says when it runs."""

    def __init__(self, index: int, heard: list[str]) -> None:
        super().__init__()
        self.layer_idx = index
        self._heard = heard

    def forward(self, hidden: Tensor) -> Tensor:
        self._heard.append(f"layer {self.layer_idx}")
        return hidden


class Model(nn.Module):
    """Two layers."""

    def __init__(self, heard: list[str]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(0, heard), Layer(1, heard)])

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class RegisteringWorker(ScriptedWorker):
    """Keeps what it was registered with."""

    def register_kv_caches(self, caches: KVCaches) -> None:
        super().register_kv_caches(caches)
        self.caches = caches


@pytest.fixture
def worker() -> RegisteringWorker:
    return RegisteringWorker()


def make_transfers(worker: ScriptedWorker) -> tuple[Transfers, Model]:
    model = Model(worker.heard)
    follower = cast(Follower, RecordingFollower(worker.heard))
    made = Transfers(worker, model, torch.zeros(5, 2, 1, 16, 8), "f1", [follower])
    worker.heard.clear()
    return made, model


@pytest.fixture
def transfers(worker: RegisteringWorker) -> Transfers:
    return make_transfers(worker)[0]


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


def forward(worker: ScriptedWorker) -> list[str]:
    """What is heard of a step that computes a prompt, and of a pass of the same model behind it."""
    transfers, model = make_transfers(worker)
    with transfers.step(PLAN):
        with transfers.between_layers():
            model(torch.zeros(1))
        worker.heard.append("drafts")
        model(torch.zeros(1))
    return worker.heard[2:]


BEHIND = ["drafts", "layer 0", "layer 1", "wait for saves"]


def test_between_layers_nobody_is_called_who_does_not_ask_for_it() -> None:
    assert forward(ScriptedWorker()) == ["layer 0", "layer 1", *BEHIND]


def test_between_layers_a_connector_waits_and_saves() -> None:
    expected = [f"{what} {layer}" for layer in (0, 1) for what in ("wait for layer", "layer", "save layer")]
    assert forward(ScriptedWorker(is_layerwise=True)) == [*expected, *BEHIND]


def test_a_layer_that_cannot_be_saved_is_the_steps_last_to_be_offered(caplog: pytest.LogCaptureFixture) -> None:
    """The step goes on, and the next one begins anew."""
    worker = ScriptedWorker(is_layerwise=True, broken_layer=0)
    with caplog.at_level(logging.CRITICAL):
        heard = forward(worker)
    assert heard == ["wait for layer 0", "layer 0", "save layer 0", "wait for layer 1", "layer 1", *BEHIND]
    transfers, model = make_transfers(worker)
    for _ in range(2):
        with caplog.at_level(logging.CRITICAL), transfers.between_layers():
            model(torch.zeros(1))
    assert worker.heard.count("save layer 0") == 2


def test_a_wait_that_raises_fails_the_step() -> None:
    class Unready(ScriptedWorker):
        def wait_for_layer_load(self, layer: int) -> None:
            raise RuntimeError(f"layer {layer} did not come")

    with pytest.raises(RuntimeError, match="layer 0 did not come"):
        forward(Unready(is_layerwise=True))
