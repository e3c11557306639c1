"""Compiles what an EAGLE head computes, in a process of its own, as layer_compile does a model's layers.

`python -m proposers.eagle_compile ORDER FOLDER`, with an EagleOrder as JSON. Of the head it reads the configuration and
the names of its tensors; the packages hold no weights.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoConfig

from proposers.base import TargetOutline
from proposers.checkpoint import read_checkpoint
from proposers.eagle_body import EagleBody, empty_layers
from proposers.eagle_checkpoint import EagleHead, Kind, eagle_head
from server.kernels.cpu_build import cpu_features
from server.model import compile_process
from server.model.attention import CPU_ATTENTION_NAME, AttentionStep, bind_kv
from server.model.decoder_layers import layer_tensors
from server.model.fusion import pack_linears
from server.model.package import NUM_TOKENS, compile_package

_SOURCES = tuple(
    Path(__file__).with_name(name)
    for name in ("decoder_kinds.py", "eagle_body.py", "eagle_compile.py", "eagle_layers.py")
)
STEP_FIELDS = (
    "write_blocks",
    "write_offsets",
    "positions",
    "first_token",
    "num_query",
    "slots",
    "block_table",
    "starts",
)
"""In the order in which compiled code takes them."""
PARTS = ("condense", "forward", "output")
"""Of EagleBody, a package each."""
NUM_ROWS, NUM_SLOTS, NUM_BLOCKS = 7, 13, 5
"""Further sizes of the example call; see NUM_TOKENS."""


@dataclass(frozen=True, slots=True)
class EagleOrder:
    """What is to be compiled; implements compilation.Order.

    Attributes:
        head_folder, target_folder: have a config.json each. tensors: names and shapes of the body's own.
        dtype: of weights and activations. kv_dtype: of the head's KV. block_size: of its blocks.
        num_threads: torch's, when it runs. trusts_code: whether the target's own Python code may be run.
    """

    head_folder: str
    kind: Kind
    target_folder: str
    tensors: tuple[str, ...]
    dtype: str
    kv_dtype: str
    block_size: int
    num_threads: int
    trusts_code: bool

    module = "proposers.eagle_compile"
    what = "the layers of the draft head"

    @property
    def digest(self) -> str:
        """Equal for orders whose result is the same, on this machine and with these libraries."""
        configs = [Path(folder) / "config.json" for folder in (self.head_folder, self.target_folder)]
        texts = [path.read_text(encoding="utf-8") for path in (*configs, *_SOURCES, *compile_process.SOURCES)]
        parts = [torch.__version__, transformers.__version__, cpu_features(), *texts, self.kind, *self.tensors]
        parts += [self.dtype, self.kv_dtype, str(self.block_size), str(self.num_threads > 1)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "EagleOrder":
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "tensors": tuple(values["tensors"])})


def tensors_of(body: EagleBody) -> tuple[str, ...]:
    """Names and shapes of what compiled code takes last; the number of blocks apart."""
    return tuple(
        f"{name} {list(tensor.shape[1:] if name.endswith('kv_blocks') else tensor.shape)}"
        for name, tensor in layer_tensors(body).items()
    )


class _Part(nn.Module):
    """A part of a body as a function of tensors alone: hidden states, what else it takes, and its own."""

    def __init__(self, body: EagleBody, part: str) -> None:
        super().__init__()
        self._body = (_Method(body, part),)  # in a tuple: its tensors are inputs here, not parameters
        self._own_names = tuple(layer_tensors(self._body[0]))

    def forward(self, hidden: Tensor, others: list[Tensor], own: list[Tensor]) -> Tensor:
        """[T, ...] -> [T, hidden]."""
        given: list[Any] = []
        if others:
            token_ids, *step = others
            given = [token_ids, AttentionStep(**dict(zip(STEP_FIELDS, step, strict=True)), groups=())]
        tensors = dict(zip(self._own_names, own, strict=True))
        output: Tensor = functional_call(self._body[0], tensors, (hidden, *given))
        return output


class _Method(nn.Module):
    """A method of a body in the place of a module's `forward`."""

    def __init__(self, body: EagleBody, name: str) -> None:
        super().__init__()
        self.body = body
        self._name = name

    def forward(self, *args: Any) -> Tensor:
        method: Callable[..., Tensor] = getattr(self.body, self._name)
        return method(*args)


def compile_head(order: EagleOrder, folder: Path) -> None:
    """Leave the packages in a folder. Raises: whatever export or compiler have to say about this head."""
    compile_process.load_operators(order.num_threads)
    dtype = getattr(torch, order.dtype)
    config = AutoConfig.from_pretrained(order.target_folder, trust_remote_code=order.trusts_code)
    outline = TargetOutline(
        config=config,
        tokenizer=None,
        device=torch.device("cpu"),
        dtype=dtype,
        trusts_code=order.trusts_code,
        digest=lambda: "",
    )
    head = eagle_head(read_checkpoint(order.head_folder), outline, order.kind)
    body = _body_without_weights(head, config.hidden_size, order)
    if (tensors := tensors_of(body)) != order.tensors:
        raise ValueError(f"the head has the tensors {tensors}, not {order.tensors}")
    any_size = torch.export.Dim.AUTO
    own = layer_tensors(body)
    own |= {name: _alone(tensor) for name, tensor in own.items() if name.endswith("kv_blocks")}
    own_sizes = [{0: any_size} if name.endswith("kv_blocks") else {} for name in own]
    tokens, rows = torch.zeros(NUM_TOKENS, dtype=torch.int64), torch.zeros(NUM_ROWS, dtype=torch.int64)
    table = torch.zeros(NUM_SLOTS, NUM_BLOCKS, dtype=torch.int32)
    step = [tokens.clone(), tokens.clone(), tokens.clone(), rows, rows.clone(), rows.clone(), table, table[:, 0].long()]
    num_features = config.hidden_size * (1 if head.taps is None else len(head.taps))
    for part in PARTS:
        width = num_features if part == "condense" else head.config.hidden_size
        others = [tokens, *step] if part == "forward" else []
        sizes = [dict.fromkeys(range(tensor.dim()), any_size) for tensor in others]
        example = torch.zeros(NUM_TOKENS, width, dtype=dtype), others, list(own.values())
        compile_package(_Part(body, part), example, ({0: any_size}, sizes, own_sizes), folder / f"{part}.pt2")


def _alone(view: Tensor) -> Tensor:
    """The same sizes and strides in memory of its own: what is written must share it with nothing, to be compiled."""
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype).zero_()


def _body_without_weights(head: EagleHead, target_hidden_size: int, order: EagleOrder) -> EagleBody:
    config, dtype = head.config, getattr(torch, order.dtype)
    config._attn_implementation = CPU_ATTENTION_NAME
    layers = empty_layers(head, target_hidden_size).to(dtype).to_empty(device="cpu").eval().requires_grad_(False)
    pack_linears(layers)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_shape = NUM_BLOCKS, config.num_hidden_layers, config.num_key_value_heads, order.block_size, 2 * head_dim
    bind_kv(layers, torch.zeros(kv_shape, dtype=getattr(torch, order.kv_dtype)))
    return EagleBody(head, layers, torch.zeros(config.vocab_size, config.hidden_size, dtype=dtype))


if __name__ == "__main__":
    compile_process.run(lambda order, folder: compile_head(EagleOrder.from_json(order), folder))
