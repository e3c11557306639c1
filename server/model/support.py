"""Which models can be served, decided from their configuration before any weight is read."""

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from server.errors import ModelError

SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})

_SUPPORTED = "supported are decoder-only causal language models with softmax attention in every layer, unquantised"


def check_config(config: PreTrainedConfig, *, trusts_code: bool) -> None:
    """Refuse what the paged KV cache, or the roll-back of draft tokens, cannot serve.

    Args:
        trusts_code: the class may come from the repository; it is then checked once it is loaded.

    Raises: ModelError naming the cause and what is supported.
    """
    if reason := _config_obstacle(config):
        raise _refusal(config, reason)
    is_remote = trusts_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {})
    if is_remote:
        return
    model_class = _causal_lm_class(config)
    if model_class is None:
        raise _refusal(config, f"{_architecture(config)} is not a causal language model")
    if reason := _class_obstacle(model_class):
        raise _refusal(config, reason)


def check_model(model: PreTrainedModel) -> None:
    """The same for what only the loaded model shows: a class from a repository, masks, widths of K and V.

    Raises: ModelError.
    """
    if reason := _class_obstacle(type(model)) or _module_obstacle(model):
        raise _refusal(model.config, reason)


def _config_obstacle(config: PreTrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if getattr(config, "add_cross_attention", False):
        return "it has cross-attention"
    if config.get_text_config(decoder=True) is not config:
        return "it takes more than text"
    if quantization := getattr(config, "quantization_config", None):
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization.quant_method
        return f"its weights are quantised ({getattr(method, 'value', method)})"
    if getattr(config, "kv_lora_rank", None):
        return "it uses multi-head latent attention (MLA), whose K and V differ in width"
    if (width := getattr(config, "v_head_dim", None)) and width != getattr(config, "head_dim", width):
        return "its K and V differ in width"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers use the KV of others"
    layer_types = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if foreign := sorted(map(str, layer_types - SUPPORTED_LAYER_TYPES)):
        return f"it has layers of type {', '.join(foreign)}"
    return None


def _class_obstacle(model_class: type[PreTrainedModel]) -> str | None:
    if getattr(model_class, "_is_stateful", False):
        return "it has recurrent layers, whose state cannot be rolled back when draft tokens are rejected"
    if not getattr(model_class, "_supports_attention_backend", False):
        return f"{model_class.__name__} does not dispatch its attention through transformers' AttentionInterface"
    return None


def _module_obstacle(model: PreTrainedModel) -> str | None:
    widths: set[int] = set()
    for module in model.modules():
        if getattr(module, "is_causal", None) is False:
            return "its attention looks ahead"
        for name in ("k_proj", "v_proj"):
            projection: Any = getattr(module, name, None)
            if hasattr(projection, "out_features"):
                widths.add(projection.out_features)
    # One KV block holds all layers, K beside V, in one width.
    return f"its K and V have several widths ({sorted(widths)})" if len(widths) > 1 else None


def _causal_lm_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The class that will be loaded, if it is the one whose weights these are."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return None
    model_class: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    # A classifier or an encoder of the same family has the configuration class but not the head.
    saved_as = config.architectures or [model_class.__name__]
    return model_class if model_class.__name__ in saved_as else None


def _architecture(config: PreTrainedConfig) -> str:
    names: list[str] = config.architectures or [config.model_type]
    return names[0]


def _refusal(config: PreTrainedConfig, reason: str) -> ModelError:
    return ModelError(f"{_architecture(config)} cannot be served: {reason}; {_SUPPORTED}")
