"""Temperature, min-p, top-k and top-p: the kernel against its eager twin, interpreted where there is no GPU."""

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from server.kernels.truncate import BLOCK_G, LANES, MEMBERS, truncate
from tests.fakes.truncation import check_truncated

PART = LANES * MEMBERS
Row = tuple[float, float, int, float]
"""Temperature, min-p, top-k and top-p."""
NEUTRAL: Row = (1.0, 0.0, 0, 1.0)


def columns_of(rows: Sequence[Row], device: str) -> tuple[Tensor, ...]:
    """The kernel's arguments but for the logits: rows in reversed slots, with others around them."""
    values = [NEUTRAL, *reversed(rows), (0.5, 0.5, 1, 0.5)]
    slots = torch.arange(len(rows), 0, -1, device=device)
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32)
    return slots, *(torch.tensor([r[i] for r in values], dtype=t, device=device) for i, t in enumerate(dtypes))


def logits_of(num_rows: int, num_positions: int, vocab_size: int, device: str, *, scale: float = 3.0) -> Tensor:
    """Peaked, as a model's are, and with strides of their own."""
    generator = torch.Generator().manual_seed(vocab_size)
    logits = scale * torch.randn(num_positions, num_rows, vocab_size, generator=generator)
    return logits.to(device).transpose(0, 1)


def check(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """Compare with the twin. Returns: number of tokens kept, [M, Q]."""
    columns, found = columns_of(rows, str(logits.device)), logits.clone()
    truncate(found, *columns)
    return check_truncated(found, logits, *columns)


ROWS: list[Row] = [
    NEUTRAL,
    (0.7, 0.0, 0, 1.0),
    *[(0.7, 0.0, k, 1.0) for k in (1, 2, 50, 1000, 10**6, 2**62)],
    *[(0.9, 0.0, 0, p) for p in (1e-9, 0.3, 0.9, 0.95, 0.999)],
    *[(1.0, m, 0, 1.0) for m in (1e-9, 0.05, 0.5, 1.0)],
    (1.3, 0.02, 40, 0.9),
    (1.0, 0.3, 4, 0.99),
    (2.0, 0.001, 0, 0.8),
    (1.0, 0.0, 300, 0.97),
    (5.0, 0.0, 0, 0.9),
]


@pytest.mark.parametrize("vocab_size", [1, 12, 1000, PART, 2 * PART + 5])
def test_every_parameter_keeps_what_the_twin_keeps(kernel_device: str, vocab_size: int) -> None:
    kept = check(logits_of(len(ROWS), 1, vocab_size, kernel_device), ROWS)
    assert (kept >= 1).all()
    assert kept[0] == kept[1] == vocab_size


@pytest.mark.parametrize("row", [(0.8, 0.0, 20, 1.0), (0.8, 0.0, 0, 0.9), (0.8, 0.1, 0, 0.9), (0.8, 0.05, 20, 0.9)])
def test_every_position_of_a_row_is_cut_by_its_own_values(kernel_device: str, row: Row) -> None:
    assert (check(logits_of(2, 3, 700, kernel_device), [row, NEUTRAL])[1] == 700).all()


@pytest.mark.parametrize("levels", [1, 2, 5, 40])
def test_ties_are_kept(kernel_device: str, levels: int) -> None:
    """Few different values, both zeros among them."""
    generator = torch.Generator().manual_seed(levels)
    rows: list[Row] = [(1.0, 0.0, k, p) for k, p in itertools.product((0, 7, 300), (0.6, 1.0))]
    level = torch.randint(levels, (len(rows), 1, PART + 9), generator=generator) - levels // 2
    logits = level.float() / 4
    logits[:, :, ::3] *= -1  # minus zero
    check(logits.to(kernel_device), rows)


@pytest.mark.parametrize("num_likely", [BLOCK_G - 1, 3 * BLOCK_G, BLOCK_G * MEMBERS + 100])
def test_likely_tokens_of_more_groups_than_registers_hold(kernel_device: str, num_likely: int) -> None:
    """Spread over the groups, and many of them needed: as many as fit by themselves, and more."""
    logits = logits_of(4, 1, 4 * PART, kernel_device, scale=0.5).clone()
    likely = torch.randperm(4 * PART, generator=torch.Generator().manual_seed(1))[:num_likely].to(kernel_device)
    logits[:, :, likely] += 12
    rows = [(1.0, 0.0, num_likely - 5, 1.0), (1.0, 0.0, 0, 0.97), (1.0, 1e-4, 0, 0.97), (1.0, 0.0, num_likely, 0.9)]
    kept = check(logits, rows)
    assert (kept > num_likely // 2).all()
    assert (kept <= num_likely).all()


def test_likely_tokens_that_share_a_group(kernel_device: str) -> None:
    """A group's mass tells more than its largest value does."""
    logits = torch.full((3, 1, PART), -5.0, device=kernel_device)
    logits[:, :, 5::LANES] = torch.linspace(3, 4, MEMBERS, device=kernel_device)
    assert (check(logits, [(1.0, 0.0, 0, 0.95), (1.0, 0.0, 9, 1.0), (1.0, 0.0, 0, 0.5)]) < MEMBERS).all()


@pytest.mark.parametrize("temperature", [1e-4, 1e38])
def test_extreme_temperatures(kernel_device: str, temperature: float) -> None:
    """Quotients that are huge, and quotients that are denormal or tie."""
    rows: list[Row] = [(temperature, 0.0, 5, 1.0), (temperature, 0.0, 0, 0.5), (temperature, 0.5, 3, 0.5)]
    check(logits_of(3, 1, 500, kernel_device), rows)


def test_tokens_that_are_ruled_out_stay_so(kernel_device: str) -> None:
    """More asked for than there are."""
    logits = logits_of(3, 1, 1000, kernel_device)
    logits[:, :, 3:] = -torch.inf
    assert (check(logits, [(1.0, 0.0, 7, 1.0), (1.0, 0.0, 7, 0.999999), (1.0, 0.0, 0, 0.999999)]) <= 3).all()


@pytest.mark.parametrize("fill", [torch.nan, -torch.inf, torch.inf])
def test_broken_rows_show_and_leave_the_others_alone(kernel_device: str, fill: float) -> None:
    rows: list[Row] = [(0.7, 0.1, 9, 0.9), (0.7, 0.0, 0, 0.9), (0.7, 0.0, 9, 1.0), (0.7, 0.1, 0, 1.0)]
    rows = [*rows, *rows]
    logits = logits_of(len(rows), 1, 1000, kernel_device)
    columns, intact = columns_of(rows, kernel_device), logits.clone()
    truncate(intact, *columns)
    logits[:2], logits[2:4, :, 77] = fill, fill
    truncate(logits, *columns)
    assert torch.equal(logits[4:], intact[4:])
    filled = torch.full_like(logits[:2], fill)
    assert torch.equal(logits[:2].nan_to_num(7.0), filled.nan_to_num(7.0))
    assert torch.equal(logits[2:4, 0, 77].nan_to_num(7.0), filled[:, 0, 0].nan_to_num(7.0))


def test_greedy_and_neutral_rows_are_left_alone(kernel_device: str) -> None:
    rows: list[Row] = [(0.0, 0.5, 3, 0.5), NEUTRAL, (0.0, 0.0, 0, 1.0)]
    logits = logits_of(3, 2, 300, kernel_device)
    before = logits.clone()
    truncate(logits, *columns_of(rows, kernel_device))
    assert torch.equal(logits, before)


def test_a_row_does_not_depend_on_its_batch(kernel_device: str) -> None:
    rows: list[Row] = [(0.9, 0.0, 0, 0.9), (0.9, 0.01, 0, 0.9), (0.9, 0.0, 60, 0.9)]
    logits = logits_of(3, 1, 2000, kernel_device)
    together = logits.clone()
    truncate(together, *columns_of(rows, kernel_device))
    for i, row in enumerate(rows):
        alone = logits[i : i + 1].clone()
        truncate(alone, *columns_of([row], kernel_device))
        assert torch.equal(alone[0], together[i])


def test_no_positions(kernel_device: str) -> None:
    columns = columns_of([(0.7, 0.1, 9, 0.9)], kernel_device)
    logits = logits_of(1, 2, 100, kernel_device)
    truncate(logits[:, :0], *columns)


def test_what_does_not_fit_is_refused(kernel_device: str) -> None:
    slots, *columns = columns_of([NEUTRAL] * 2, kernel_device)
    logits = logits_of(2, 3, 10, kernel_device)
    with pytest.raises(ValueError, match="2 rows need"):
        truncate(logits, slots[:1], *columns)
    with pytest.raises(ValueError, match="int64"):
        truncate(logits, slots.int(), *columns)
    with pytest.raises(ValueError, match="float32"):
        truncate(logits.bfloat16(), slots, *columns)
    with pytest.raises(ValueError, match="not contiguous"):
        truncate(logits.mT.contiguous().mT, slots, *columns)
