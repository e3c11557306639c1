"""What the process that compiles a model's layers is asked for, and what it leaves in a folder."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from server.kernels.cpu_build import cpu_features
from server.model.layer_call import LayerCall

_SOURCES = (
    *("attention.py", "compile_process.py", "compiled_model.py", "decoder_layers.py", "frame_compile.py", "fusion.py"),
    *("layer_call.py", "layer_compile.py", "package.py"),
)
"""Of this folder; what they say decides what is compiled."""


@dataclass(frozen=True, slots=True)
class CompileOrder:
    """What is to be compiled; implements compilation.Order.

    Attributes:
        model_folder: has config.json. dtype: of weights and activations. attention: name of the attention function.
        kv_dtype: of the KV cache.
        kv_shape: of a block, (layers, kv_heads, block_size, 2 * head_dim). num_threads: torch's, when it runs.
        trusts_code: whether the model's own Python code may be run.
    """

    model_folder: str
    dtype: str
    kv_dtype: str
    attention: str
    kv_shape: tuple[int, ...]
    num_threads: int
    trusts_code: bool

    module = "server.model.layer_compile"
    what = "the decoder layers"

    @property
    def digest(self) -> str:
        """Equal for orders whose result is the same, on this machine and with these libraries."""
        config = (Path(self.model_folder) / "config.json").read_text(encoding="utf-8")
        sources = [(Path(__file__).parent / name).read_text(encoding="utf-8") for name in _SOURCES]
        parts = [torch.__version__, transformers.__version__, cpu_features(), config, *sources]
        parts += [self.dtype, self.kv_dtype, self.attention, str(self.kv_shape), str(self.num_threads > 1)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]

    def to_json(self) -> str:
        """For the command line of the process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "CompileOrder":
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(**{**values, "kv_shape": tuple(values["kv_shape"])})


@dataclass(frozen=True, slots=True)
class CompiledKind:
    """A package of AOTInductor for layers of one kind.

    Attributes:
        package: file name. call: its inputs after the hidden states.
        own_tensors: names of the layer's own tensors, the last inputs.
    """

    package: str
    call: LayerCall
    own_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledFrame:
    """Packages for what a decoder does in front of its layers and behind them.

    Attributes:
        before: file name; from token ids, positions and own tensors to the layers' hidden states and what is `made`.
        after: file name; from the last layer's hidden states and own tensors to the decoder's hidden states.
        made: names of those of the layers' tensors that the decoder makes, in order.
        own_tensors: names of the decoder's own tensors outside its layers, the last inputs of both.
    """

    before: str
    after: str
    made: tuple[str, ...]
    own_tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CompiledModel:
    """The packages in a folder, the kind of each layer, and what lies around the layers, unless that stays as it is."""

    kinds: tuple[CompiledKind, ...]
    kind_of_layer: tuple[int, ...]
    frame: CompiledFrame | None

    def write(self, folder: Path) -> None:
        """Leave it beside the packages."""
        (folder / "layers.json").write_text(json.dumps(dataclasses.asdict(self), indent=1), encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> "CompiledModel":
        """The inverse of `write`."""
        values = json.loads((folder / "layers.json").read_text(encoding="utf-8"))
        kinds = [
            CompiledKind(
                kind["package"],
                LayerCall(tuple(kind["call"]["tensors"]), kind["call"]["constants"]),
                tuple(kind["own_tensors"]),
            )
            for kind in values["kinds"]
        ]
        frame = values["frame"]
        if frame is not None:
            frame = CompiledFrame(frame["before"], frame["after"], tuple(frame["made"]), tuple(frame["own_tensors"]))
        return cls(tuple(kinds), tuple(values["kind_of_layer"]), frame)
