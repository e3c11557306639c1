"""What integration tests share."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from server.tokenizer import Tokenizer
from tests.fakes.lmcache_process import LMCacheProcess
from tests.fakes.server_process import server_processes
from tests.fakes.tokenizers import tiny_tokenizer


@pytest.fixture(autouse=True)
def _patience_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy is no store that hangs; tests of such stores have a time of their own."""
    monkeypatch.setattr("connectors.content.patience.STORE_TIMEOUT_S", 60.0)


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The tiny model's tokenizer."""
    return tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def lmcache_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LMCacheProcess]:
    """A server for all tests, as it takes seconds to start."""
    if find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed")
    process = LMCacheProcess(tmp_path_factory.mktemp("lmcache") / "log")
    yield process
    process.close()


@pytest.fixture
def lmcache_server(lmcache_process: LMCacheProcess) -> LMCacheProcess:
    """The server, empty."""
    lmcache_process.clear()
    return lmcache_process


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server process that does all of it, with the `model` of the tests' file."""
    with server_processes(tmp_path_factory.mktemp("alone"), {"alone": {"model": model}}) as servers:
        yield servers["alone"].target
