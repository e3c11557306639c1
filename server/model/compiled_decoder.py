"""Runs a whole decoder as compiled code: its layers, and what it does in front of them and behind."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from server.kernels.cpu_layers import FrameRunner, LayerRunner
from server.model.attention import AttentionStep
from server.model.compiled_model import CompiledFrame
from server.model.decoder_layers import layer_tensors
from server.model.layer_call import LayerCall
from server.model.taps import has_taps, run_between_taps

_STEP = "attention_step."


class CompiledDecoder:
    """Takes the place of a decoder's `forward`; used from the step thread only.

    Python is left once a step: what a step has to say to others while it computes, they can hear then.
    """

    def __init__(
        self,
        decoder: nn.Module,
        layers: nn.ModuleList,
        runner: LayerRunner,
        call: LayerCall,
        frame: CompiledFrame,
        folder: Path,
    ) -> None:
        """Args: call: of each of the layers. folder: has the packages.

        Raises: ValueError if the code was made for another decoder.
        """
        of_layers = {id(tensor) for layer in layers for tensor in layer_tensors(layer).values()}
        own = {name: tensor for name, tensor in layer_tensors(decoder).items() if id(tensor) not in of_layers}
        if tuple(own) != frame.own_tensors:
            raise ValueError(f"the decoder has the tensors {list(own)}, not {frame.own_tensors}")
        self._layers: Sequence[nn.Module] = list(layers)
        self._runner = runner
        self._step_fields = [name.removeprefix(_STEP) for name in call.tensors if name.startswith(_STEP)]
        sources = ["position_ids", *(_STEP + name for name in self._step_fields), *frame.made]
        self._order = [sources.index(name) for name in call.tensors]
        self._frame = FrameRunner(folder / frame.before, folder / frame.after, list(own.values()), self._order)
        self._own_forward = decoder.forward

    def before(self, token_ids: Tensor, positions: Tensor, step: AttentionStep) -> tuple[Tensor, list[Tensor]]:
        """[1, T] int64 both -> what the layers are called with: hidden states, and the tensors they share."""
        hidden, *made = self._frame.before(token_ids, positions)
        all_tensors = [positions, *self._tensors(step), *made]
        return hidden, [all_tensors[i] for i in self._order]

    def after(self, hidden: Tensor) -> Tensor:
        """The last layer's hidden states -> the decoder's; [1, T, hidden] both."""
        return self._frame.after(hidden)

    def forward(
        self,
        input_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_step: AttentionStep | None = None,
        **others: Any,
    ) -> Any:
        """What the decoder's own returns; that is called where something else is asked for than in a step."""
        if input_ids is None or position_ids is None or attention_step is None or any(others.values()):
            return self._own_forward(
                input_ids=input_ids, position_ids=position_ids, attention_step=attention_step, **others
            )
        input_ids = input_ids.long()  # compiled code takes tensors for what they were when it was made
        if any(map(has_taps, self._layers)):
            hidden, shared = self.before(input_ids, position_ids, attention_step)
            run = partial(self._run_layers, shared)
            output = self.after(run_between_taps(self._layers, hidden, run))
        else:
            output = self._frame.run(self._runner, input_ids, position_ids, self._tensors(attention_step))
        return BaseModelOutputWithPast(last_hidden_state=output)

    def _run_layers(self, shared: list[Tensor], begin: int, end: int, hidden: Tensor) -> Tensor:
        return self._runner.run(begin, end, hidden, shared)

    def _tensors(self, step: AttentionStep) -> list[Tensor]:
        if step.starts is not None:
            raise ValueError("the decoder was compiled for rows that see all positions")
        return [getattr(step, name) for name in self._step_fields]
