"""Small texts and targets for tests of training."""

from pathlib import Path

import numpy as np
import torch

from proposers.base import TargetModel
from proposers.training.eagle_trainee import EagleShape, EagleTrainee, new_eagle
from proposers.training.texts import Text
from tests.fakes.tiny_target import target_model
from tests.tiny_model import build_tiny_model

TAPS = (0, 1, 2)
VOCAB = 512


def tiny_target(folder: Path, device: str = "cpu") -> TargetModel:
    """Three layers, whole rows, float32."""
    target = target_model(build_tiny_model(folder, num_layers=3), device)
    target.model.set_attn_implementation("sdpa")
    return target


def random_texts(lengths: tuple[int, ...], num_prompt: int = 3, *, split: str = "train", seed: int = 0) -> list[Text]:
    """Of random tokens."""
    random = np.random.default_rng(seed)
    return [
        Text(random.integers(3, VOCAB, length, dtype=np.int32), num_prompt, "chat", split, 0.0) for length in lengths
    ]


def greedy_texts(target: TargetModel, count: int, length: int, *, split: str = "train", seed: int = 0) -> list[Text]:
    """What the target says behind random prompts of 3 tokens, all in one batch."""
    random = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (count, 3), generator=random).to(target.model.device)
    with torch.inference_mode():
        while ids.shape[1] < length:
            logits = target.model(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat((ids, logits.argmax(-1, keepdim=True)), dim=1)
    return [Text(row.astype(np.int32), 3, "chat", split, 0.0) for row in ids.cpu().numpy()]


def random_eagle(target: TargetModel, to_target: torch.Tensor, *, seed: int = 0, **options: bool) -> EagleTrainee:
    """A head whose every weight matters: none of them is near what training begins with."""
    trainee = new_eagle(EagleShape(TAPS, to_target, **options), target, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in trainee.layers.parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.copy_(noise * 1.2 / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else 1 + 0.2 * noise)
    return trainee
