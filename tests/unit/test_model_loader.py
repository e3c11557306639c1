import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from server.config import ModelConfig
from server.errors import ModelError
from server.model.attention import attention_name
from server.model.loader import LoadedModel, load_model
from server.model.support import check_model
from tests.tiny_model import build_tiny_model

CPU = torch.device("cpu")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return build_tiny_model(tmp_path / "tiny")


def load(folder: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> LoadedModel:
    return load_model(ModelConfig(model=str(folder), **settings), CPU, dtype)


def edit(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_the_model_is_ready_for_the_worker(tiny: Path) -> None:
    loaded = load(tiny)
    assert (loaded.architecture, loaded.source, loaded.folder) == ("LlamaForCausalLM", str(tiny), tiny)
    assert (loaded.num_layers, loaded.num_kv_heads, loaded.head_dim, loaded.vocab_size) == (2, 2, 16, 512)
    assert loaded.max_position_embeddings == 512
    assert loaded.eos_token_ids == (2,)
    assert loaded.model.config._attn_implementation == attention_name(torch.device("cpu"), torch.float32, 16)
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    expected = AutoModelForCausalLM.from_pretrained(tiny).state_dict()
    actual = loaded.model.state_dict()
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_rotary_frequencies_stay_float32_in_a_bfloat16_model(tiny: Path) -> None:
    """Rounded to bfloat16 they would be off by 0.4%, which after 1,000 tokens is a different rotation."""
    model = load(tiny, torch.bfloat16).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    frequencies = [buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")]
    assert frequencies
    for buffer in frequencies:
        assert buffer.dtype == torch.float32
        torch.testing.assert_close(buffer, 10_000 ** -(torch.arange(0, 16, 2) / 16))


def test_nothing_is_written_where_there_is_no_terminal(tiny: Path, capfd: pytest.CaptureFixture[str]) -> None:
    load(tiny)
    assert capfd.readouterr() == ("", "")


def test_eos_ids_of_all_sources_are_joined(tiny: Path) -> None:
    edit(tiny / "generation_config.json", eos_token_id=[7, 5])
    edit(tiny / "config.json", eos_token_id=5)
    assert load(tiny).eos_token_ids == (2, 5, 7)


def test_generation_config_may_be_ignored(tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path, generation_config={"temperature": 0.6, "max_new_tokens": 9})
    assert load(folder).generation_defaults == {"temperature": 0.6, "max_tokens": 9}
    assert load(folder, generation_config="vllm").generation_defaults == {}


def test_a_model_in_shards_is_the_same_model(tiny: Path, tmp_path: Path) -> None:
    AutoModelForCausalLM.from_pretrained(tiny).save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    sharded = load(tmp_path / "shards", tokenizer=str(tiny)).model.state_dict()
    assert all(torch.equal(sharded[name], tensor) for name, tensor in load(tiny).model.state_dict().items())


class TestRefusals:
    def refusal(self, folder: Path, **settings: Any) -> str:
        with pytest.raises(ModelError) as caught:
            load(folder, **settings)
        return str(caught.value)

    def test_code_from_the_repository_runs_only_when_told_to(self, tiny: Path) -> None:
        witness = tiny / "ran"
        (tiny / "own.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
        edit(tiny / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
        assert "pass --trust-remote-code" in self.refusal(tiny)
        assert not witness.exists()

    def test_an_unknown_architecture(self, tiny: Path) -> None:
        edit(tiny / "config.json", model_type="llama99")
        assert "cannot load" in self.refusal(tiny)

    def test_a_config_that_is_no_json(self, tiny: Path) -> None:
        (tiny / "config.json").write_text("{")
        assert f"cannot load {tiny}" in self.refusal(tiny)

    def test_a_truncated_file(self, tiny: Path) -> None:
        os.truncate(tiny / "model.safetensors", 1000)
        assert "model.safetensors is broken: " in self.refusal(tiny)

    def test_missing_weights_are_not_made_up(self, tiny: Path) -> None:
        weights = load_file(tiny / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, tiny / "model.safetensors", {"format": "pt"})
        assert "lacks 1 weights that its config.json calls for, such as model.layers.1.mlp.up_proj" in self.refusal(
            tiny
        )

    def test_weights_of_another_shape(self, tiny: Path) -> None:
        edit(tiny / "config.json", intermediate_size=256)
        assert f"{tiny}" in self.refusal(tiny)

    def test_weights_that_do_not_fit_name_both_sizes(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("server.model.memory.available_memory_nbytes", lambda: 1 << 18)
        nbytes = (tiny / "model.safetensors").stat().st_size
        message = self.refusal(tiny)
        assert f"weights take {nbytes / (1 << 30):.2f} GiB in float32, and 0.00 GiB are free" in message

    def test_recurrent_layers_behind_trusted_code_are_seen_once_loaded(
        self, tiny: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("server.model.loader.check_config", lambda *_, **__: None)
        monkeypatch.setattr("transformers.LlamaForCausalLM._is_stateful", True)
        assert "it has recurrent layers" in self.refusal(tiny)

    def test_attention_that_looks_ahead(self, tiny: Path) -> None:
        """As in an encoder that is loaded with a language model's head."""
        model = AutoModelForCausalLM.from_pretrained(tiny)
        model.model.layers[1].self_attn.is_causal = False
        with pytest.raises(ModelError, match="its attention looks ahead"):
            check_model(model)

    def test_values_narrower_than_keys(self, tiny: Path) -> None:
        """As in a class from a repository whose configuration does not tell."""
        model = AutoModelForCausalLM.from_pretrained(tiny)
        model.model.layers[1].self_attn.v_proj = torch.nn.Linear(64, 16)
        with pytest.raises(ModelError, match=r"its K and V have several widths \(\[16, 32\]\)"):
            check_model(model)


class TestFingerprint:
    def test_it_is_the_same_in_another_process(self, tiny: Path) -> None:
        code = (
            "import sys, torch\nfrom server.config import ModelConfig\nfrom server.model.loader import load_model\n"
            "loaded = load_model(ModelConfig(model=sys.argv[1]), torch.device('cpu'), torch.float32)\n"
            "print(loaded.fingerprint.hex())"
        )
        environ = {**os.environ, "PYTHONHASHSEED": "77", "OMP_NUM_THREADS": "1"}
        other = subprocess.run(
            [sys.executable, "-c", code, tiny], env=environ, capture_output=True, text=True, check=True
        ).stdout
        assert other.strip() == load(tiny).fingerprint.hex()

    def test_a_copy_elsewhere_has_the_same(self, tiny: Path, tmp_path: Path) -> None:
        assert load(build_tiny_model(tmp_path / "copy")).fingerprint == load(tiny).fingerprint

    @pytest.mark.parametrize("difference", ["weights", "rope", "dtype", "layers"])
    def test_what_changes_kv_changes_it(self, difference: str, tiny: Path, tmp_path: Path) -> None:
        before = load(tiny).fingerprint
        match difference:
            case "weights":
                after = load(build_tiny_model(tmp_path / "other", seed=1)).fingerprint
            case "rope":
                edit(tiny / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5e5})
                after = load(tiny).fingerprint
            case "dtype":
                after = load(tiny, torch.bfloat16).fingerprint
            case _:
                edit(tiny / "config.json", num_hidden_layers=1)
                after = load(tiny).fingerprint
        assert len(after) == 32
        assert after != before
