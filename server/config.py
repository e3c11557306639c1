"""Every setting of the server: one frozen, typed section per part of it.

A field's name with dashes is its flag; names are unique over all sections. Values come
from a flag, an OUTRIDER_<FLAG> variable, a file or the default, in this order
(server.config_sources), or from keyword arguments (`Config.from_kwargs`).
"""

import re
from collections.abc import Mapping
from typing import Literal

from pydantic import Field, field_validator

from server.config_values import ByteCount, Given, Section, build_section
from server.errors import ConfigError
from server.kv_transfer_config import KV_TRANSFER_CONFIG, Role, parse_kv_transfer_config
from server.kv_transfer_config import KVTransferConfig as KVTransferConfig
from server.speculative_config import AUTO, SPECULATIVE_CONFIG, SpeculativeConfig, parse_speculative_config
from server.suggestions import did_you_mean

KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8_e4m3"]
KV_CACHE_DTYPE_HELP = (
    "type that keys and values are kept in; auto is the model's own; fp8_e4m3, without scales, takes half the memory "
    "of bfloat16; float16 on CUDA, or as the model's own"
)


class ModelConfig(Section):
    """Which model is served, and how it is loaded."""

    model: str = Field(
        default="smollm2-135m",
        min_length=1,
        description="a folder with safetensors, a GGUF file, a Hugging Face id, or smollm2-135m",
    )
    served_model_name: str | None = Field(default=None, description="the name clients see instead of MODEL")
    tokenizer: str | None = Field(default=None, description="folder or Hugging Face id of another tokenizer")
    revision: str | None = Field(default=None, description="branch, tag or commit of a Hugging Face repository")
    chat_template: str | None = Field(
        default=None, description="Jinja file, or the template itself, instead of the model's own"
    )
    trust_remote_code: bool = Field(default=False, description="run the Python code that a model's repository brings")
    device: str = Field(default="auto", description="auto, cpu, cuda or cuda:N; auto takes CUDA where there is one")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        default="auto", description="type of weights and activations; auto is bfloat16"
    )
    load_format: Literal["auto", "dummy"] = Field(
        default="auto",
        description="auto reads safetensors; dummy makes random weights for a folder that may have config.json alone",
    )
    max_model_len: int | None = Field(
        default=None, ge=2, description="longest context, prompt and output, in tokens; the model's own if not given"
    )
    generation_config: Literal["auto", "vllm"] = Field(
        default="auto",
        description="where unset sampling parameters come from: auto is the model's generation_config, "
        "vllm ignores it in favour of vLLM's defaults",
    )
    compile: Literal["auto", "wait", "none"] = Field(
        default="auto",
        description="when to compile the decoder layers: wait, before serving; auto, on CUDA before serving, on the "
        "CPU aside while serving starts; none",
    )
    batch_invariant: bool = Field(
        default=False,
        description="answer a request with the same tokens whatever runs beside it, in bfloat16 as well; on CUDA "
        "slower, with layers that are not compiled; on the CPU always so with our C++ operators",
    )
    enforce_eager: bool = Field(
        default=False, description="run the model's own modules: nothing is merged, packed, captured or compiled"
    )

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
            raise ValueError("must be auto, cpu, cuda or cuda:N")
        return device


class CacheConfig(Section):
    """The KV cache."""

    block_size: int = Field(default=32, ge=16, le=256, multiple_of=16, description="tokens per KV block")
    kv_cache_memory_bytes: ByteCount | None = Field(
        default=None, ge=1, description="size of the KV cache, such as 512MiB; goes before gpu-memory-utilization"
    )
    kv_cache_dtype: KVCacheDtype = Field(default="auto", description=KV_CACHE_DTYPE_HELP)
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="share of the GPU's memory for weights, activations and KV cache together"
    )
    enable_prefix_caching: bool = Field(default=True, description="reuse the KV of prompts with a common beginning")


class SchedulerConfig(Section):
    """What runs in a step, and what waits."""

    max_num_seqs: int = Field(default=64, ge=1, le=4096, description="most sequences in a step")
    max_num_batched_tokens: int = Field(default=2048, ge=1, le=1 << 20, description="most tokens computed in a step")
    long_prefill_token_threshold: int = Field(
        default=0, ge=0, description="most tokens of one prompt in a step; 0 sets no cap of its own"
    )
    max_num_partial_prefills: int = Field(
        default=1, ge=1, description="most prompts that are computed in parts at the same time"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="who goes first: fcfs, the earliest; priority, the lowest request priority"
    )
    priority_ageing_seconds: float = Field(
        default=10.0, gt=0, description="waiting this many seconds counts as much as one level of priority"
    )
    max_queued_requests: int = Field(
        default=1024,
        ge=1,
        description="requests that may wait for a seat; further ones are refused with RESOURCE_EXHAUSTED",
    )
    pipeline_depth: Literal["auto", 0, 1] = Field(
        default="auto", description="steps launched ahead of the one being settled; auto is 0 on a CPU, 1 on CUDA"
    )
    watermark: float = Field(
        default=0.01, ge=0, lt=1, description="share of the KV blocks kept free when a waiting request is admitted"
    )


class DisaggregationConfig(Section):
    """Prefill and decode on nodes of their own."""

    role: Role = Field(
        default="both",
        description="prefill computes prompts and the first token, and hands on; decode goes on with what others have "
        "begun; both does all of it. The former two need kv-transfer-config",
    )


class ServerConfig(Section):
    """The gRPC front."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=50051, ge=0, le=65535, description="TCP port to listen on; 0 picks a free one")
    uds: str | None = Field(default=None, description="Unix socket to listen on, instead of host and port")
    admin_uds: str | None = Field(
        default=None,
        description="Unix socket for `outrider admin`, which changes what runs; only the server's own user may connect",
    )
    max_message_bytes: ByteCount = Field(
        default=16 << 20, ge=1 << 16, le=(1 << 31) - 1, description="largest gRPC message taken or sent, such as 16MiB"
    )
    stream_interval: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="tokens of a choice that gather before they are streamed; its first token goes at once. Left out, "
        "tokens of four or more sequences wait up to 30 ms for the next ones on the CPU, and none elsewhere",
    )
    shutdown_timeout_seconds: float = Field(
        default=30.0,
        ge=0,
        description="how long live requests may finish, and other nodes read their KV, after a signal to stop",
    )
    tokenizer_threads: int = Field(default=2, ge=1, le=64, description="threads that tokenise and render prompts")
    grammar_threads: int = Field(default=2, ge=1, le=64, description="threads that compile grammars of guided requests")


class ObservabilityConfig(Section):
    """Traces, metrics and logs."""

    otlp_endpoint: str | None = Field(
        default=None, description="OTLP/gRPC collector for traces and metrics, such as http://127.0.0.1:4317"
    )
    metrics_port: int | None = Field(
        default=None, ge=0, le=65535, description="HTTP port of /metrics, /healthz and /readyz; 0 picks a free one"
    )
    metrics_host: str = Field(default="127.0.0.1", min_length=1, description="address of the metrics port")
    speculation_metrics: Literal["summary", "detailed"] = Field(
        default="summary",
        description="how much the end of each answer says of speculation, unless the request says otherwise; "
        "detailed adds every step",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(default="info", description="least level logged")

    @field_validator("otlp_endpoint")
    @classmethod
    def _is_endpoint(cls, endpoint: str | None) -> str | None:
        host_port = r"(\[[0-9a-fA-F:.]+\]|[^\s/:\[\]]+):[0-9]+"
        if endpoint is not None and not re.fullmatch(f"(https?://)?{host_port}/?", endpoint):
            raise ValueError("must be HOST:PORT, http://HOST:PORT or https://HOST:PORT")
        return endpoint


FLAT_SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "disaggregation": DisaggregationConfig,
    "server": ServerConfig,
    "observability": ObservabilityConfig,
}
"""Sections whose fields are settings of their own, by their name in `Config`."""

SETTING_NAMES: tuple[str, ...] = (
    *(name for section in FLAT_SECTIONS.values() for name in section.model_fields),
    SPECULATIVE_CONFIG,
    KV_TRANSFER_CONFIG,
)


class Config(Section):
    """All settings of one server. Parts of it take their section, never the whole."""

    model: ModelConfig = ModelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    speculative: SpeculativeConfig | Literal["auto"] | None = AUTO
    disaggregation: DisaggregationConfig = DisaggregationConfig()
    kv_transfer: KVTransferConfig | None = None
    server: ServerConfig = ServerConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @classmethod
    def from_kwargs(cls, **kwargs: object) -> "Config":
        """A configuration from settings by name, as `LLM(...)` takes them; the rest are defaults.

        Raises: ConfigError, as from the command line.
        """
        return cls.from_given({name: Given(value, "argument") for name, value in kwargs.items()})

    @classmethod
    def from_given(cls, given: Mapping[str, Given]) -> "Config":
        """A configuration from settings by name over the defaults.

        Raises: ConfigError that names every unknown setting and every refused value.
        """
        problems = [
            f"{name}: no such setting{did_you_mean(name, SETTING_NAMES)} (from {item.source})"
            for name, item in given.items()
            if name not in SETTING_NAMES
        ]
        sections: dict[str, Section | Literal["auto"] | None] = {}
        for key, section in FLAT_SECTIONS.items():
            own = {name: given[name] for name in section.model_fields if name in given}
            try:
                sections[key] = build_section(section, own)
            except ConfigError as error:
                problems.append(str(error))
        if SPECULATIVE_CONFIG in given:
            try:
                sections["speculative"] = parse_speculative_config(given[SPECULATIVE_CONFIG])
            except ConfigError as error:
                problems.append(str(error))
        try:
            sections["kv_transfer"] = _parse_kv_transfer(given, sections.get("disaggregation"), sections.get("cache"))
        except ConfigError as error:
            problems.append(str(error))
        if problems:
            raise ConfigError("; ".join(problems))
        return cls.model_validate(sections)

    def flat(self) -> dict[str, object]:
        """Every setting by its name, as plain values."""
        values = {
            name: getattr(getattr(self, key), name) for key in FLAT_SECTIONS for name in FLAT_SECTIONS[key].model_fields
        }
        given = self.speculative
        values[SPECULATIVE_CONFIG] = given.plain() if isinstance(given, SpeculativeConfig) else given
        values[KV_TRANSFER_CONFIG] = None if self.kv_transfer is None else self.kv_transfer.plain()
        return values


def _parse_kv_transfer(given: Mapping[str, Given], disaggregation: object, cache: object) -> KVTransferConfig | None:
    """As `parse_kv_transfer_config`, and as role and cache want it, unless these were refused already."""
    config = parse_kv_transfer_config(given[KV_TRANSFER_CONFIG]) if KV_TRANSFER_CONFIG in given else None
    if config is not None and isinstance(cache, CacheConfig) and not cache.enable_prefix_caching:
        raise ConfigError(
            f"{KV_TRANSFER_CONFIG}: needs enable_prefix_caching, as blocks are known to others by what they hold"
        )
    if not isinstance(disaggregation, DisaggregationConfig):
        return config
    if config is not None:
        return config.of_role(disaggregation.role)
    if disaggregation.role != "both":
        raise ConfigError(f"role: {disaggregation.role} needs {KV_TRANSFER_CONFIG}, as KV goes to or comes from others")
    return None
