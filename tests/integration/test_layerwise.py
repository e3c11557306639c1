"""Prompts' blocks that are saved layer by layer: the same bytes, no later than that, and none that should not be."""

import logging
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from connectors.base import BlockSave
from connectors.content.saves import Saves
from connectors.content.worker import ContentWorker
from connectors.layer_stages import LayerStages
from connectors.memory import MemoryConfig, MemoryStore
from server.request import SamplingParams
from server.worker import transfers
from server.worker.runner import Runner
from tests.fakes.engine_under_test import ngram
from tests.fakes.kv_engines import BLOCK_SIZE, files, kv_engine, num_full, tokens
from tests.fakes.layer_files import LayerFilesWorker
from tests.tiny_model import build_tiny_model

NUM_LAYERS = 3
RNG = random.Random(1)
PROMPTS = [[RNG.randrange(3, 500) for _ in range(length)] for length in (15, 16, 70)]
NUM_GENERATED = BLOCK_SIZE
GREEDY = SamplingParams(max_tokens=NUM_GENERATED, temperature=0, ignore_eos=True)
CHUNKS = {"max_num_batched_tokens": BLOCK_SIZE * 3 // 2, "max_num_seqs": 8}
NUM_PROMPT_BLOCKS = sum(len(prompt) // BLOCK_SIZE for prompt in PROMPTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("layerwise"), num_layers=NUM_LAYERS)


def layer_files(folder: Path) -> dict[str, Any]:
    """kv_transfer_config of the connector of another distribution."""
    folder.mkdir(exist_ok=True)
    choice = "tests.fakes.layer_files:LayerFilesConfig"
    return {"kv_connector": choice, "kv_connector_extra_config": {"folder": str(folder)}}


def layerwise(choice: dict[str, Any]) -> dict[str, Any]:
    return {**choice, "kv_connector_extra_config": {**choice["kv_connector_extra_config"], "layerwise": True}}


def run(model: Path, choice: dict[str, Any] | None, **settings: Any) -> list[list[int]]:
    """Prompts one after the other, in chunks of a block and a half, to their end; then all blocks are saved."""
    with kv_engine(model, choice, **{**CHUNKS, **settings}) as engine:
        return [tokens(engine.generate([prompt], GREEDY))[0] for prompt in PROMPTS]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each block that is saved, whether the target's bytes are those that were copied while it was computed."""
    found: list[bool] = []
    keep = Saves._keep

    def recorded(saves: Saves, save: BlockSave, target: memoryview | None) -> Any:
        found.append(target is not None)
        return keep(saves, save, target)

    monkeypatch.setattr(Saves, "_keep", recorded)
    return found


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("speculative", [None, ngram(3)], ids=["plain", "drafts"])
def test_files_are_the_same_to_the_last_bit(
    model: Path, tmp_path: Path, copies: list[bool], speculative: dict[str, object] | None, depth: int
) -> None:
    settings = {"speculative_config": speculative, "pipeline_depth": depth}
    expected = run(model, files(tmp_path / "whole"), **settings)
    assert not any(copies)
    whole = content(tmp_path / "whole")
    copies.clear()
    assert run(model, layerwise(files(tmp_path / "layers")), **settings) == expected
    assert content(tmp_path / "layers") == whole
    assert len(copies) == len(whole)
    assert 0 < sum(copies) <= NUM_PROMPT_BLOCKS, "what generated tokens filled moved as a whole"


def test_what_a_draft_model_keeps_moves_with_its_block_as_a_whole(
    model: Path, tmp_path: Path, copies: list[bool]
) -> None:
    settings = {"speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 2}}
    expected = run(model, files(tmp_path / "whole"), **settings)
    copies.clear()
    assert run(model, layerwise(files(tmp_path / "layers")), **settings) == expected
    saved = content(tmp_path / "layers")
    assert saved == content(tmp_path / "whole")
    assert len(saved) > len(copies), "of most blocks it has one, too"
    assert 0 < sum(copies) <= NUM_PROMPT_BLOCKS


def test_memory_is_the_same_to_the_last_bit(model: Path, monkeypatch: pytest.MonkeyPatch, copies: list[bool]) -> None:
    found = []
    memory = {"kv_connector": "memory", "kv_connector_extra_config": {}}
    for choice in (memory, layerwise(memory)):
        store = MemoryStore(1 << 20)
        monkeypatch.setattr(MemoryConfig, "open_store", lambda _, store=store: store)
        with kv_engine(model, choice, **CHUNKS) as engine:
            for prompt in PROMPTS:
                engine.generate([prompt], GREEDY)
            engine.settle()
            found.append({key: block.tobytes() for key, block in store._blocks.items()})
    assert found[0] == found[1] != {}
    assert any(copies)


class Watched:
    """A connector that looks at the cache whenever it is called between layers.

    Attributes:
        waits: layers that it waited for. seen: (layer that is saved, layers whose K and V the announced blocks have),
            for each call and block. num_steps: in which it was called.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits: list[int] = []
        self.seen: list[tuple[int, list[int]]] = []
        self.num_steps = self.num_early = 0
        save, keep = LayerFilesWorker.save_kv_layer, LayerFilesWorker._save

        def save_layer(worker: LayerFilesWorker, layer: int) -> None:
            for announced in worker._announced:
                last = worker._target[announced.block_id, :, :, -1].flatten(1).any(1)
                self.seen.append((layer, last.nonzero().flatten().tolist()))
            self.num_steps += layer == 0
            save(worker, layer)

        def keep_block(worker: LayerFilesWorker, save: BlockSave) -> None:
            keep(worker, save)
            self.num_early = worker.num_early

        monkeypatch.setattr(LayerFilesWorker, "save_kv_layer", save_layer)
        monkeypatch.setattr(LayerFilesWorker, "wait_for_layer_load", lambda _, layer: self.waits.append(layer))
        monkeypatch.setattr(LayerFilesWorker, "_save", keep_block)


def test_a_layer_is_offered_before_the_next_one_is_computed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all steps that compute prompts, and in no other; each block of a prompt was there when its step ended."""
    expected = run(model, None)
    with kv_engine(model, layer_files(tmp_path), **CHUNKS) as engine:
        watched = Watched(monkeypatch)
        assert [tokens(engine.generate([prompt], GREEDY))[0] for prompt in PROMPTS] == expected
        engine.settle()
    assert len(watched.seen) == NUM_LAYERS * NUM_PROMPT_BLOCKS
    assert all(filled == list(range(layer + 1)) for layer, filled in watched.seen)
    num_chunks = sum(-(-len(prompt) // CHUNKS["max_num_batched_tokens"]) for prompt in PROMPTS)
    assert watched.num_steps == num_chunks
    assert watched.waits == list(range(NUM_LAYERS)) * num_chunks
    assert watched.num_early == NUM_PROMPT_BLOCKS
    with kv_engine(model, layer_files(tmp_path)) as engine:
        outcomes = engine.generate(PROMPTS, GREEDY)
    assert tokens(outcomes) == expected
    assert [outcome.num_cached_tokens for outcome in outcomes] == [num_full(prompt) for prompt in PROMPTS]


def test_rows_that_decode_beside_a_prompt_are_not_in_its_way(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch)
    with kv_engine(model, layer_files(tmp_path), **CHUNKS) as engine:
        together = tokens(engine.generate(PROMPTS, GREEDY))
    assert together == run(model, None)
    assert watched.num_early == NUM_PROMPT_BLOCKS
    assert all(filled == list(range(layer + 1)) for layer, filled in watched.seen)


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, owner: type, name: str, layer: int) -> Iterator[None]:
    """A method that raises for a layer."""
    method = getattr(owner, name)

    def raising(self: Any, *args: Any) -> None:
        if layer in args:
            raise OSError(f"layer {layer} is broken")
        method(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, raising)
        yield


@pytest.mark.parametrize(
    ("owner", "name"),
    [(LayerFilesWorker, "save_kv_layer"), (LayerStages, "copy"), (LayerStages, "_copy")],
    ids=["out of tree", "offered", "on a thread"],
)
def test_a_layer_that_cannot_be_saved_loses_nothing(
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    owner: type,
    name: str,
) -> None:
    choice = layer_files if owner is LayerFilesWorker else lambda folder: layerwise(files(folder))
    expected = run(model, choice(tmp_path / "right"))
    with broken(monkeypatch, owner, name, 1), caplog.at_level(logging.CRITICAL):
        assert run(model, choice(tmp_path / "broken")) == expected
    assert content(tmp_path / "broken") == content(tmp_path / "right") != {}


@pytest.mark.parametrize("depth", [0, 1])
def test_a_step_that_fails_between_layers_leaves_nothing_in_the_store(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, depth: int
) -> None:
    """Its layers were copied up to there; the same prompt, computed again, is saved as if nothing had happened."""
    prompt = PROMPTS[-1]
    expected = run(model, files(tmp_path / "right"), pipeline_depth=depth)
    with kv_engine(model, layerwise(files(tmp_path / "kv")), pipeline_depth=depth) as engine:
        with broken(monkeypatch, ContentWorker, "wait_for_layer_load", 1), caplog.at_level(logging.CRITICAL):
            assert engine.generate([prompt], GREEDY)[0].error is not None
            engine.settle()
        assert content(tmp_path / "kv") == {}
        assert tokens(engine.generate([prompt], GREEDY)) == expected[-1:]
    saved = content(tmp_path / "kv")
    assert len(saved) == (len(prompt) + NUM_GENERATED - 1) // BLOCK_SIZE
    right = content(tmp_path / "right")
    assert all(right[name] == data for name, data in saved.items())


def test_rows_that_go_nan_are_not_kept(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their step has run, and all of its layers were copied."""
    settle = Runner.settle

    def spoilt(runner: Runner, handle: Any) -> Any:
        result = settle(runner, handle)
        return type(result)(tuple(row._replace(error="the logits are NaN") for row in result.rows))

    with kv_engine(model, layerwise(files(tmp_path))) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(Runner, "settle", spoilt)
            assert engine.generate(PROMPTS[-1:], GREEDY)[0].error is not None
        engine.settle()
    assert content(tmp_path) == {}


def test_without_it_nobody_looks_between_layers(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("hooks are made")

    expected = run(model, None)
    monkeypatch.setattr(transfers, "LayerHooks", refuse)
    assert run(model, files(tmp_path)) == expected
    with pytest.raises(AssertionError, match="hooks are made"):
        run(model, layerwise(files(tmp_path)))
