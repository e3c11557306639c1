import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from server.errors import ModelError
from server.model.fingerprint import _CHUNK_NBYTES, digest_file
from server.model.memory import weights_nbytes
from server.model.weights import INDEX_FILE, SINGLE_FILE, TensorInfo, WeightFiles, read_weight_files


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5, dtype=torch.int8)}, tmp_path / SINGLE_FILE)
    return tmp_path / SINGLE_FILE


def test_headers_say_it_all(file: Path) -> None:
    weights = read_weight_files(file.parent)
    assert weights.paths == (file,)
    assert weights.tensors == {"a": TensorInfo("F32", (3, 4)), "b": TensorInfo("I8", (5,))}
    assert weights_nbytes(weights, torch.float32) == 3 * 4 * 4 + 5
    assert weights_nbytes(weights, torch.bfloat16) == 3 * 4 * 2 + 5


@pytest.mark.parametrize("kept_nbytes", [0, 7, 8, 40, -1])
def test_a_file_cut_short(file: Path, kept_nbytes: int) -> None:
    file.write_bytes(file.read_bytes()[:kept_nbytes])
    with pytest.raises(ModelError, match=r"model.safetensors is broken: .*; fetch the model again"):
        read_weight_files(file.parent)


@pytest.mark.parametrize("header", [b"[]", b"{{{{", b'{"a": 1}', b'{"a": {"dtype": "F32"}}', b"\xff" * 64])
def test_a_damaged_header(file: Path, header: bytes) -> None:
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ModelError, match=r"model.safetensors is broken: its header is damaged"):
        read_weight_files(file.parent)


def test_a_page_of_html_in_place_of_weights(file: Path) -> None:
    file.write_text("<html>please log in</html>")
    with pytest.raises(ModelError, match="does not begin with a safetensors header"):
        read_weight_files(file.parent)


def test_a_missing_shard_is_named(file: Path) -> None:
    shard = file.rename(file.with_name("model-1.safetensors"))
    index = {"weight_map": {"a": shard.name, "b": shard.name, "c": "model-2.safetensors"}}
    (file.parent / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks 1 of 2 weight files, such as model-2.safetensors"):
        read_weight_files(file.parent)
    (file.parent / INDEX_FILE).write_text("{}")
    with pytest.raises(ModelError, match=r"index.json is broken"):
        read_weight_files(file.parent)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(ModelError, match=r"pytorch_model.bin is a pickle.*: convert the weights to safetensors"):
        read_weight_files(tmp_path)


def test_no_float_is_counted_in_its_stored_width() -> None:
    tensors = {name: TensorInfo(name, (10,)) for name in ("F64", "F32", "F16", "BF16", "F8_E4M3")}
    assert weights_nbytes(WeightFiles((), tensors), torch.float16) == 5 * 10 * 2


def test_the_digest_sees_every_byte(tmp_path: Path) -> None:
    content = bytearray(2 * _CHUNK_NBYTES + 3)
    path = tmp_path / "file"
    digests = set()
    for offset in (None, 0, _CHUNK_NBYTES - 1, _CHUNK_NBYTES, len(content) - 1):
        changed = content.copy()
        if offset is not None:
            changed[offset] = 1
        path.write_bytes(changed)
        digests.add(digest_file(path))
    path.write_bytes(content[:-1])
    digests.add(digest_file(path))
    assert len(digests) == 6
