"""Prompts' blocks that are copied from a GPU layer by layer, on a stream of their own."""

from pathlib import Path
from typing import Any

import pytest

from connectors.base import BlockSave
from connectors.content.saves import Saves
from connectors.content.worker import ContentWorker
from server.request import SamplingParams
from tests.fakes.engine_under_test import engine_on
from tests.fakes.kv_engines import BLOCK_SIZE, files, tokens
from tests.gpu.test_step import DEVICE
from tests.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # inductor's own imports
]

NUM_LAYERS, BUDGET = 3, 24
PROMPTS = [[(7 * place + 13 * length) % 300 + 3 for place in range(length)] for length in (16, 40, 100)]
GREEDY = SamplingParams(max_tokens=BLOCK_SIZE, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("layerwise"), num_layers=NUM_LAYERS)


@pytest.mark.parametrize("compile_when", ["none", "wait"])
def test_files_are_the_same_and_replayed_steps_are_not_interrupted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_when: str
) -> None:
    layers: list[int] = []
    copies: list[bool] = []
    save_layer, keep = ContentWorker.save_kv_layer, Saves._keep

    def recorded_layer(worker: ContentWorker, layer: int) -> None:
        layers.append(layer)
        save_layer(worker, layer)

    def recorded_block(saves: Saves, save: BlockSave, target: memoryview | None) -> Any:
        copies.append(target is not None)
        return keep(saves, save, target)

    monkeypatch.setattr(ContentWorker, "save_kv_layer", recorded_layer)
    monkeypatch.setattr(Saves, "_keep", recorded_block)
    found = {}
    for layerwise in (False, True):
        choice = files(tmp_path / str(layerwise))
        choice["kv_connector_extra_config"]["layerwise"] = layerwise
        settings: dict[str, Any] = {"max_num_batched_tokens": BUDGET, "max_num_seqs": 8, "compile": compile_when}
        with engine_on(folder, str(DEVICE), kv_transfer_config=choice, **settings) as engine:
            layers.clear()
            copies.clear()
            ids = [tokens(engine.generate([prompt], GREEDY))[0] for prompt in PROMPTS]
            engine.settle()
        num_chunks = sum(-(-len(prompt) // BUDGET) for prompt in PROMPTS) if layerwise else 0
        assert layers == list(range(NUM_LAYERS)) * num_chunks, "in no step that decodes"
        assert any(copies) == layerwise
        saved = {path.name: path.read_bytes() for path in (tmp_path / str(layerwise)).rglob("*.kv")}
        found[layerwise] = ids, saved
    assert found[True] == found[False]
    assert found[True][1]
