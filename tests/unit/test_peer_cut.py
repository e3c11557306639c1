"""Blocks of one size made from blocks of another."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from connectors.peer.cut import Cut

LAYERS, HEADS, WIDTH = 2, 3, 4
SIZES = st.integers(1, 24)


def blocks_of(tokens: Tensor, size: int) -> Tensor:
    """[n, layers, heads, size, width] of [layers, heads, n * size, width]."""
    return torch.stack(tokens.split(size, dim=2))


@given(their_size=SIZES, our_size=SIZES, first=st.integers(0, 5), count=st.integers(1, 5), extra=st.integers(0, 9))
def test_what_is_cut_is_what_was_there(their_size: int, our_size: int, first: int, count: int, extra: int) -> None:
    num_tokens = their_size * our_size * 20
    tokens = torch.arange(LAYERS * HEADS * num_tokens * WIDTH).reshape(LAYERS, HEADS, num_tokens, WIDTH)
    theirs, ours = blocks_of(tokens, their_size), blocks_of(tokens, our_size)
    wanted = Cut(their_size, our_size, first, count)
    cut = wanted.fitting(Cut.least(their_size, our_size) + extra)
    assert 1 <= cut.num_blocks <= count
    assert cut.count <= Cut.least(their_size, our_size) + extra
    found = cut.cut(theirs[cut.first : cut.first + cut.count])
    assert found.is_contiguous()
    assert torch.equal(found, ours[first : first + cut.num_blocks])


@given(their_size=SIZES, our_size=SIZES, first=st.integers(0, 5), count=st.integers(1, 5), data=st.data())
def test_a_block_spoils_those_that_have_tokens_of_it(
    their_size: int, our_size: int, first: int, count: int, data: st.DataObject
) -> None:
    cut = Cut(their_size, our_size, first, count)
    place = data.draw(st.integers(0, cut.count - 1))
    spoilt = set(range((cut.first + place) * their_size, (cut.first + place + 1) * their_size))
    expected = {
        index
        for index in range(count)
        if spoilt & set(range((first + index) * our_size, (first + index + 1) * our_size))
    }
    assert cut.cut_from([place]) == expected
