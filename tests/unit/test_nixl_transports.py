"""What NIXL's transports become where there are GPUs."""

from pathlib import Path

import pytest

from connectors.nixl.transports import with_device_memory

GPU = {"vendor": "0x10de\n", "class": "0x030200\n"}
BRIDGE = {"vendor": "0x10de\n", "class": "0x068000\n"}
OTHER_GPU = {"vendor": "0x1002\n", "class": "0x030000\n"}


def pci(folder: Path, *devices: dict[str, str]) -> Path:
    for number, files in enumerate(devices):
        device = folder / f"0000:00:0{number}.0"
        device.mkdir()
        for name, text in files.items():
            (device / name).write_text(text)
    return folder


@pytest.mark.parametrize("named", ["tcp", "tcp,rc", "rc,tcp,cuda_ipc"])
def test_device_memory_is_reached_where_there_are_gpus(tmp_path: Path, named: str) -> None:
    assert with_device_memory(named, pci(tmp_path, OTHER_GPU, GPU)) == f"{named},cuda_copy"


@pytest.mark.parametrize("named", ["all", "tcp,cuda", "cuda_copy,tcp", r"tcp,\cuda_copy", "^cma", "^cuda"])
def test_what_says_enough_stays(tmp_path: Path, named: str) -> None:
    assert with_device_memory(named, pci(tmp_path, GPU)) == named


def test_without_gpus_of_nvidia_nothing_is_added(tmp_path: Path) -> None:
    assert with_device_memory("tcp", pci(tmp_path, BRIDGE, OTHER_GPU)) == "tcp"
    assert with_device_memory("tcp", tmp_path / "absent") == "tcp"
