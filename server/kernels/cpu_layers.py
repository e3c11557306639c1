"""Runs compiled decoder layers without Python between a layer's operators, and without the interpreter lock."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from server.kernels.cpu_build import build

SOURCE = Path(__file__).with_name("cpu_layers.cpp")


@functools.cache
def load(folder: Path) -> None:
    """Make the class available, in some seconds where `folder` does not hold it yet.

    Raises: BuildError, OSError.
    """
    torch.classes.load_library(str(build(SOURCE, (), folder, uses_whole_api=True)))


class LayerRunner:
    """Layers of a model, each a package of AOTInductor and tensors of its own; used from one thread at a time."""

    def __init__(self, packages: Sequence[Path], tensors: Sequence[Sequence[Tensor]]) -> None:
        """Args: packages: one per layer; equal ones are loaded once. tensors: what each layer alone takes, last."""
        paths = [str(package) for package in packages]
        self._layers = torch.classes.outrider.CompiledLayers(paths, [list(own) for own in tensors])

    def run(self, begin: int, end: int, hidden: Tensor, shared: list[Tensor]) -> Tensor:
        """Run layers [begin, end), one after the other.

        Args: hidden: [1, T, hidden]. shared: what each of them takes between it and its own tensors.
        Returns: of hidden's shape.
        """
        output: Tensor = self._layers.run(hidden, shared, begin, end)
        return output
