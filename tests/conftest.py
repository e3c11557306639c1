"""What every test runs under."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.fakes.device import DEVICE

# The same examples in each run, however slow or busy the machine is.
settings.register_profile("repeatable", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("repeatable")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # In a job in a script's background, whose processes would inherit that; some tests interrupt what they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if not Path("/dev/nvidiactl").exists():
    # Kernels are interpreted on the CPU. Triton reads this as it is imported, by whichever test comes first.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip GPU tests where there is no GPU; torch is imported only if there are any."""
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's OUTRIDER_* variables must not reach the tests, whose servers do not compile on the side."""
    for name in list(os.environ):
        if name.startswith("OUTRIDER_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("OUTRIDER_COMPILE", "none")


@pytest.fixture(scope="session")
def device_name() -> str:
    """The device that the worker's tests run on, as `--device` takes it: cpu, or cuda."""
    return DEVICE


@pytest.fixture(scope="session")
def kernel_device() -> str:
    """Where kernels can be launched: on a GPU, or on the CPU through the interpreter."""
    pytest.importorskip("triton", reason="there is no Triton for this platform")
    return "cpu" if "TRITON_INTERPRET" in os.environ else "cuda"
