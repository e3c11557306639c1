"""EAGLE heads as compiled code: what their own code computes, in any batch. What cannot be used is left alone."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proposers.base import TargetModel
from proposers.checkpoint import read_checkpoint
from proposers.eagle_checkpoint import Kind, eagle_head
from proposers.eagle_compile import EagleOrder, compile_head
from proposers.eagle_compiled import order_of, use_compiled
from proposers.eagle_network import EagleNetwork
from server.errors import ModelError
from server.model.fusion import can_pack
from server.worker.kv_tensors import KVGeometry, allocate_kv
from tests.fakes.device import DEVICE
from tests.fakes.paged_steps import Piece, block_table, step_over
from tests.fakes.tiny_target import target_model
from tests.tiny_heads import VOCAB, build_tiny_eagle, build_tiny_eagle3
from tests.tiny_model import build_tiny_model

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="heads are compiled ahead of time on the CPU"),
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:.*isinstance.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning"),  # inductor's own imports
]

BLOCK = 16
SLOTS = 3


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not can_pack(torch.device("cpu")):
        pytest.skip("no C++ compiler")
    return build_tiny_model(tmp_path_factory.mktemp("target"))


def network_of(folder: Path, target: TargetModel, kind: Kind, kv_dtype: torch.dtype) -> EagleNetwork:
    network = EagleNetwork(
        eagle_head(read_checkpoint(str(folder)), target, kind), target, torch.device("cpu"), kv_dtype
    )
    give_kv(network)
    return network


def give_kv(network: EagleNetwork) -> None:
    shape = network.kv_shape
    geometry = KVGeometry(shape.num_layers, shape.num_kv_heads, shape.head_dim, BLOCK, shape.dtype)
    network.bind_kv(allocate_kv(geometry, 1 + 2 * SLOTS, torch.device("cpu")))


def outputs(network: EagleNetwork, pieces: list[list[Piece]]) -> dict[tuple[int, int], torch.Tensor]:
    """What the output projection takes, by slot and position, of steps over pieces of sequences."""
    generator = torch.Generator().manual_seed(6)
    ids = torch.randint(VOCAB, (SLOTS, 2 * BLOCK), generator=generator)
    features = torch.randn(SLOTS, 2 * BLOCK, network.num_features, generator=generator).to(network.target.dtype)
    table = block_table(SLOTS, 2)
    found: dict[tuple[int, int], torch.Tensor] = {}
    for step_pieces in pieces:
        step = step_over(step_pieces, table, BLOCK, first=1)
        slots = torch.tensor([slot for slot, _, count in step_pieces for _ in range(count)])
        hidden = network.condense(features[slots, step.positions])
        output = network.run.output(network.forward(ids[slots, step.positions], step.positions, step, hidden))
        found |= {(int(s), int(p)): row for s, p, row in zip(slots, step.positions, output, strict=True)}
    return found


TOGETHER: list[list[Piece]] = [[(0, 1, 20), (1, 1, 3), (2, 1, 25)], [(0, 21, 4), (1, 4, 5), (2, 26, 1)]]
APART: list[list[Piece]] = [[piece] for step in TOGETHER for piece in step]


@pytest.mark.full
@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "options", "dtype", "kv_dtype"),
    [
        ("eagle3", {"draft_vocab_size": 100, "options": {"fc_norm": True}}, torch.bfloat16, torch.bfloat16),
        ("eagle3", {"num_layers": 2, "options": {"norm_output": True}}, torch.float32, torch.float8_e4m3fn),
        ("eagle3", {"model_type": "qwen3", "options": {"norm_before_fc": True}}, torch.float32, torch.float32),
        ("eagle", {"has_bias": True}, torch.float32, torch.float32),
    ],
    ids=["a norm for each tap", "two layers, norm of output", "qwen3", "eagle"],
)
def test_compiled_code_computes_what_the_head_s_own_does(
    target_folder: Path, tmp_path: Path, kind: Kind, options: dict[str, Any], dtype: torch.dtype, kv_dtype: torch.dtype
) -> None:
    target = target_model(target_folder, "cpu", dtype)
    build = build_tiny_eagle3 if kind == "eagle3" else build_tiny_eagle
    head = build(tmp_path / "head", **options)
    network = network_of(head, target, kind, kv_dtype)
    expected = outputs(network, TOGETHER)
    packages = tmp_path / "packages"
    packages.mkdir()
    order = order_of(network, num_threads=torch.get_num_threads())
    with torch.inference_mode(mode=False):
        compile_head(EagleOrder.from_json(order.to_json()), packages)
    use_compiled(network, packages)
    assert network.run is not network.body
    found, apart = outputs(network, TOGETHER), outputs(network, APART)
    rtol = 2**-4 if dtype == torch.bfloat16 else 1e-3
    for place, row in expected.items():
        assert torch.equal(found[place], apart[place])
        torch.testing.assert_close(found[place], row, rtol=rtol, atol=rtol * float(row.abs().max()))
    give_kv(network)
    assert network.run is network.body  # compiled code has the old memory


def test_packages_that_cannot_be_loaded_leave_the_head_as_it_is(target_folder: Path, tmp_path: Path) -> None:
    target = target_model(target_folder, "cpu")
    network = network_of(build_tiny_eagle3(tmp_path / "head"), target, "eagle3", torch.float32)
    expected = outputs(network, TOGETHER)
    (tmp_path / "condense.pt2").write_bytes(b"none")
    with pytest.raises(ModelError, match="cannot be used, delete it to compile anew"):
        use_compiled(network, tmp_path)
    assert all(torch.equal(row, expected[place]) for place, row in outputs(network, TOGETHER).items())


def test_what_is_compiled_follows_from_the_head_and_not_from_its_weights(target_folder: Path, tmp_path: Path) -> None:
    target = target_model(target_folder, "cpu")

    def digest(name: str, **options: Any) -> str:
        head = build_tiny_eagle3(tmp_path / name, **options)
        return order_of(network_of(head, target, "eagle3", torch.float32), num_threads=1).digest

    plain = digest("plain")
    assert digest("other weights", seed=1) == plain
    assert digest("two layers", num_layers=2) != plain
    assert digest("norms", options={"fc_norm": True}) != plain
