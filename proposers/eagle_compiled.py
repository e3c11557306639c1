"""Runs an EAGLE head as compiled code, which is compared with its own first."""

from pathlib import Path

from torch import Tensor

from proposers.eagle_body import EagleBody
from proposers.eagle_check import check_body
from proposers.eagle_compile import PARTS, STEP_FIELDS, EagleOrder, tensors_of
from proposers.eagle_network import EagleNetwork
from server.errors import ModelError
from server.kernels import cpu_layers
from server.kernels.cpu_layers import LayerRunner
from server.model.attention import AttentionStep
from server.model.cache import cache_root
from server.model.decoder_layers import layer_tensors


def order_of(network: EagleNetwork, num_threads: int) -> EagleOrder:
    """What is to be compiled for a network whose KV is bound."""
    shape, head, target = network.kv_shape, network.head, network.target
    return EagleOrder(
        head_folder=str(head.folder),
        kind=head.kind,
        target_folder=str(target.folder),
        tensors=tensors_of(network.body),
        dtype=str(target.dtype).removeprefix("torch."),
        kv_dtype=str(shape.dtype).removeprefix("torch."),
        block_size=target.block_size,
        num_threads=num_threads,
        trusts_code=target.trusts_code,
    )


def use_compiled(network: EagleNetwork, folder: Path) -> None:
    """Let a network run the packages in a folder, until it gets other memory for K and V.

    Called between steps. Writes to block 0 of its KV, which belongs to nobody.

    Raises: ModelError if they compute something else than the head's own code, or cannot be loaded; the network is then
        as it was.
    """
    try:
        cpu_layers.load(cache_root() / "kernels")
        compiled = _CompiledBody(network.body, folder)
        check_body(network.body, compiled, network.num_features)
    except Exception as error:  # whatever torch, the compiler or the files' contents lead to
        raise ModelError(f"the draft head in {folder} cannot be used, delete it to compile anew: {error}") from error
    network.run = compiled


class _CompiledBody:
    """Takes the place of a body; used from the step thread only."""

    def __init__(self, body: EagleBody, folder: Path) -> None:
        own = list(layer_tensors(body).values())
        self._condense, self._forward, self._output = (LayerRunner([folder / f"{part}.pt2"], [own]) for part in PARTS)

    def __call__(self, hidden: Tensor, token_ids: Tensor, step: AttentionStep) -> Tensor:
        return self._forward.run(0, 1, hidden, [token_ids, *(getattr(step, name) for name in STEP_FIELDS)])

    def condense(self, features: Tensor) -> Tensor:
        return self._condense.run(0, 1, features, [])

    def output(self, hidden: Tensor) -> Tensor:
        return self._output.run(0, 1, hidden, [])
