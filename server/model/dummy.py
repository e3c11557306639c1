"""Models with random weights, made where they run: for measuring speed without anybody's weights."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from server.config import ModelConfig
from server.errors import ModelError
from server.model.weights import TensorInfo, WeightFiles

_SEED = 0


def dummy_folder(model: str) -> Path:
    """The folder that MODEL names. Raises: ModelError if it is no folder with a config.json."""
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise ModelError(f"--load-format dummy takes a folder with a config.json, and {model} is none")
    return folder


def dummy_weights(model_config: PreTrainedConfig, config: ModelConfig) -> WeightFiles:
    """What weight files of this model would hold, without the files; tied weights count once."""
    with torch.device("meta"):
        model = _build(model_config, config, torch.bfloat16, attention=None)
    return WeightFiles((), {name: TensorInfo("BF16", tuple(p.shape)) for name, p in model.named_parameters()})


def make_dummy_model(
    model_config: PreTrainedConfig, config: ModelConfig, device: torch.device, dtype: torch.dtype, attention: str
) -> PreTrainedModel:
    """The model as it is before its first training step: seeded, on `device`, equal on equal devices.

    Its own initialisation keeps activations finite (normal, of the deviation in its configuration).
    Raises: ModelError if it does not fit into the memory.
    """
    cuda_devices = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=cuda_devices), torch.device(device):
            torch.manual_seed(_SEED)
            model = _build(model_config, config, dtype, attention)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{config.model} does not fit into the memory of {device}: {error}") from error
    return model.eval().requires_grad_(False)


def _build(
    model_config: PreTrainedConfig, config: ModelConfig, dtype: torch.dtype, attention: str | None
) -> PreTrainedModel:
    chosen = {} if attention is None else {"attn_implementation": attention}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        model_config, dtype=dtype, trust_remote_code=config.trust_remote_code, **chosen
    )
    return model
