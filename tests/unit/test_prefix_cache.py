"""Names of blocks: the same everywhere, different for whatever makes KV different."""

import os
import subprocess
import sys
from pathlib import Path

from server.kv.block_pool import BlockPool
from server.kv.prefix_cache import BlockHashes, block_hash, longest_hit, root_hash

SCRIPT = """
from server.kv.prefix_cache import BlockHashes, root_hash
print([h.hex() for h in BlockHashes(root_hash(b"model", "salt"), 2).up_to([1, 2, 3, 4, 2**32 - 1, 0], 3)])
"""


def test_every_process_finds_the_same_names() -> None:
    outputs = {
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = [digest.hex() for digest in BlockHashes(root_hash(b"model", "salt"), 2).up_to([1, 2, 3, 4, 2**32 - 1, 0], 3)]
    assert outputs == {f"{here}\n"}


def test_the_encoding_never_changes() -> None:
    """Other processes and what lies on disk depend on it."""
    root = root_hash(b"model", "salt")
    assert root.hex() == "da4076d620d0804f663218159613e43f9fd6d1f0904a0ba906150d83711be4a8"
    assert block_hash(root, [1, 2]).hex() == "c7f8e4b245b6877b2c1c200448acdc009b6e04cab812fa25b079b0338717fc26"


def test_roots_differ_by_model_and_salt() -> None:
    pairs = [(b"", ""), (b"a", ""), (b"", "a"), (b"ab", "c"), (b"a", "bc"), (b"a", "b"), (b"a", "é")]
    assert len({root_hash(*pair) for pair in pairs}) == len(pairs)


def test_names_depend_on_all_tokens_before() -> None:
    root = root_hash(b"model", "")
    first = BlockHashes(root, 2).up_to([1, 2, 3, 4], 2)
    second = BlockHashes(root, 2).up_to([0, 2, 3, 4], 2)
    assert not set(first) & set(second)
    assert block_hash(root, [1, 256]) != block_hash(root, [256, 1])


def test_a_chain_grows_with_its_tokens() -> None:
    root = root_hash(b"model", "")
    hashes, tokens = BlockHashes(root, 2), [1, 2, 3]
    assert len(hashes.up_to(tokens, 1)) == 1
    tokens += [4, 5]
    assert hashes.up_to(tokens, 2) == [block_hash(root, [1, 2]), block_hash(block_hash(root, [1, 2]), [3, 4])]
    assert hashes.up_to(tokens, 1) == [block_hash(root, [1, 2])]
    assert hashes.up_to(tokens, 0) == []


def test_a_hit_ends_at_the_first_missing_block() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.publish(blocks[0], b"0")
    pool.publish(blocks[2], b"2")
    assert longest_hit(pool, [b"0", b"1", b"2"]) == blocks[:1]
    assert longest_hit(pool, [b"1", b"2"]) == []
    pool.publish(blocks[1], b"1")
    assert longest_hit(pool, [b"0", b"1", b"2"]) == blocks
