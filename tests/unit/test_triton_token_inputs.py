"""Looking tokens up in the batch state against its twin; interpreted where there is no GPU."""

import pytest
import torch

from server.kernels import reference
from server.kernels.token_inputs import BLOCK, look_up_tokens

BLOCK_SIZE = 4
WIDTH = 24
NUM_SLOTS = 5


@pytest.mark.parametrize("num_tokens", [1, 7, BLOCK, BLOCK + 3])
def test_tokens_are_those_of_the_twin(kernel_device: str, num_tokens: int) -> None:
    """Known tokens, drafts and padding, whose offset may be anything."""
    generator = torch.Generator().manual_seed(num_tokens)

    def integers(high: int, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator, dtype=dtype).to(kernel_device)

    offsets = integers(8, num_tokens)
    offsets[::3] = 1 << 40
    num_known, num_drafts = 5 + integers(12, NUM_SLOTS), integers(4, NUM_SLOTS)
    arguments = (
        integers(NUM_SLOTS, num_tokens),
        offsets,
        num_known - 1 - integers(4, NUM_SLOTS),
        num_known,
        num_drafts,
        integers(1000, NUM_SLOTS, WIDTH, dtype=torch.int32),
        1 + integers(99, NUM_SLOTS, WIDTH // BLOCK_SIZE, dtype=torch.int32),
        BLOCK_SIZE,
    )
    expected = reference.look_up_tokens(*arguments)
    found = look_up_tokens(*arguments)
    assert not expected.is_real.all()
    for name, tensor in expected._asdict().items():
        assert getattr(found, name).dtype == tensor.dtype, name
        assert torch.equal(getattr(found, name), tensor), name
