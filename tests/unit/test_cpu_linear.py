"""The C++ linear layer against torch's, and against itself in other company."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from server.kernels import cpu_linear
from server.model.cache import cache_root

TOLERANCES = {
    # Sums of up to 1,000 products of size 1, in another order than torch's.
    torch.float32: (1e-5, 1e-4),
    # Rounded once to 8 bits; a sum that is off in float32 may be rounded to the neighbour.
    torch.bfloat16: (2**-7, 1e-3),
}
"""Relative and absolute."""

DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCES), ids=["float32", "bfloat16"])


@pytest.fixture(scope="module", autouse=True)
def _operators() -> None:
    if not cpu_linear.load(cache_root() / "kernels"):
        pytest.skip("no C++ compiler")


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def _random(*shape: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


@DTYPES
@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(960, 576), (1000, 576), (63, 64), (65, 2), (1, 1000), (4096, 128)]
)
@pytest.mark.parametrize("has_bias", [False, True])
def test_equals_torch(num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype) -> None:
    weight = _random(num_outputs, num_inputs, dtype=dtype)
    bias = _random(num_outputs, dtype=dtype) if has_bias else None
    packed = cpu_linear.pack(weight)
    rtol, atol = TOLERANCES[dtype]
    for count in (0, 1, 2, 5, 6, 7, 16, 193, 400):
        inputs = _random(count, num_inputs, dtype=dtype)
        expected = torch.nn.functional.linear(
            inputs.float(), weight.float(), None if bias is None else bias.float()
        ).to(dtype)
        found = cpu_linear.linear(inputs, packed, bias, num_outputs)
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.usefixtures("_threads")
def test_a_row_has_the_same_bits_in_any_company(dtype: torch.dtype) -> None:
    packed = cpu_linear.pack(_random(1000, 576, dtype=dtype))
    inputs = _random(400, 576, dtype=dtype)
    expected = cpu_linear.linear(inputs, packed, None, 1000)
    for first, count in ((0, 1), (3, 1), (399, 1), (5, 2), (7, 5), (1, 6), (100, 7), (11, 191), (50, 300)):
        found = cpu_linear.linear(inputs[first : first + count], packed, None, 1000)
        assert torch.equal(found, expected[first : first + count])


@DTYPES
def test_rows_may_lie_apart(dtype: torch.dtype) -> None:
    packed = cpu_linear.pack(_random(70, 32, dtype=dtype))
    wide = _random(9, 96, dtype=dtype)
    found = cpu_linear.linear(wide[:, 32:64], packed, None, 70)
    assert torch.equal(found, cpu_linear.linear(wide[:, 32:64].contiguous(), packed, None, 70))


@DTYPES
def test_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    packed = cpu_linear.pack(_random(70, 32, dtype=dtype))
    inputs = _random(8, 32, dtype=dtype)
    inputs[3, 5] = torch.nan
    found = cpu_linear.linear(inputs, packed, None, 70)
    assert found[3].isnan().all()
    assert not found[[0, 1, 2, 4, 5, 6, 7]].isnan().any()


def test_what_does_not_fit_is_refused() -> None:
    weight = _random(8, 6, dtype=torch.float32)
    packed, inputs = cpu_linear.pack(weight), _random(2, 6, dtype=torch.float32)
    with pytest.raises(RuntimeError, match="odd number"):
        cpu_linear.pack(_random(8, 5, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="float32 or bfloat16"):
        cpu_linear.pack(weight.half())
    with pytest.raises(RuntimeError, match="does not hold 80 x 6 weights"):
        cpu_linear.linear(inputs, packed, None, 80)
    with pytest.raises(RuntimeError, match="of input's type"):
        cpu_linear.linear(inputs.bfloat16(), packed, None, 8)
    with pytest.raises(RuntimeError, match="bias must be"):
        cpu_linear.linear(inputs, packed, torch.zeros(7), 8)
    with pytest.raises(RuntimeError, match=r"input must be \[rows, in\]"):
        cpu_linear.linear(inputs[None], packed, None, 8)
