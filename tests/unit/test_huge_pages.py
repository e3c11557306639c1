"""Memory in huge pages is memory like any other."""

import gc

import torch

from server.kernels.huge_pages import ALIGNMENT_NBYTES, CHUNK_NBYTES, Arena, zeros


def test_zeros_of_any_shape() -> None:
    for shape, dtype in (((3, 5), torch.bfloat16), ((0, 4), torch.float32), ((1 << 20,), torch.int64)):
        tensor = zeros(shape, dtype)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
        assert tensor.is_contiguous()
        assert not tensor.any()
        tensor.fill_(7)
        assert (tensor == 7).all()


def test_an_arena_keeps_its_pieces_apart() -> None:
    arena = Arena()
    originals = [torch.randn(size).bfloat16() for size in (1, 33, 1000, CHUNK_NBYTES // 4, CHUNK_NBYTES, 5)]
    copies = [arena.copy(original) for original in originals]
    del arena
    gc.collect()
    for original, copy in zip(originals, copies, strict=True):
        assert copy.data_ptr() % ALIGNMENT_NBYTES == 0
        assert torch.equal(copy, original)


def test_a_copy_of_a_strided_tensor_is_contiguous() -> None:
    original = torch.arange(12.0).view(3, 4).T
    copy = Arena().copy(original)
    assert copy.is_contiguous()
    assert torch.equal(copy, original)
