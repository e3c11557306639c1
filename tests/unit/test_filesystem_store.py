"""Blocks in files: whole or not at all, whatever other processes and the disk do."""

import errno
import logging
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from connectors.filesystem import RENEW_AFTER_S, FilesystemConfig, FilesystemStore
from connectors.mount import mount_of
from connectors.save_failure import SaveFailure
from connectors.wire import FORMAT_VERSION, HEADER_NBYTES, checksum, namespace_digest, pack_header
from server.errors import ConfigError
from tests.fakes.store_blocks import BLOCK_NBYTES, NAMESPACE, block_hash, content, has, load, save


def file_of(root: Path, number: int, namespace: str = NAMESPACE) -> Path:
    name = block_hash(number).hex()
    return root / namespace_digest(namespace).hex() / name[:2] / f"{name}.kv"


def all_files(root: Path) -> list[Path]:
    return [path for path in root.rglob("*") if path.is_file()]


@pytest.fixture
def store(tmp_path: Path) -> FilesystemStore:
    return FilesystemStore(tmp_path)


def test_what_was_saved_is_found_and_loaded(store: FilesystemStore, tmp_path: Path) -> None:
    for number in range(3):
        save(store, number)
    other_process = FilesystemStore(tmp_path)
    assert other_process.find(NAMESPACE, [block_hash(number) for number in (0, 1, 2, 3)]) == 3
    assert other_process.find(NAMESPACE, [block_hash(number) for number in (0, 7, 1)]) == 1
    assert other_process.find(NAMESPACE, []) == 0
    assert [load(other_process, number) for number in range(4)] == [content(0), content(1), content(2), None]
    assert not has(store, 0, "other-fingerprint")
    assert load(store, 0, "other-fingerprint") is None


def test_the_form_is_as_documented(store: FilesystemStore, tmp_path: Path) -> None:
    """Read here by the table of connectors.wire alone: files of today are to be read tomorrow."""
    save(store, 5)
    (path,) = all_files(tmp_path)
    assert path == file_of(tmp_path, 5)
    raw = path.read_bytes()
    assert raw[:12] == b"outrider-kv\n"
    assert struct.unpack_from("<I", raw, 12) == (1,)
    assert raw[16:48] == namespace_digest(NAMESPACE)
    assert raw[48:80] == block_hash(5)
    assert struct.unpack_from("<QQ", raw, 80) == (BLOCK_NBYTES, checksum(content(5)))
    assert raw[96:] == content(5)
    assert checksum(b"") == 0x2D06800538D394C2, "as published for XXH3-64"


def test_another_format_version_is_another_place() -> None:
    """So that of two versions on one mount neither removes what is good for the other."""
    digest = namespace_digest(NAMESPACE)
    namespace_digest.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("connectors.wire.FORMAT_VERSION", FORMAT_VERSION + 1)
        assert namespace_digest(NAMESPACE) != digest
    namespace_digest.cache_clear()


@pytest.mark.parametrize(
    ("offset", "reason"),
    [
        *((offset, "it begins with") for offset in (0, 11)),
        *((offset, "it has format version") for offset in (12, 15)),
        *((offset, "it is of namespace") for offset in (16, 47)),
        *((offset, "it holds block") for offset in (48, 79)),
        *((offset, "its block has") for offset in (80, 87)),
        *((offset, "its checksum is") for offset in (88, 95, 96, 96 + BLOCK_NBYTES // 2, 95 + BLOCK_NBYTES)),
    ],
)
def test_a_flipped_bit_is_a_miss(
    store: FilesystemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, offset: int, reason: str
) -> None:
    save(store, 1)
    path = file_of(tmp_path, 1)
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 0x10
    path.write_bytes(raw)
    assert load(store, 1) is None
    assert load(store, 1) is None
    assert [record.getMessage().startswith(f"{path} is removed: {reason}") for record in caplog.records] == [True]
    assert not path.exists()
    save(store, 1)
    assert load(store, 1) == content(1)


@pytest.mark.parametrize(
    "nbytes", [0, 1, HEADER_NBYTES, HEADER_NBYTES + BLOCK_NBYTES - 1, HEADER_NBYTES + BLOCK_NBYTES + 1]
)
def test_a_file_of_another_size_is_a_miss(
    store: FilesystemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, nbytes: int
) -> None:
    save(store, 1)
    path = file_of(tmp_path, 1)
    os.truncate(path, nbytes)
    assert load(store, 1) is None
    assert caplog.messages == [f"{path} is removed: it has {nbytes} bytes instead of {HEADER_NBYTES + BLOCK_NBYTES}"]
    assert all_files(tmp_path) == []


def test_a_torn_file_is_replaced_by_the_next_save(store: FilesystemStore, tmp_path: Path) -> None:
    save(store, 1)
    os.truncate(file_of(tmp_path, 1), 100)
    save(store, 1)
    assert load(store, 1) == content(1)


def test_a_file_of_another_block_is_a_miss(store: FilesystemStore, tmp_path: Path) -> None:
    save(store, 1)
    save(store, 2)
    os.replace(file_of(tmp_path, 1), file_of(tmp_path, 2))
    assert load(store, 2) is None


def test_a_hash_that_is_none_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="a block's hash has 32 bytes, got 3"):
        pack_header(NAMESPACE, b"abc", memoryview(b""))


@pytest.mark.parametrize("failing", ["writev", "fsync", "rename"])
def test_a_full_disk_keeps_nothing_and_says_so_once(
    store: FilesystemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, failing, fail)
        assert [save(store, number) for number in range(3)] == [SaveFailure.FULL] * 3
    assert caplog.messages == [f"blocks are not kept in {tmp_path}: No space left on device"]
    assert all_files(tmp_path) == []
    assert save(store, 1) is save(store, 1) is None
    assert load(store, 1) == content(1)


def test_writes_and_reads_may_come_in_parts(store: FilesystemStore) -> None:
    """As they do on some mounts, and from 2 GiB on everywhere."""
    writev, preadv = os.writev, os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "writev", lambda file, views: writev(file, [views[0][:50]]))
        patch.setattr(os, "preadv", lambda file, views, offset: preadv(file, [views[0][:70]], offset))
        save(store, 1)
        assert load(store, 1) == content(1)


def test_a_file_that_is_removed_while_it_is_read_is_read_to_its_end(store: FilesystemStore, tmp_path: Path) -> None:
    save(store, 1)
    preadv = os.preadv

    def read_the_removed(file: int, views: list[memoryview], offset: int) -> int:
        file_of(tmp_path, 1).unlink(missing_ok=True)
        return preadv(file, views, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", read_the_removed)
        assert load(store, 1) == content(1)
    assert load(store, 1) is None


def test_a_folder_that_cannot_be_used_is_a_miss(
    store: FilesystemStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file is in place of the namespace's folder, which not even root can look into."""
    (tmp_path / namespace_digest(NAMESPACE).hex()).write_text("")
    assert save(store, 1) is SaveFailure.UNAVAILABLE
    assert not has(store, 1)
    assert load(store, 1) is None
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3
    assert all("Not a directory" in message for message in caplog.messages)


@pytest.mark.parametrize("use", [load, save])
def test_use_renews_the_time_of_use(store: FilesystemStore, tmp_path: Path, use: object) -> None:
    assert callable(use)
    save(store, 1)
    path = file_of(tmp_path, 1)
    for age_s, is_renewed in ((RENEW_AFTER_S / 2, False), (2 * RENEW_AFTER_S, True)):
        then_s = time.time() - age_s
        os.utime(path, (then_s, then_s))
        use(store, 1)
        assert (path.stat().st_mtime > then_s + 1) == is_renewed


def test_threads_that_save_and_load_the_same_blocks(store: FilesystemStore) -> None:
    def work(number: int) -> bytes | None:
        save(store, number % 3)
        return load(store, number % 3)

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(work, range(60))) == [content(number % 3) for number in range(60)]


def test_processes_that_save_load_and_evict_the_same_blocks(tmp_path: Path) -> None:
    """None of them sees a block in part, and none stumbles over what another one has removed."""
    num_blocks = 40
    command = [sys.executable, "-m", "tests.fakes.store_process", str(tmp_path)]
    processes = [
        subprocess.Popen([*command, str(seed), str(num_blocks), "300"], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for seed in range(3)
    ]
    for process in processes:
        out, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")
        assert int(out) > 0
    paths = all_files(tmp_path)
    assert {path.suffix for path in paths} == {".kv"}, "nothing unfinished is left"
    assert len(paths) < 0.75 * num_blocks


def test_settings_open_the_store(tmp_path: Path) -> None:
    folder = tmp_path / "not" / "there"
    store = FilesystemConfig(shared_storage_path=str(folder), max_bytes="1MiB").open_store()
    save(store, 1)
    store.close()
    assert file_of(folder, 1).exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"shared_storage_path: .*/file cannot be made: File exists"):
        FilesystemConfig(shared_storage_path=str(tmp_path / "file")).open_store()


class TestMounts:
    """/proc is one on every Linux machine."""

    def test_which_one_a_folder_is_on(self, tmp_path: Path) -> None:
        assert mount_of(Path("/proc/sys/not/there")) == Path("/proc")
        (tmp_path / "link").symlink_to("/proc/sys")
        assert mount_of(tmp_path / "link") == Path("/proc")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "ismount", lambda path: path == Path("/"))
            assert mount_of(tmp_path) is None

    def test_a_folder_on_none_is_refused_and_not_made(self, tmp_path: Path) -> None:
        folder = tmp_path / "kv"
        config = FilesystemConfig(shared_storage_path=str(folder), require_mount=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "ismount", lambda path: path == Path("/"))
            with pytest.raises(ConfigError, match=f"shared_storage_path: {folder} is on no mount, and require_mount"):
                config.open_store()
        assert not folder.exists()

    def test_one_that_is_gone_is_not_written_below(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        folder, mounted = tmp_path / "kv", {tmp_path}
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os.path, "ismount", lambda path: path in mounted)
            store = FilesystemConfig(shared_storage_path=str(folder), require_mount=True).open_store()
            mounted.clear()
            assert [save(store, number) for number in range(2)] == [SaveFailure.UNAVAILABLE] * 2
            assert caplog.messages == [f"blocks are not kept in {folder}: {tmp_path} is not mounted any more"]
            assert all_files(tmp_path) == []
            assert not has(store, 0)
            mounted.add(tmp_path)
            assert save(store, 1) is None
            assert load(store, 1) == content(1)
