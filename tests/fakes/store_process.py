"""A process that uses a folder of blocks as others do at the same time: FOLDER SEED NUM_BLOCKS NUM_OPERATIONS.

Prints how many blocks it loaded; fails if one was not what it should be.
"""

import random
import sys
from pathlib import Path

from connectors.filesystem import FilesystemStore
from tests.fakes.store_blocks import BLOCK_NBYTES, content, load, save


def main(folder: str, seed: int, num_blocks: int, num_operations: int) -> None:
    """Save and load blocks at random, in a folder that has room for a half of them."""
    store = FilesystemStore(Path(folder), num_blocks * BLOCK_NBYTES // 2)
    choose = random.Random(seed)
    num_loaded = 0
    for _ in range(num_operations):
        number = choose.randrange(num_blocks)
        if choose.random() < 0.5:
            save(store, number)
        elif (found := load(store, number)) is not None:
            assert found == content(number)
            num_loaded += 1
    print(num_loaded)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
