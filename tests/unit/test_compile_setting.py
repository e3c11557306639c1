"""A wish to compile that does not come true is told of."""

import logging
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from server.compose import build_core
from server.config import Config
from server.errors import ModelError
from tests.tiny_model import build_tiny_model


@pytest.mark.parametrize(
    ("device", "settings", "reason"),
    [
        ("cpu", {"compile": "wait", "enforce_eager": True}, "enforce_eager excludes it"),
        ("cuda", {"compile": "wait", "enforce_eager": True}, "enforce_eager excludes it"),
        ("cuda", {"compile": "wait", "batch_invariant": True}, "batch_invariant excludes it on CUDA"),
        ("cpu", {"compile": "wait", "batch_invariant": True}, None),
        ("cuda", {"compile": "wait"}, None),
        ("cuda", {"compile": "none", "enforce_eager": True}, None),
    ],
)
def test_waiting_for_what_is_not_compiled(
    device: str, settings: dict[str, object], reason: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    config = Config.from_kwargs(model="/no/such/model", **settings)
    chosen = (torch.device(device), "by the test")
    with patch("server.composition.target.choose_device", lambda _: chosen), pytest.raises(ModelError):
        build_core(config)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    words = "the decoder layers are not compiled, although compile is wait: "
    assert told == ([] if reason is None else [words + reason])


def test_waiting_without_the_operators_that_it_takes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"device": "cpu", "kv_cache_memory_bytes": 4 << 20, "compile": "wait"}
    config = Config.from_kwargs(model=str(build_tiny_model(tmp_path)), **settings)
    with patch("server.composition.target.can_pack", lambda _: False):
        build_core(config)
    assert "not compiled, although compile is wait: the C++ operators are missing" in caplog.text
