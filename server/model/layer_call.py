"""What a model hands each of its decoder layers, flattened into tensors.

Compiled code takes tensors in a fixed order. The order is read off one call of the model itself, by the
names of the arguments, so nothing here knows an architecture.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from server.model.attention import AttentionStep

Constant = bool | int | float | str | None


@dataclass(frozen=True, slots=True)
class LayerCall:
    """The arguments of a decoder layer beside its hidden states, which come first.

    Attributes:
        tensors: names of those that are tensors, or hold some, such as "position_embeddings.1", in order.
        constants: the others.
    """

    tensors: tuple[str, ...]
    constants: Mapping[str, Constant]

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> "LayerCall":
        """Read off the keyword arguments of a call.

        Raises: TypeError for an argument that is neither a constant, a tensor, a sequence of tensors nor the step.
        """
        constants: dict[str, Constant] = {}
        for name, value in arguments.items():
            if value is None or isinstance(value, (bool, int, float, str)):
                constants[name] = value
            elif not list(_tensors(name, value)):
                raise TypeError(f"the argument {name} of a decoder layer is a {type(value).__name__}")
        names = tuple(name for argument, value in arguments.items() for name, _ in _tensors(argument, value))
        return cls(names, constants)

    def flatten(self, arguments: Mapping[str, object]) -> list[Tensor]:
        """The tensors of another call of the same kind.

        Raises: ValueError if the call is of another kind.
        """
        found = [item for name, value in arguments.items() for item in _tensors(name, value)]
        if tuple(name for name, _ in found) != self.tensors:
            raise ValueError(f"a decoder layer was called with {[name for name, _ in found]}, not {self.tensors}")
        return [tensor for _, tensor in found]

    def rebuild(self, tensors: Sequence[Tensor]) -> dict[str, Any]:
        """Keyword arguments from tensors in order; the step's groups, of no use to compiled code, are left out."""
        arguments: dict[str, Any] = dict(self.constants)
        parts: dict[str, dict[str, Tensor]] = {}
        for name, tensor in zip(self.tensors, tensors, strict=True):
            argument, _, part = name.partition(".")
            if part:
                parts.setdefault(argument, {})[part] = tensor
            else:
                arguments[argument] = tensor
        for argument, fields in parts.items():
            is_sequence = all(field.isdigit() for field in fields)
            arguments[argument] = tuple(fields.values()) if is_sequence else AttentionStep(**fields, groups=())
        return arguments


def _tensors(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """The tensors in an argument, by name."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (tuple, list)) and all(isinstance(item, Tensor) for item in value):
        for i, item in enumerate(value):
            yield f"{name}.{i}", item
    elif isinstance(value, AttentionStep):
        for field in dataclasses.fields(AttentionStep):
            if isinstance(item := getattr(value, field.name), Tensor):
                yield f"{name}.{field.name}", item
