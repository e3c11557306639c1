"""UCX's transports: which lists do for us, and what NIXL asks of one where there are GPUs."""

from pathlib import Path

PCI_DEVICES = Path("/sys/bus/pci/devices")
_COPIES_DEVICE_MEMORY = {"all", "cuda", "cuda_copy", "\\cuda_copy"}


def checked_transports(transports: str) -> str:
    """TCP alone connects any two agents, and notices when one of them is gone. Raises: ValueError."""
    names = transports.removeprefix("^").split(",")
    if transports.startswith("^") == ("tcp" in names) and "all" not in names:
        raise ValueError("must leave tcp in")
    return transports


def with_device_memory(transports: str, pci_devices: Path = PCI_DEVICES) -> str:
    """The list with cuda_copy, if it names no transport that reads device memory and there are NVIDIA GPUs.

    NIXL makes no agent otherwise, even for a KV cache on the CPU. UCX would warn of cuda_copy where there are none.
    A list of what to leave out stays as it is: who leaves cuda out means it.
    """
    is_complete = transports.startswith("^") or not _COPIES_DEVICE_MEMORY.isdisjoint(transports.split(","))
    return transports if is_complete or not _has_nvidia_gpu(pci_devices) else f"{transports},cuda_copy"


def _has_nvidia_gpu(pci_devices: Path) -> bool:
    """As NIXL looks for them, whatever CUDA_VISIBLE_DEVICES says: by vendor and, of a display controller, class."""
    return any(
        vendor.read_text().strip() == "0x10de" and vendor.with_name("class").read_text().startswith("0x03")
        for vendor in pci_devices.glob("*/vendor")
    )
