"""Compiled decoders: the same answers, in any batch; and what cannot be compiled runs as it is."""

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3TextConfig

from proposers.base import Draft
from proposers.draft_chain import DraftChain
from server import LLM, SamplingParams
from server.errors import ModelError
from server.kernels import cpu_attention, cpu_linear
from server.model.attention import CPU_ATTENTION_NAME
from server.model.cache import cache_root
from server.model.compiled_model import CompileOrder
from server.model.package import NUM_TOKENS
from server.model.resolve import pull
from tests.fakes.device import DEVICE
from tests.fakes.layer_files import LayerFilesWorker
from tests.fakes.prompts import load_prompts
from tests.tiny_heads import build_tiny_eagle3
from tests.tiny_model import build_tiny_model, write_tokenizer

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="layers are compiled ahead of time on the CPU"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec:FutureWarning"),
]

PROMPTS: Sequence[dict[str, list[int]]] = [
    {"prompt_token_ids": [(7 * i + 13 * j) % 300 + 3 for j in range(length)]}
    for i, length in enumerate((1, 2, 5, 17, NUM_TOKENS, 40, 64, 130))
]
RUNS_COMPILED = "the decoder layers run compiled"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache of the module's own, with the operators, which take a while to build, but no layers."""
    kernels = cache_root() / "kernels"
    if not (cpu_attention.load(kernels) and cpu_linear.load(kernels)):
        pytest.skip("no C++ compiler")
    home = tmp_path_factory.mktemp("cache")
    (home / "outrider").mkdir()
    (home / "outrider" / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        yield home / "outrider"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), num_layers=3)


@contextmanager
def _llm(folder: Path, dtype: str, compile_when: str, **settings: object) -> Iterator[LLM]:
    fixed = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "block_size": 16, "enable_prefix_caching": False}
    with LLM(str(folder), dtype=dtype, compile=compile_when, **{**fixed, **settings}) as llm:
        yield llm


def _ids(llm: LLM, prompts: Sequence[dict[str, list[int]]]) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [
        ("float32", "auto"),
        ("bfloat16", "auto"),
        pytest.param("float32", "bfloat16", marks=pytest.mark.full),
        pytest.param("float32", "fp8_e4m3", marks=pytest.mark.full),
    ],
)
def test_compiled_layers_answer_as_the_models_own(
    folder: Path, cache: Path, dtype: str, kv_dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with _llm(folder, dtype, "none", kv_cache_dtype=kv_dtype) as llm:
        expected = _ids(llm, PROMPTS)
    with _llm(folder, dtype, "wait", kv_cache_dtype=kv_dtype) as llm:
        assert RUNS_COMPILED in caplog.text
        assert list(cache.glob("layers/*/before.pt2"))  # and what lies around them as well
        alone = [_ids(llm, [prompt])[0] for prompt in PROMPTS]
        together = _ids(llm, PROMPTS)
    assert alone == together  # bit for bit the same in any batch, in bfloat16 as well
    if dtype == "float32":
        assert alone == expected
    else:
        num_equal = sum(a == b for x, y in zip(alone, expected, strict=True) for a, b in zip(x, y, strict=True))
        assert num_equal > 0.5 * 24 * len(PROMPTS)  # rounded less often than by the model's own code
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 3,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
        "policy": "fixed",
    }
    settings = {"kv_cache_dtype": kv_dtype, "speculative_config": drafts, "max_num_batched_tokens": 64}
    with _llm(folder, dtype, "wait", **settings) as llm:
        assert _ids(llm, PROMPTS) == alone


@pytest.mark.usefixtures("cache")
def test_compiled_layers_show_proposers_what_the_models_own_do(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A head that taps two layers, behind the first layers alone: the same drafts, kept as often."""
    caplog.set_level(logging.INFO)
    head = build_tiny_eagle3(tmp_path, taps=(2, 1))
    drafts: list[list[int]] = []
    draft_of = DraftChain.draft

    def recorded(chain: DraftChain, *args: Any) -> Draft:
        draft = draft_of(chain, *args)
        drafts.extend(draft.ids.tolist())
        return draft

    monkeypatch.setattr(DraftChain, "draft", recorded)
    config = [
        {"method": "layer_skip", "num_layers": 2, "num_speculative_tokens": 2, "policy": "fixed"},
        {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2},
    ]
    found = {}
    for compile_when in ("none", "wait"):
        drafts.clear()
        with _llm(folder, "float32", compile_when, speculative_config=config) as llm:
            ids = _ids(llm, PROMPTS)
        found[compile_when] = ids, drafts.copy()
    assert RUNS_COMPILED in caplog.text
    assert "the layers of the draft head run compiled" in caplog.text
    assert found["wait"] == found["none"]
    assert len({tuple(ids) for ids in found["wait"][1]}) > 50


@pytest.mark.usefixtures("cache")
def test_a_connector_is_called_between_compiled_layers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In steps that compute prompts; what it takes then is what the cache holds behind the step."""
    caplog.set_level(logging.INFO)
    calls: list[int] = []
    save = LayerFilesWorker.save_kv_layer

    def save_layer(worker: LayerFilesWorker, layer: int) -> None:
        calls.append(layer)
        save(worker, layer)

    monkeypatch.setattr(LayerFilesWorker, "save_kv_layer", save_layer)
    choice = "tests.fakes.layer_files:LayerFilesConfig"
    found = {}
    for is_layerwise in (True, False):
        place = tmp_path / str(is_layerwise)
        place.mkdir()
        monkeypatch.setattr(LayerFilesWorker, "is_layerwise", is_layerwise)
        connector = {"kv_connector": choice, "kv_connector_extra_config": {"folder": str(place)}}
        with _llm(folder, "float32", "wait", enable_prefix_caching=True, kv_transfer_config=connector) as llm:
            calls.clear()
            ids = _ids(llm, PROMPTS[-1:])
        assert calls == ([0, 1, 2] if is_layerwise else [])
        found[is_layerwise] = ids, {path.name: path.read_bytes() for path in place.iterdir()}
    assert caplog.text.count(RUNS_COMPILED) == 2
    assert found[True] == found[False]
    assert len(found[True][1]) == (130 + 24 - 1) // 16


def test_auto_serves_at_once_and_changes_over_when_quiet(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    shutil.rmtree(cache / "layers", ignore_errors=True)
    with _llm(folder, "float32", "auto") as llm:
        before = _ids(llm, PROMPTS)
        assert RUNS_COMPILED not in caplog.text
        deadline_s = time.monotonic() + 600
        while RUNS_COMPILED not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        assert _ids(llm, PROMPTS) == before
    caplog.clear()
    with _llm(folder, "float32", "auto"):  # a warm cache is used from the start
        assert RUNS_COMPILED in caplog.text


def test_broken_packages_are_not_used(folder: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _llm(folder, "float32", "wait") as llm:
        expected = _ids(llm, PROMPTS)
    (package,) = cache.glob("layers/*/0.pt2")
    intact = package.read_bytes()
    package.write_bytes(intact[: len(intact) // 2])
    with _llm(folder, "float32", "wait") as llm:
        assert "cannot be used" in caplog.text
        assert _ids(llm, PROMPTS) == expected
    package.write_bytes(intact)


@pytest.mark.usefixtures("cache")
def test_a_compiler_that_fails_leaves_the_model_as_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with _llm(folder, "bfloat16", "none") as llm:
        expected = _ids(llm, PROMPTS[:4])
    monkeypatch.setattr("server.model.compilation.sys.executable", shutil.which("false"))
    with _llm(folder, "bfloat16", "wait", block_size=32) as llm:
        assert "cannot be compiled, and run as they are" in caplog.text
        assert _ids(llm, PROMPTS[:4]) == expected


def test_a_full_disk_is_told_as_such(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    full = "echo 'as: cannot write x.o: No space left on device' >&2; exit 1"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) {full};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with _llm(folder, "float32", "wait", block_size=32) as llm:
        (told,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        assert told.startswith(
            f"the decoder layers cannot be compiled, and run as they are: no space left for {cache / 'layers'}/"
        )
        assert len(_ids(llm, PROMPTS[:1])[0]) == 24


@pytest.mark.usefixtures("cache")
def test_packages_in_use_take_no_room_in_the_temporary_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that is killed could not clear it up."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with _llm(folder, "float32", "wait") as llm:
        assert RUNS_COMPILED in caplog.text
        assert not list(tmp_path.iterdir())
        assert len(_ids(llm, PROMPTS[:1])[0]) == 24


def test_the_process_that_compiles_and_its_compiler_end_with_the_parent(folder: Path, tmp_path: Path) -> None:
    pipe, compiler = tmp_path / "pipe", tmp_path / "c++"
    os.mkfifo(pipe)
    hang = f"echo > {pipe}; exec sleep 600 > {pipe}"
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *" -o "*) {hang};; esac\nexec c++ "$@"\n')
    compiler.chmod(0o755)
    order = CompileOrder(str(folder), "float32", "float32", CPU_ATTENTION_NAME, (3, 2, 16, 32), 1, trusts_code=False)
    command = [sys.executable, "-m", "server.model.layer_compile", order.to_json(), str(tmp_path / "target")]
    environ = {**os.environ, "CXX": str(compiler), "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ, process_group=0
    ) as process:
        assert process.stdin is not None
        with pipe.open() as running:
            assert running.readline() == "\n"  # it compiles
            process.stdin.close()  # as the parent's end does, however it ends
            assert process.wait(timeout=300) != 0
            assert running.read() == ""  # nobody has the other end any more
    assert not (tmp_path / "target").exists()


@pytest.mark.full
@pytest.mark.usefixtures("cache")
def test_layers_of_two_kinds(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = Gemma3TextConfig(
        **sizes,
        head_dim=16,
        vocab_size=512,
        num_hidden_layers=3,
        layer_types=types,
        sliding_window=32,
        max_position_embeddings=512,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    write_tokenizer(tmp_path, 512)
    with _llm(tmp_path, "float32", "none") as llm:
        expected = _ids(llm, PROMPTS)
    with _llm(tmp_path, "float32", "wait") as llm:
        assert RUNS_COMPILED in caplog.text
        assert _ids(llm, PROMPTS) == expected
        assert _ids(llm, PROMPTS[:1]) == expected[:1]


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_default_model_in_bfloat16_has_one_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Greedy and seeded: alone without drafts, and in batches with drafts, chunked prompts and prefix hits."""
    caplog.set_level(logging.INFO)
    try:
        folder = pull("smollm2-135m")
    except ModelError as error:
        pytest.skip(f"no default model here: {error}")
    prompts = [{"prompt_token_ids": ids} for ids in load_prompts(AutoTokenizer.from_pretrained(folder), 320)]
    params = [
        SamplingParams(temperature=0.8 * (i % 2), seed=i, max_tokens=40, ignore_eos=True) for i in range(len(prompts))
    ]
    settings = {"device": "cpu", "dtype": "bfloat16", "kv_cache_memory_bytes": 256 << 20, "compile": "wait"}
    with LLM(str(folder), **settings) as llm:
        assert RUNS_COMPILED in caplog.text
        expected = [llm.generate(*one)[0].outputs[0].token_ids for one in zip(prompts, params, strict=True)]
    drafts = {
        "method": "ngram",
        "num_speculative_tokens": 5,
        "prompt_lookup_max": 4,
        "prompt_lookup_min": 2,
        "policy": "fixed",
    }
    with LLM(str(folder), **settings, speculative_config=drafts, max_num_seqs=16, max_num_batched_tokens=64) as llm:
        for _ in range(2):
            outputs = [output.outputs[0] for output in llm.generate(prompts, params)]
            assert [output.token_ids for output in outputs] == expected
            assert sum(output.speculation.num_accepted_draft_tokens for output in outputs) > 50
