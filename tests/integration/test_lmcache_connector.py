"""Blocks in LMCache's server: shared by engines, and no harm to them whatever becomes of it."""

import asyncio
import logging
import random
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing
from importlib.util import find_spec
from pathlib import Path

import pytest

from connectors.lmcache.connector import LMCacheConfig
from connectors.lmcache.failure import LMCacheFailure
from connectors.lmcache.package import import_lmcache
from connectors.lmcache.pool import LMCachePool
from connectors.lmcache.server import LMCacheServer
from connectors.lmcache.store import LMCacheStore
from connectors.wire import MAGIC
from server.errors import ConfigError
from server.request import SamplingParams
from tests.fakes.engine_under_test import EngineUnderTest, Outcome, engine_on
from tests.fakes.eventually import eventually
from tests.fakes.lmcache_process import LMCacheProcess
from tests.fakes.store_blocks import BLOCK_NBYTES, NAMESPACE, block_hash, content, has, load, save
from tests.fakes.thread_watch import no_thread_is_left
from tests.tiny_model import build_tiny_model

BLOCK_SIZE = 16
LENGTHS = (5, 16, 17, 33, 48, 49, 130)
PROMPTS = [[random.Random(length).randrange(3, 500) for _ in range(length)] for length in LENGTHS]
SAMPLING = [
    SamplingParams(temperature=temperature, seed=5, max_tokens=8, ignore_eos=True) for temperature in (0.0, 1.0)
]
NUM_LOADABLE = [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in LENGTHS]
"""Tokens of each prompt that need not be computed: those of full blocks without the last token."""


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def open_store(port: int, clock: Clock, timeout_s: float = 20.0) -> LMCacheStore:
    import_lmcache()
    store = LMCacheStore(LMCacheServer(f"tcp://127.0.0.1:{port}", timeout_s, 5.0, clock))
    store.expect(NAMESPACE, BLOCK_NBYTES)
    return store


@pytest.fixture
def store(lmcache_server: LMCacheProcess, clock: Clock) -> Iterator[LMCacheStore]:
    opened = open_store(lmcache_server.port, clock)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("lmcache-model"))


def engine(
    folder: Path, server: LMCacheProcess, block_size: int = BLOCK_SIZE, **extra: object
) -> AbstractContextManager[EngineUnderTest]:
    config = {
        "kv_connector": "LMCacheConnectorV1",
        "kv_connector_extra_config": {"port": server.port, "request_timeout_seconds": 20.0, **extra},
    }
    return engine_on(folder, "cpu", block_size=block_size, kv_transfer_config=config)


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    """Tokens without a connector, greedy ones and then sampled ones."""
    with engine_on(folder, "cpu", block_size=BLOCK_SIZE) as alone:
        return [tokens for sampling in SAMPLING for tokens in ids(alone.generate(PROMPTS, sampling))]


def ids(outcomes: list[Outcome]) -> list[list[int]]:
    return [outcome.only.token_ids for outcome in outcomes]


def settle(server: LMCacheProcess, *engines: EngineUnderTest) -> None:
    """Nothing is held in the end, neither here nor there: saves go on behind an answer, and sessions end unwatched."""
    for each in engines:
        each.settle()

    def has_nothing() -> bool:
        status = server.memory_status()
        return not (status["read_locked_count"] or status["write_locked_count"] or server.num_sessions())

    asyncio.run(eventually(has_nothing))


def flip(server: LMCacheProcess, offset: int) -> int:
    """Invert a byte of every block that the server has. Returns: how many there are."""
    count, place = 0, -1
    with server.pool.open("r+b") as pool:
        raw = pool.read()
        while (place := raw.find(MAGIC, place + 1)) >= 0:
            pool.seek(place + offset)
            pool.write(bytes([raw[place + offset] ^ 0xFF]))
            count += 1
    return count


def test_engines_share_what_they_compute(
    folder: Path, lmcache_server: LMCacheProcess, expected: list[list[int]]
) -> None:
    with engine(folder, lmcache_server) as first:
        outcomes = first.generate(PROMPTS, SAMPLING[0])
        assert ids(outcomes) == expected[: len(PROMPTS)]
        assert [outcome.num_cached_tokens for outcome in outcomes] == [0] * len(PROMPTS)
        first.settle()
    with engine(folder, lmcache_server) as second:
        for sampling, tokens in zip(SAMPLING, (expected[: len(PROMPTS)], expected[len(PROMPTS) :]), strict=True):
            outcomes = second.generate(PROMPTS, sampling)
            assert ids(outcomes) == tokens
            assert [outcome.num_cached_tokens for outcome in outcomes] == NUM_LOADABLE
        settle(lmcache_server, second)


@pytest.fixture(
    scope="module",
    params=[pytest.param(24, id="chunk24"), *(pytest.param(n, marks=pytest.mark.full) for n in (8, 16, 100, 1024))],
)
def server_of_other_chunks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LMCacheProcess]:
    """Smaller and larger than our blocks, and not dividing them, nor divided by them."""
    if find_spec("lmcache") is None:
        pytest.skip("lmcache is not installed")
    process = LMCacheProcess(tmp_path_factory.mktemp("chunks") / "log", chunk_size=request.param)
    yield process
    process.close()


@pytest.mark.parametrize("block_size", [BLOCK_SIZE, pytest.param(48, marks=pytest.mark.full)])
def test_chunks_of_any_size_hold_a_block(
    folder: Path, server_of_other_chunks: LMCacheProcess, expected: list[list[int]], block_size: int
) -> None:
    """Every full block is found, whatever the server's --chunk-size."""
    server = server_of_other_chunks
    server.clear()
    with engine(folder, server, block_size) as first:
        assert ids(first.generate(PROMPTS, SAMPLING[0])) == expected[: len(PROMPTS)]
        first.settle()
    assert server.memory_status()["total_object_count"] > 0
    with engine(folder, server, block_size) as second:
        outcomes = second.generate(PROMPTS, SAMPLING[1])
        assert ids(outcomes) == expected[len(PROMPTS) :]
        assert [outcome.num_cached_tokens for outcome in outcomes] == [
            (length - 1) // block_size * block_size for length in LENGTHS
        ]
        settle(server, second)


@pytest.mark.full
@pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed")
@pytest.mark.parametrize("chunk_size", [4, 1 << 17])
def test_chunks_that_are_too_small_for_a_hash_or_take_too_long_are_told(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture, chunk_size: int
) -> None:
    """Such a server is left alone like one that is not there."""
    with closing(LMCacheProcess(tmp_path / "log", chunk_size=chunk_size)) as process:
        store = open_store(process.port, clock)
        assert not has(store, 1)
        store.close()
    assert f"is not used for now: its --chunk-size, {chunk_size}, is not 8 to 65536" in caplog.text


def test_a_flipped_byte_is_a_miss(folder: Path, lmcache_server: LMCacheProcess, expected: list[list[int]]) -> None:
    with engine(folder, lmcache_server) as first:
        first.generate(PROMPTS, SAMPLING[0])
        first.settle()
    assert flip(lmcache_server, 500) >= sum(NUM_LOADABLE) // BLOCK_SIZE
    with engine(folder, lmcache_server) as second:
        outcomes = second.generate(PROMPTS, SAMPLING[0])
        assert ids(outcomes) == expected[: len(PROMPTS)]
        assert [outcome.num_cached_tokens for outcome in outcomes] == [0] * len(PROMPTS)
        settle(lmcache_server, second)


def test_a_server_that_hangs_delays_nobody_else(
    folder: Path, lmcache_server: LMCacheProcess, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that waits for it goes on without; one that has nothing to ask is not held up meanwhile."""
    monkeypatch.setattr("connectors.content.patience.STORE_TIMEOUT_S", 4.0)
    with engine(folder, lmcache_server) as node, ThreadPoolExecutor(1) as pool:
        node.generate(PROMPTS[-1:], SAMPLING[0])
        lmcache_server.stop()
        try:
            waiting = pool.submit(node.generate, PROMPTS[3:4], SAMPLING[0])
            short = node.generate(PROMPTS[:1], SAMPLING[0])
            assert not waiting.done()
            assert ids(short) == expected[:1]
            assert ids(waiting.result()) == expected[3:4]
        finally:
            lmcache_server.go_on()


def test_a_server_that_was_started_again_at_once_is_used(
    folder: Path, lmcache_server: LMCacheProcess, expected: list[list[int]]
) -> None:
    """Without a call in between that could have failed: it answers, but knows nobody."""
    with engine(folder, lmcache_server) as first, engine(folder, lmcache_server) as second:
        first.generate(PROMPTS[:3], SAMPLING[0])
        lmcache_server.kill()
        lmcache_server.start()
        assert ids(first.generate(PROMPTS, SAMPLING[0])) == expected[: len(PROMPTS)]
        first.settle()
        outcomes = second.generate(PROMPTS, SAMPLING[0])
        assert ids(outcomes) == expected[: len(PROMPTS)]
        assert [outcome.num_cached_tokens for outcome in outcomes[3:]] == NUM_LOADABLE[3:]
        settle(lmcache_server, first, second)


def test_nothing_stays_locked(store: LMCacheStore, lmcache_server: LMCacheProcess) -> None:
    for number in range(70):
        save(store, number)
    assert store.find(NAMESPACE, [block_hash(number) for number in range(75)]) == 70
    assert store.find(NAMESPACE, [block_hash(number) for number in (1, 2, 99, 3)]) == 2
    assert store.find(NAMESPACE, []) == 0
    assert [load(store, number) for number in (0, 69, 70)] == [content(0), content(69), None]
    save(store, 0)
    settle(lmcache_server)
    assert lmcache_server.memory_status()["total_object_count"] == 70


def test_nothing_stays_locked_of_calls_that_were_given_up(
    lmcache_server: LMCacheProcess, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """They are carried out when the server goes on, and so is what takes them back."""
    store = open_store(lmcache_server.port, clock, timeout_s=2.0)
    save(store, 1)
    clients = [open_store(lmcache_server.port, clock, timeout_s=2.0) for _ in range(2)]
    assert all(has(client, 1) for client in clients)
    lmcache_server.stop()
    try:
        assert not has(clients[0], 1)
        assert load(clients[1], 1) is None
    finally:
        lmcache_server.go_on()
    clock.now_s += 10.0
    assert load(store, 1) == content(1)
    for each in (store, *clients):
        each.close()
    settle(lmcache_server)
    assert len([record for record in caplog.records if "did not answer" in record.getMessage()]) == 2


@pytest.mark.skipif(find_spec("lmcache") is None, reason="lmcache is not installed")
def test_a_server_that_is_not_there_is_a_miss_and_said_once(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    store = open_store(1, clock, timeout_s=0.05)
    for _ in range(3):
        save(store, 1)
        assert not has(store, 1)
        assert load(store, 1) is None
        clock.now_s += 10.0
    store.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "tcp://127.0.0.1:1 is not used for now: it did not answer within 0.05 s" in caplog.text


def test_it_is_left_alone_for_a_while_and_then_used_again(
    store: LMCacheStore, lmcache_server: LMCacheProcess, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    impatient = open_store(lmcache_server.port, clock, timeout_s=2.0)
    save(impatient, 1)
    lmcache_server.stop()
    try:
        assert not has(impatient, 1)
    finally:
        lmcache_server.go_on()
    assert has(store, 1), "it answers again"
    assert not has(impatient, 1), "but is not asked yet"
    clock.now_s += 5.0
    assert has(impatient, 1)
    impatient.close()
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert caplog.messages[1].endswith("is used again")


@pytest.mark.parametrize("offset", [0, 20, 50, 90, 96, 95 + BLOCK_NBYTES])
def test_a_block_that_is_not_right_is_not_found_again(
    store: LMCacheStore, lmcache_server: LMCacheProcess, caplog: pytest.LogCaptureFixture, offset: int
) -> None:
    for number in range(3):
        save(store, number)
    assert flip(lmcache_server, offset) >= 3
    assert load(store, 1) is None
    assert "of the LMCache server is not used: it" in caplog.text
    assert store.find(NAMESPACE, [block_hash(number) for number in range(3)]) == 1
    lmcache_server.clear()
    save(store, 1)
    assert load(store, 1) == content(1), "once it was saved anew"


def test_a_registration_that_the_server_gave_up_is_renewed(
    lmcache_server: LMCacheProcess, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does so after silence, and then answers that there is nothing."""
    monkeypatch.setattr("connectors.lmcache.link.secrets.randbits", lambda _: 7)
    store = open_store(lmcache_server.port, clock)
    save(store, 1)
    lmcache_server.forget(7)
    assert not has(store, 1)
    monkeypatch.setattr("connectors.lmcache.link.RENEW_AFTER_S", 0.0)
    assert has(store, 1)
    assert load(store, 1) == content(1)
    store.close()


def test_threads_share_a_connection(store: LMCacheStore, lmcache_server: LMCacheProcess) -> None:
    for number in range(5):  # who saves what another is just saving does not wait for it
        save(store, number)

    def work(number: int) -> bytes | None:
        save(store, number % 5)
        assert has(store, number % 5)
        return load(store, number % 5)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(150))) == [content(number % 5) for number in range(150)]
    settle(lmcache_server)


def test_it_ends_without_threads(lmcache_server: LMCacheProcess, clock: Clock) -> None:
    with no_thread_is_left():
        store = open_store(lmcache_server.port, clock)
        save(store, 1)
        store.close()
        store.close()
        assert not has(store, 1)


def test_namespaces_are_apart(store: LMCacheStore) -> None:
    store.expect("another", BLOCK_NBYTES)
    store.expect("larger", 2 * BLOCK_NBYTES)
    save(store, 1)
    assert not has(store, 1, "another")
    assert load(store, 1, "another") is None
    assert not has(store, 1, "larger")


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="port"):
        LMCacheConfig(port=0)
    with pytest.raises(ConfigError, match="request_timeout_seconds"):
        LMCacheConfig(request_timeout_seconds=0)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lmcache", None)
    monkeypatch.delitem(sys.modules, "lmcache.v1.multiprocess.transport.factory", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'outrider\[lmcache\]'"):
        LMCacheConfig().open_store()


@pytest.mark.parametrize(
    ("name", "nbytes", "reason"),
    [
        ("", 0, "--shm-name"),
        ("../../etc/passwd", 4096, "shares no memory"),
        ("/lmcache_l1_pool_/../x", 4096, "shares no memory"),
        ("lmcache_l1_pool_that_is_not_there", 4096, "cannot be used"),
    ],
)
def test_memory_that_cannot_be_shared_is_a_failure(name: str, nbytes: int, reason: str) -> None:
    with pytest.raises(LMCacheFailure, match=reason):
        LMCachePool(name, nbytes)


def test_only_what_is_inside_of_the_memory_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("connectors.lmcache.pool.FOLDER", tmp_path)
    (tmp_path / "lmcache_l1_pool_1").write_bytes(bytes(4096))
    pool = LMCachePool("lmcache_l1_pool_1", 4096)
    assert pool.slot(4000, 96).nbytes == 96
    for offset, nbytes in ((-1, 10), (4001, 96), (0, 4097), (1 << 70, 1)):
        with pytest.raises(LMCacheFailure, match="of a memory of 4096"):
            pool.slot(offset, nbytes)
    assert pool.is_current()
    (tmp_path / "new").write_bytes(bytes(4096))
    (tmp_path / "new").rename(tmp_path / "lmcache_l1_pool_1")
    assert not pool.is_current()
