"""A wish to compile that does not come true is told of."""

import logging
from unittest.mock import patch

import pytest
import torch

from server.compose import build_core
from server.config import Config
from server.errors import ModelError


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
    with patch("server.compose.choose_device", lambda _: chosen), pytest.raises(ModelError):
        build_core(config)
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    words = "the decoder layers are not compiled, although compile is wait: "
    assert told == ([] if reason is None else [words + reason])
