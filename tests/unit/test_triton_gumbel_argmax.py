"""Gumbel sampling: the kernel against noise and argmax in tensors, through the interpreter where there is no GPU."""

import pytest
import torch
from torch import Tensor

from server.kernels.gumbel_argmax import BLOCK_V, gumbel_argmax
from server.kernels.noise import Stream, gumbel, in_stream

KEYS = (0, 1, 2**63 - 1, 5, 2**40 + 3)
POSITIONS = (0, 2**31, 7, 100, 3)


def rows(device: str, temperature: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, positions and temperatures of five rows."""
    key, position = (torch.tensor(values, device=device) for values in (KEYS, POSITIONS))
    return key, position, torch.full((len(KEYS),), temperature, device=device)


def twin(logits: Tensor, key: Tensor, position: Tensor, temperature: Tensor, stream: Stream) -> Tensor:
    """As worker/sampler.py does it, but for rows of temperature 0."""
    positions = position[:, None] + torch.arange(logits.shape[1], device=logits.device)
    noise = gumbel(key[:, None].expand_as(positions), positions, stream, logits.shape[2])
    scores = logits.float() / temperature[:, None, None] + noise
    return torch.where(temperature[:, None] > 0, scores.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("stream", Stream)
@pytest.mark.parametrize("vocab_size", [1, 100, BLOCK_V, 3 * BLOCK_V + 5])
def test_without_logits_the_noise_alone_decides(kernel_device: str, vocab_size: int, stream: Stream) -> None:
    """A single wrong bit of the words would give other winners."""
    logits = torch.zeros(len(KEYS), 3, vocab_size, device=kernel_device)
    found, _ = gumbel_argmax(logits, *rows(kernel_device), stream)
    assert torch.equal(found, twin(logits, *rows(kernel_device), stream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_equal_the_twin(kernel_device: str, temperature: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 4 * torch.randn(len(KEYS), 4, 2000, generator=generator).to(kernel_device)
    logits = logits.to(dtype).transpose(0, 1).contiguous().transpose(0, 1)  # strides of its own
    logits[:, :, 100:300] = -torch.inf
    args = rows(kernel_device, temperature)
    assert torch.equal(gumbel_argmax(logits, *args, Stream.TARGET)[0], twin(logits, *args, Stream.TARGET))


def test_tokens_may_have_the_noise_of_others(kernel_device: str) -> None:
    """So a part of a vocabulary draws as the whole does, where only that part has a chance."""
    known = torch.randperm(1500, generator=torch.Generator().manual_seed(4))[:1100].to(kernel_device)
    whole = torch.full((len(KEYS), 1, 1500), -torch.inf, device=kernel_device)
    part = torch.randn(len(KEYS), 1, 1100, generator=torch.Generator().manual_seed(5)).to(kernel_device)
    whole[:, :, known] = part
    args = rows(kernel_device)
    found, _ = gumbel_argmax(part, *args, Stream.TARGET, known)
    assert torch.equal(known[found], gumbel_argmax(whole, *args, Stream.TARGET)[0])
    with pytest.raises(ValueError, match="noise_ids are an int64 for each of 1100 tokens"):
        gumbel_argmax(part, *args, Stream.TARGET, known[1:])


@pytest.mark.parametrize("stream", Stream)
def test_a_key_of_one_stream_serves_another(kernel_device: str, stream: Stream) -> None:
    logits = torch.zeros(len(KEYS), 2, 100, device=kernel_device)
    key, position, temperature = rows(kernel_device)
    found, _ = gumbel_argmax(logits, in_stream(key, stream, of=Stream.TARGET), position, temperature, Stream.TARGET)
    assert torch.equal(found, gumbel_argmax(logits, key, position, temperature, stream)[0])


def test_rows_of_temperature_0_are_greedy_beside_others(kernel_device: str) -> None:
    logits = torch.randn(len(KEYS), 2, 500, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    key, position, temperature = rows(kernel_device)
    temperature[1::2] = 0
    found, scores = gumbel_argmax(logits, key, position, temperature, Stream.TARGET)
    assert torch.equal(found, twin(logits, key, position, temperature, Stream.TARGET))
    assert torch.equal(found[1::2], logits[1::2].argmax(-1))
    assert torch.equal(scores[1::2], logits[1::2].amax(-1))


@pytest.mark.parametrize("vocab_size", [5, 4 * BLOCK_V])
def test_of_equal_logits_the_lowest_id_wins(kernel_device: str, vocab_size: int) -> None:
    logits = torch.zeros(len(KEYS), 1, vocab_size, device=kernel_device)
    logits[:, :, [vocab_size // 2, vocab_size - 2, vocab_size - 1]] = 3.0
    found, _ = gumbel_argmax(logits, *rows(kernel_device, 0.0), Stream.TARGET)
    assert found.tolist() == [[vocab_size // 2]] * len(KEYS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf])
def test_broken_rows_give_an_id_and_leave_the_others_alone(kernel_device: str, fill: float, temperature: float) -> None:
    vocab_size = BLOCK_V + 3
    logits = torch.randn(len(KEYS), 2, vocab_size, generator=torch.Generator().manual_seed(1)).to(kernel_device)
    args = rows(kernel_device, temperature)
    intact, scores = gumbel_argmax(logits, *args, Stream.TARGET)
    assert scores.isfinite().all()
    logits[1] = fill
    logits[2, 0, 40] = torch.nan
    found, scores = gumbel_argmax(logits, *args, Stream.TARGET)
    assert torch.equal(found[[0, 3, 4]], intact[[0, 3, 4]])
    assert found[1].tolist() == [0, 0]
    assert found[2, 0] == 40, "NaN counts as infinity, as in argmax"
    assert scores.isfinite().tolist() == [[True] * 2, [False] * 2, [False, True], [True] * 2, [True] * 2]


def test_no_positions(kernel_device: str) -> None:
    logits = torch.zeros(len(KEYS), 2, 10, device=kernel_device)
    args = (logits, *rows(kernel_device), int(Stream.TARGET))
    assert gumbel_argmax(logits[:, :0], *args[1:])[0].shape == (len(KEYS), 0)


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    logits = torch.zeros(len(KEYS), 2, 10, device=kernel_device)
    key, position, temperature = rows(kernel_device)
    with pytest.raises(ValueError, match="5 rows need"):
        gumbel_argmax(logits, key[1:], position, temperature, Stream.TARGET)
    with pytest.raises(ValueError, match="int64"):
        gumbel_argmax(logits, key.int(), position, temperature, Stream.TARGET)
    with pytest.raises(ValueError, match="not contiguous"):
        gumbel_argmax(logits.mT, key, position, temperature, Stream.TARGET)
