"""A store that fails as stores do in the world, at given rates, to see what becomes of those who rely on it."""

import random
import threading
from collections.abc import Sequence

from pydantic import Field, ValidationInfo, field_validator

from connectors.choice import ConnectorChoice, read_choice
from connectors.config import Way
from connectors.save_failure import SaveFailure
from connectors.store import BlockStore
from connectors.store_config import StoreConfig
from server.config_values import path_of


class FaultConfig(StoreConfig):
    """Settings of failures, and of the store that has them."""

    store: ConnectorChoice = Field(description="the connector that has the blocks")
    load_failure_rate: float = Field(default=0.0, ge=0, le=1, description="share of blocks that are not loaded")
    find_failure_rate: float = Field(default=0.0, ge=0, le=1, description="share of look-ups that find too little")
    save_failure_rate: float = Field(default=0.0, ge=0, le=1, description="share of blocks that are not kept")
    max_delay_seconds: float = Field(default=0.0, ge=0, le=3600, description="most that an operation takes longer")
    seed: int = Field(default=0, ge=0, description="operations in the same order fail in the same way")

    @field_validator("store", mode="before")
    @classmethod
    def _read_store(cls, value: object, info: ValidationInfo) -> ConnectorChoice:
        choice = read_choice(value, f"{path_of(info)}store.")
        if not isinstance(choice.settings, StoreConfig):
            raise ValueError("must name a connector with a store, such as filesystem or memory")
        if choice.settings.layerwise:
            raise ValueError("must have layerwise beside it, not in its own settings")
        return choice

    def carriers(self, name: str, way: Way) -> frozenset[str]:
        """This one, if the store is one that others see."""
        return frozenset({name}) if self.store.carriers(way) else frozenset()

    def open_store(self) -> BlockStore:
        """The store, with failures."""
        assert isinstance(self.store.settings, StoreConfig)
        return FaultStore(self.store.settings.open_store(), self)


class FaultStore:
    """Another store with failures and delays; implements connectors.store.BlockStore.

    Nothing that it says to be right is wrong: as with a torn read, a failed load leaves other bytes than were asked
    for in the buffer, and says so.
    """

    def __init__(self, store: BlockStore, config: FaultConfig) -> None:
        """Args: store: closed with this one."""
        self._store = store
        self._config = config
        self._random = random.Random(config.seed)
        self._lock = threading.Lock()
        self._closing = threading.Event()

    def expect(self, namespace: str, block_nbytes: int) -> None:
        """Never fails."""
        self._store.expect(namespace, block_nbytes)

    def find(self, namespace: str, hashes: Sequence[bytes]) -> int:
        """Of what is there, a part at random if it fails."""
        count = self._store.find(namespace, hashes)
        return int(count * self._draw()) if self._fails(self._config.find_failure_rate) else count

    def load(self, namespace: str, block_hash: bytes, into: memoryview) -> bool:
        """Half of the block inverted, if it fails."""
        is_loaded = self._store.load(namespace, block_hash, into)
        if not self._fails(self._config.load_failure_rate):
            return is_loaded
        half = into.cast("B")[: (into.nbytes + 1) // 2]
        half[:] = bytes(half).translate(_INVERTED)
        return False

    def save(self, namespace: str, block_hash: bytes, data: memoryview) -> SaveFailure | None:
        """Nothing, if it fails."""
        if self._fails(self._config.save_failure_rate):
            return SaveFailure.UNAVAILABLE
        return self._store.save(namespace, block_hash, data)

    def close(self) -> None:
        """Ends delays, too."""
        self._closing.set()
        self._store.close()

    def _fails(self, rate: float) -> bool:
        """Whether an operation fails; returns after its delay."""
        fails, delay_s = self._draw() < rate, self._draw() * self._config.max_delay_seconds
        if delay_s:
            self._closing.wait(delay_s)
        return fails

    def _draw(self) -> float:
        """From [0, 1)."""
        with self._lock:
            return self._random.random()


_INVERTED = bytes(byte ^ 0xFF for byte in range(256))
