"""The hub cannot be reached from a test; its library raises what it would raise."""

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors

from server.errors import ModelError
from server.model.hub import fetch_from_hub


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """An error with as much of a response as is looked at; the HTTP library differs between versions."""
    error = kind.__new__(kind)
    Exception.__init__(error, f"HTTP {status}")
    error.response = type("Response", (), {"status_code": status})()
    return error


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            http_error(errors.GatedRepoError, 403),
            r"accept its licence on https://.*/owner/name and set HF_TOKEN",
        ),
        (http_error(errors.RepositoryNotFoundError, 401), "no model owner/name on the hub, or it is private"),
        (http_error(errors.RevisionNotFoundError, 404), "no revision 'v1': name an existing"),
        (http_error(errors.HfHubHTTPError, 403), "HTTP status 403: check HF_TOKEN"),
        (http_error(errors.HfHubHTTPError, 503), "HTTP status 503: try again later"),
        (errors.HFValidationError("Repo id must be"), "neither a folder or file here nor a hub id"),
        (errors.LocalEntryNotFoundError("offline"), "hub cannot be reached: check network, proxy and HF_HUB_OFFLINE"),
        (OSError(28, "No space left on device"), "No space left on device; check network, proxy and free disk space"),
        (ConnectionError("reset"), "reset; check network"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_failure_names_cause_and_remedy(raised: Exception, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> str:
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ModelError, match=expected) as caught:
        fetch_from_hub("owner/name", "v1", with_code=False)
    assert caught.value.__cause__ is raised


@pytest.mark.parametrize("with_code", [False, True])
def test_code_is_fetched_only_where_it_is_trusted(
    with_code: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def download(repo_id: str, **options: Any) -> str:
        asked.update(options, repo_id=repo_id)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch_from_hub("owner/name", None, with_code=with_code) == tmp_path
    assert asked["repo_id"] == "owner/name"
    assert ("*.py" in asked["allow_patterns"]) is with_code
    assert "*.safetensors" in asked["allow_patterns"]
    assert "*.bin" not in asked["allow_patterns"]


def test_further_files_are_fetched_where_they_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(_: str, **options: Any) -> str:
        asked.update(options)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    fetch_from_hub("owner/name", None, also=("*.bin",))
    assert {"*.safetensors", "*.bin"} <= set(asked["allow_patterns"])
    assert "*.py" not in asked["allow_patterns"]


def test_without_a_network_the_real_library_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="owner/name is no folder here, is not in the hub's cache"):
        fetch_from_hub("owner/name", None, with_code=False)
