"""The target as training sees it: frozen, over packed rows, with the hidden states that heads take."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from proposers.base import TargetModel
from proposers.training.packing import PADDING, PackedRows
from server.config import ModelConfig
from server.errors import ConfigError
from server.model.device import choose_device, choose_dtype
from server.model.head import LMHead
from server.model.loader import load_model
from server.model.taps import LayerTaps

_LOGITS_AT_A_TIME = 1 << 28
"""Values of the whole vocabulary that are in memory together: 1 GiB in float32."""
_FEW_LAYERS = 4


def load_target(model: str, device: str, dtype: str) -> TargetModel:
    """Load a model for training: its own modules, attention over whole rows. Raises: ConfigError, ModelError."""
    config = ModelConfig(model=model, device=device, dtype=dtype)
    where, _ = choose_device(config.device)
    loaded = load_model(config, where, choose_dtype(config.dtype, where)[0])
    loaded.model.set_attn_implementation("sdpa")
    return TargetModel(
        model=loaded.model,
        head=LMHead.of(loaded.model, loaded.config),
        config=loaded.config,
        tokenizer=loaded.tokenizer,
        folder=loaded.folder,
        dtype=loaded.model.dtype,
        digest=loaded.weights_digest,
        block_size=32,
        max_num_tokens=loaded.max_position_embeddings,
        runs_plain=True,
    )


def trainable_rows(target: TargetModel, token_ids: Tensor) -> LMHead:
    """The target's output projection for some tokens, [n] int64, by a product that gradients go through.

    The one with float32 results, which is faster and exact on CUDA, has none.
    """
    rows = target.head.rows(token_ids)
    assert isinstance(rows, LMHead), "load_target makes one"
    return replace(rows, linear=functional.linear)


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers whose inputs a head takes: low, middle and high, each once, ascending."""
    high = num_layers - 2 if num_layers > _FEW_LAYERS else num_layers - 1
    return tuple(sorted({min(3, num_layers // 4), num_layers // 2, high}))


class Features(NamedTuple):
    """What the target makes of [B, L] places.

    Attributes:
        taps: [B, L, taps * hidden], what goes into the tapped layers, side by side.
        last: [B, L, hidden], what its output projection takes.
        normaliser: [B, L] float32, the log of the sum that makes probabilities of its logits at the temperature.
        log_chance: [B, L] float32, the log of the probability that it gives to the token behind each place; of no
            meaning for the last of a row.
    """

    taps: Tensor
    last: Tensor
    normaliser: Tensor
    log_chance: Tensor


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which features. Attributes: taps: of these layers. temperature: that of the normaliser, above 0."""

    taps: tuple[int, ...]
    temperature: float


class TargetFeatures:
    """Computes features of packed rows."""

    def __init__(self, target: TargetModel, wanted: Wanted) -> None:
        """Raises: ConfigError for layers that the target has not."""
        self._target = target
        self._wanted = wanted
        self._taps = LayerTaps(target.model, target.config.num_hidden_layers, wanted.taps)

    @property
    def nbytes_per_place(self) -> int:
        """Bytes of a place's features."""
        hidden: int = self._target.config.hidden_size
        return hidden * (len(self._wanted.taps) + 1) * self._target.dtype.itemsize + 8

    @torch.no_grad()
    def compute(self, rows: PackedRows) -> Features:
        """Features of some rows, on the target's device; every text sees itself alone."""
        window = getattr(self._target.config, "sliding_window", None)
        if window is not None and window < rows.row_length:
            raise ConfigError(f"rows of {rows.row_length} tokens do not fit into the target's window of {window}")
        outputs = self._target.model.base_model(
            input_ids=rows.token_ids,
            attention_mask=own_text_mask(rows)[:, None],
            position_ids=rows.positions,
            use_cache=False,
        )
        taken = self._taps.take()
        last: Tensor = outputs.last_hidden_state
        tapped = [taken[index].view_as(last) for index in self._wanted.taps]
        taps = torch.cat(tapped, dim=-1) if tapped else last[..., :0]
        return Features(taps, last, *self._normalised(last, rows.token_ids.roll(-1, 1)))

    def _normalised(self, last: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        """Normaliser and log_chance, a part of the places at a time."""
        head, temperature = self._target.head, self._wanted.temperature
        size = max(1, _LOGITS_AT_A_TIME // head.weight.shape[0])
        normaliser, log_chance = [], []
        for states, ids in zip(last.flatten(0, 1).split(size), following.flatten().split(size), strict=True):
            scaled = head.logits(states) / temperature
            normaliser.append(scaled.logsumexp(-1))
            log_chance.append(scaled.gather(1, ids[:, None])[:, 0] - normaliser[-1])
        shape = last.shape[:2]
        return torch.cat(normaliser).view(shape), torch.cat(log_chance).view(shape)


def own_text_mask(rows: PackedRows) -> Tensor:
    """[B, L, L] bool: a place sees those of its text up to itself; padding sees itself."""
    places = torch.arange(rows.row_length, device=rows.documents.device)
    is_same = (rows.documents[:, :, None] == rows.documents[:, None, :]) & (rows.documents != PADDING)[:, None, :]
    return (is_same & (places[:, None] >= places)) | torch.eye(rows.row_length, dtype=torch.bool, device=places.device)
