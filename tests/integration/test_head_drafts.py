"""What heads draft in a running engine is what they make of the target's true hidden states."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from proposers.base import Draft, ProposeInput, TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.drafting import NetworkProposer
from proposers.eagle_checkpoint import Kind, eagle_head
from proposers.eagle_network import EagleNetwork
from proposers.medusa import MedusaProposer
from proposers.medusa_heads import medusa_heads
from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on
from tests.fakes.paged_steps import block_table, step_over
from tests.fakes.tiny_target import target_model
from tests.tiny_heads import build_tiny_eagle, build_tiny_eagle3, build_tiny_medusa
from tests.tiny_model import build_tiny_model

K, BLOCK, LIMIT = 3, 16, 128
TIE = 1e-3
PROMPTS = [[7, 8, 9], [*range(20, 41)], [*range(100, 135)], [*range(100, 148)], [5] * 16]
SETTINGS: dict[str, dict[str, Any]] = {
    "as usual": {},
    "chunked": {"max_num_batched_tokens": 32, "max_num_seqs": 3, "max_num_partial_prefills": 2},
    "ahead": {"pipeline_depth": 1},
}


class Recorder:
    """The drafts of an engine, with the tokens they were made for."""

    def __init__(self) -> None:
        self.drafts: list[tuple[list[int], list[int]]] = []

    @contextmanager
    def listening(self, proposer: type[NetworkProposer] | type[MedusaProposer]) -> Iterator[None]:
        propose = proposer.propose

        def recorded(instance: Any, inputs: ProposeInput) -> Draft:
            draft = propose(instance, inputs)
            for row, (slot, length) in enumerate(zip(inputs.slots.tolist(), inputs.num_tokens.tolist(), strict=True)):
                known = inputs.token_ids[slot, :length].tolist()
                self.drafts.append((known, draft.ids[row, : int(draft.counts[row])].tolist()))
            return draft

        with patch.object(proposer, "propose", recorded):
            yield


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory, device_name: str) -> TargetModel:
    return target_model(build_tiny_model(tmp_path_factory.mktemp("heads"), num_layers=3), device_name)


def hidden_states(target: TargetModel, known: list[int], taps: tuple[int, ...] | None) -> Tensor:
    """[len(known) - 1, features], of every token but the last."""
    token_ids = torch.tensor([known[:-1]], device=target.model.device)
    states = target.model(token_ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([states[-1 if index is None else index][0] for index in (taps or (None,))], dim=-1)


class Expected:
    """An EAGLE head on a whole text at a time."""

    def __init__(self, folder: Path, target: TargetModel, kind: Kind) -> None:
        self._target = target
        self._head = eagle_head(read_checkpoint(str(folder)), target, kind)
        self._network = EagleNetwork(self._head, target, target.model.device, torch.float32)

    @torch.inference_mode()
    def check(self, known: list[int], drafts: list[int]) -> None:
        """Each draft is the likeliest, but for ties."""
        device, network, last = self._target.model.device, self._network, len(known) - 1
        shape = network.kv_shape
        kv = torch.zeros(1 + LIMIT // BLOCK, shape.num_layers, shape.num_kv_heads, BLOCK, 2 * shape.head_dim)
        network.bind_kv(kv.to(device))
        table = block_table(1, LIMIT // BLOCK).to(device)
        step = step_over([(0, 1, last)], table, BLOCK, first=1)
        given = network.condense(hidden_states(self._target, known, self._head.taps))
        hidden = network.forward(torch.tensor(known[1:], device=device), step.positions, step, given)[-1:]
        for index, draft in enumerate(drafts):
            if index:
                step = step_over([(0, last + index, 1)], table, BLOCK, first=1)
                before = torch.tensor([drafts[index - 1]], device=device)
                hidden = network.forward(before, step.positions, step, hidden)
            check_likeliest(network.logits(hidden)[0], draft, network.to_target)


def check_likeliest(logits: Tensor, draft: int, to_target: Tensor | None) -> None:
    ids = torch.arange(len(logits)) if to_target is None else to_target.cpu()
    (own,) = (ids == draft).nonzero()[0].tolist()
    assert float(logits.max() - logits[own]) < TIE


def generate(
    target: TargetModel, device_name: str, config: dict[str, object], settings: dict[str, Any], recorder: Recorder
) -> None:
    """Twice, so that the second time whole blocks are there."""
    speculation = {"num_speculative_tokens": K, "draft_sample_method": "greedy", **config}
    sampling = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    settings = {"enforce_eager": device_name != "cpu", **settings}  # what is replayed from graphs is not recorded
    with engine_on(
        target.folder, device_name, max_model_len=LIMIT, speculative_config=speculation, **settings
    ) as engine:
        recorder.drafts.clear()  # those of the warm-up, in which kernels are left out
        first = [outcome.only.token_ids for outcome in engine.generate(PROMPTS, sampling)]
        assert [outcome.only.token_ids for outcome in engine.generate(PROMPTS, sampling)] == first
        assert engine.statistics().prefix_hit_tokens > 0


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize(
    ("kind", "options"),
    [("eagle", {"num_layers": 2}), ("eagle3", {"taps": (2, 0), "draft_vocab_size": 200})],
    ids=["eagle", "eagle3"],
)
def test_eagle(
    tmp_path: Path,
    target: TargetModel,
    device_name: str,
    kind: Kind,
    options: dict[str, Any],
    settings: dict[str, Any],
) -> None:
    build: Any = build_tiny_eagle if kind == "eagle" else build_tiny_eagle3
    folder, recorder = build(tmp_path, **options), Recorder()
    with recorder.listening(NetworkProposer):
        generate(target, device_name, {"method": kind, "model": str(folder)}, settings, recorder)
    expected = Expected(folder, target, kind)
    drafted = {tuple(known): drafts for known, drafts in recorder.drafts if drafts}
    assert len(drafted) > 60
    for known, drafts in drafted.items():
        expected.check(list(known), drafts)


@torch.inference_mode()
def test_medusa(tmp_path: Path, target: TargetModel, device_name: str) -> None:
    folder, recorder = build_tiny_medusa(tmp_path, num_heads=K), Recorder()
    with recorder.listening(MedusaProposer):
        generate(target, device_name, {"method": "medusa", "model": str(folder)}, {}, recorder)
    heads = medusa_heads(read_checkpoint(str(folder)), target, target.model.device)
    drafted = {tuple(known): drafts for known, drafts in recorder.drafts if drafts}
    assert len(drafted) > 60
    for known, drafts in drafted.items():
        hidden = hidden_states(target, list(known), None)[-1:]
        for logits, draft in zip(heads.logits(hidden, K)[0], drafts, strict=False):
            check_likeliest(logits, draft, None)
