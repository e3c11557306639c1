import pytest
import torch

from server.errors import ConfigError
from server.model.device import choose_device, choose_dtype, choose_kv_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda idx: f"GPU {idx}")


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("name", "device", "reason"),
    [
        ("auto", CUDA, "the first of 2 CUDA devices: GPU 0"),
        ("cuda", CUDA, "asked for with --device: GPU 0"),
        ("cuda:1", torch.device("cuda", 1), "asked for with --device: GPU 1"),
        ("cpu", CPU, "asked for with --device"),
    ],
)
def test_with_gpus(name: str, device: torch.device, reason: str) -> None:
    assert choose_device(name) == (device, reason)


@pytest.mark.usefixtures("two_gpus")
def test_an_index_out_of_range_names_the_range() -> None:
    with pytest.raises(ConfigError, match="are cuda:0 to cuda:1"):
        choose_device("cuda:2")


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_says_why() -> None:
    device, reason = choose_device("auto")
    assert device == CPU
    assert reason.startswith("no CUDA device: ")


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_cuda_asked_for_but_absent(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--device {name}: .*; use --device cpu, or install the CUDA build of torch"):
        choose_device(name)


def test_dtype_follows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_dtype("auto", CPU)[0] == torch.bfloat16
    assert choose_dtype("float32", CPU)[0] == torch.float32
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation: False)
    assert choose_dtype("auto", CUDA) == (torch.float16, "the GPU does not compute in bfloat16")
    with pytest.raises(ConfigError, match="--dtype bfloat16: cuda:0 does not compute in it"):
        choose_dtype("bfloat16", CUDA)


@pytest.mark.parametrize(
    ("name", "dtype", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", torch.float16, torch.float16),
        ("bfloat16", torch.float32, torch.bfloat16),
        ("fp8_e4m3", torch.bfloat16, torch.float8_e4m3fn),
        ("float16", torch.float16, torch.float16),
    ],
)
def test_the_cache_has_a_type_of_its_own(name: str, dtype: torch.dtype, expected: torch.dtype) -> None:
    assert choose_kv_dtype(name, CPU, dtype, "--kv-cache-dtype") == expected


def test_a_cache_that_attention_cannot_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--kv-cache-dtype: the CPU keeps float32, bfloat16, fp8_e4m3 or"):
        choose_kv_dtype("float16", CPU, torch.bfloat16, "--kv-cache-dtype")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 6))
    assert choose_kv_dtype("float16", CUDA, torch.bfloat16, "--kv-cache-dtype") == torch.float16
    with pytest.raises(ConfigError, match="kv_cache_dtype: cuda:0 does not convert fp8_e4m3"):
        choose_kv_dtype("fp8_e4m3", CUDA, torch.bfloat16, "kv_cache_dtype")
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 9))
    assert choose_kv_dtype("fp8_e4m3", CUDA, torch.bfloat16, "kv_cache_dtype") == torch.float8_e4m3fn
