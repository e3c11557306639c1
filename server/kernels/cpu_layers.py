"""Runs compiled decoders without Python between their operators, and without the interpreter lock."""

import functools
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from server.kernels.cpu_build import build

SOURCE = Path(__file__).with_name("cpu_layers.cpp")


@functools.cache
def load(folder: Path) -> None:
    """Make the classes available, in some seconds where `folder` does not hold it yet.

    Raises: BuildError, OSError.
    """
    torch.classes.load_library(str(build(SOURCE, (), folder, uses_whole_api=True)))


class LayerRunner:
    """Layers of a model, each a package of AOTInductor and tensors of its own; used from one thread at a time."""

    def __init__(self, packages: Sequence[Path], tensors: Sequence[Sequence[Tensor]]) -> None:
        """Args: packages: one per layer; equal ones are loaded once. tensors: what each layer alone takes, last."""
        with _unpacked(packages) as folders:
            paths = [folders[package] for package in packages]
            self.compiled = torch.classes.outrider.CompiledLayers(paths, [list(own) for own in tensors])

    def run(self, begin: int, end: int, hidden: Tensor, shared: list[Tensor]) -> Tensor:
        """Run layers [begin, end), one after the other.

        Args: hidden: [1, T, hidden]. shared: what each of them takes between it and its own tensors.
        Returns: of hidden's shape.
        """
        output: Tensor = self.compiled.run(hidden, shared, begin, end)
        return output


class FrameRunner:
    """What a decoder does in front of its layers and behind them, each a package; used from one thread at a time."""

    def __init__(self, before: Path, after: Path, tensors: Sequence[Tensor], order: Sequence[int]) -> None:
        """Args:
        before, after: packages, see model.compiled_model.CompiledFrame. tensors: what both take last.
        order: where a layer's shared tensors are among the positions, the step's and what `before` makes.
        """
        with _unpacked((before, after)) as folders:
            self._frame = torch.classes.outrider.CompiledFrame(
                folders[before], folders[after], list(tensors), list(order)
            )

    def before(self, token_ids: Tensor, positions: Tensor) -> list[Tensor]:
        """[1, T] int64 both -> the hidden states, [1, T, hidden], and what else is made for the layers."""
        made: list[Tensor] = self._frame.before(token_ids, positions)
        return made

    def after(self, hidden: Tensor) -> Tensor:
        """[1, T, hidden] -> [1, T, hidden]."""
        output: Tensor = self._frame.after(hidden)
        return output

    def run(self, layers: LayerRunner, token_ids: Tensor, positions: Tensor, step: list[Tensor]) -> Tensor:
        """All of it in one call, with all layers in between.

        Args: token_ids, positions: [1, T] int64. step: the step's tensors.
        Returns: [1, T, hidden].
        """
        output: Tensor = self._frame.run(layers.compiled, token_ids, positions, step)
        return output


@contextmanager
def _unpacked(packages: Iterable[Path]) -> Iterator[Mapping[Path, str]]:
    """By package, a folder with what is in it, to be loaded from at once: what is loaded stays without its files.

    A loader unpacks packages, too, and leaves them in the temporary folder for good if its process ends beforehand.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-") as root:
        folders: dict[Path, str] = {}
        for package in dict.fromkeys(packages):
            folders[package] = f"{root}/{len(folders)}"
            with zipfile.ZipFile(package) as archive:  # unlike a library, it tells where it is not whole
                archive.extractall(folders[package])
        yield folders
