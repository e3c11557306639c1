"""A connector as another distribution would bring it: known to nobody but by module:Class."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from connectors.store import BlockStore
from connectors.store_config import StoreConfig


class PlainFilesConfig(StoreConfig):
    """Settings of blocks in files without a header."""

    folder: str = Field(min_length=1, description="where the files are")

    def open_store(self) -> BlockStore:
        """In that folder."""
        return PlainFiles(Path(self.folder))


class PlainFiles:
    """A file for each block, believed as it is; implements connectors.store.BlockStore."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """Each block brings its size."""

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """Until the first without a file."""
        missing = (i for i, block_hash in enumerate(hashes) if not self._path(namespace, block_hash).exists())
        return next(missing, len(hashes))

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """All of the file."""
        try:
            data = self._path(namespace, block_hash).read_bytes()
        except OSError:
            return False
        if len(data) != into.nbytes:
            return False
        into.cast("B")[:] = data
        return True

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> None:
        """One file."""
        self._path(namespace, block_hash).write_bytes(data)

    def close(self) -> None:
        """Nothing is open."""

    def _path(self, namespace: str, block_hash: bytes) -> Path:
        return self._folder / f"{namespace}-{block_hash.hex()}"
