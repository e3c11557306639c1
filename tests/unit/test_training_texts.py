"""Generated texts: shards, rows, the tokens that are frequent in them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from proposers.training.packing import PADDING, pack
from proposers.training.repetition import repeated_share
from proposers.training.texts import Text, read_shard, read_texts, shard_path, write_shard
from proposers.training.vocabulary import draft_ids, frequent_tokens
from server.errors import ConfigError
from tests.fakes.training import random_texts


def text(*token_ids: int, num_prompt: int = 1, split: str = "train") -> Text:
    return Text(np.array(token_ids, np.int32), num_prompt, "code", split, 0.8)


def test_shards_come_back(tmp_path: Path) -> None:
    texts = [*random_texts((9, 4, 30)), text(5, 6)]
    path = shard_path(tmp_path, "train", 3)
    write_shard(path, texts)
    found = list(read_shard(path))
    assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in texts]
    assert [(each.num_prompt, each.kind, each.split, each.temperature) for each in found[-2:]] == [
        (3, "chat", "train", 0.0),
        (1, "code", "train", 0.8),
    ]
    assert list(tmp_path.iterdir()) == [path]


def test_texts_are_chosen_by_split(tmp_path: Path) -> None:
    write_shard(shard_path(tmp_path, "train", 0), [text(1, 2)])
    write_shard(shard_path(tmp_path, "heldout", 0), [text(3, 4, split="heldout")])
    assert [each.token_ids.tolist() for each in read_texts(tmp_path, ["heldout"])] == [[3, 4]]
    with pytest.raises(ConfigError, match="run the stage generate first"):
        read_texts(tmp_path, ["handwritten"])


def test_a_broken_shard_is_named(tmp_path: Path) -> None:
    path = shard_path(tmp_path, "train", 0)
    path.write_bytes(b"PK")
    with pytest.raises(ConfigError, match=path.name):
        read_texts(tmp_path, ["train"])


def test_every_text_lies_in_one_row() -> None:
    texts = random_texts((40, 7, 23, 31, 12, 55, 9, 3 + 1))
    rows, places = pack(texts, 48)
    assert rows.num_rows == 4
    assert sorted(place.text for place in places) == list(range(len(texts)))
    covered = torch.zeros_like(rows.documents, dtype=torch.bool)
    for place in places:
        expected = texts[place.text].token_ids[:48]
        here = slice(place.column, place.column + len(expected))
        assert rows.token_ids[place.row, here].tolist() == expected.tolist()
        assert rows.positions[place.row, here].tolist() == list(range(len(expected)))
        assert len(rows.documents[place.row, here].unique()) == 1
        foretold = rows.is_output[place.row, here].nonzero()[:, 0].tolist()
        assert foretold == list(range(2, len(expected) - 1)), "behind these the target wrote"
        assert not covered[place.row, here].any()
        covered[place.row, here] = True
    assert (rows.documents[~covered] == PADDING).all()
    assert not rows.is_output[~covered].any()


def test_a_prompt_that_fills_a_row_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not fit into rows of 16"):
        pack(random_texts((30,), num_prompt=16), 16)


def test_the_vocabulary_begins_with_what_the_target_writes_most() -> None:
    texts = [text(9, 9, 9, 9, 4, 4, 7, num_prompt=3), text(1, 5, 4, 7)]
    assert frequent_tokens(texts, 12, 4).tolist() == [4, 7, 5, 9], "by frequency, then by id; prompts do not count"
    assert frequent_tokens(texts, 12, 2).tolist() == [4, 7]
    assert len(frequent_tokens(texts, 12, 50)) == 12
    assert draft_ids(torch.tensor([4, 7]), 8).tolist() == [-1, -1, -1, -1, 0, -1, -1, 1]


def test_repetition_is_a_share_of_8_grams() -> None:
    assert repeated_share(list(range(30))) == 0
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([*range(8), *range(8)]) == pytest.approx(1 / 9)
    assert repeated_share([5] * 107) == pytest.approx(0.99)
