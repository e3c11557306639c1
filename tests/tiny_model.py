"""Builds a tiny random model folder: real files, real tokenizer, made in well under a second.

The weights are seeded, so the same options give the same bytes in every process.
"""

import json
from pathlib import Path
from typing import Any

IM_START = "<|im_start|>"
IM_END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Gives the byte-pair trainer something to merge: words, digits, code, accents, CJK and emoji.
_CORPUS = (
    "The quick brown fox jumps over the lazy dog and then the dog jumps over the other brown dog. ",
    "def add(first, second):\n    return first + second\n\n\ndef main():\n    print(add(1, 2))\n",
    "One two three four five, once I caught a fish alive; six seven eight nine ten, then I let it go again. ",
    "naïve café résumé, señor; 日本語の文章です。你好，世界。 😀😀 🚀 ",
)


def build_tiny_model(
    folder: Path,
    *,
    vocab_size: int = 512,
    num_layers: int = 2,
    max_position: int = 512,
    sliding_window: int | None = None,
    poison_token_id: int | None = None,
    generation_config: dict[str, object] | None = None,
    seed: int = 0,
) -> Path:
    """Write a random decoder of 64 hidden units, 4 query and 2 KV heads of 16, in float32.

    Args:
        folder: made if missing; its files are overwritten.
        vocab_size: rows of the embedding; at least 300 leaves room for the tokenizer's merges.
        sliding_window: None makes a Llama; a number makes a Mistral whose every layer sees that many tokens.
        poison_token_id: the embedding row of this token is NaN, and so are the logits after it. Nobody draws it by
            chance, so other requests stay clean.
        generation_config: further entries of generation_config.json, such as {"temperature": 0.7}.
        seed: of the weights.

    Returns: `folder`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, vocab_size)
    geometry = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": max_position,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = (
            LlamaForCausalLM(LlamaConfig(**geometry))
            if sliding_window is None
            else MistralForCausalLM(MistralConfig(**geometry, sliding_window=sliding_window))
        )
        with torch.no_grad():
            for parameter in model.parameters():
                # At the usual scale (0.02) a random model repeats one token for ever; wider weights
                # make each step depend on its context. Norm weights stay 1.
                if parameter.dim() > 1:
                    parameter.normal_(std=1.5 / parameter.shape[-1] ** 0.5)
            if poison_token_id is not None:
                _poison(model, poison_token_id)
    model.save_pretrained(folder)
    entries = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2, **(generation_config or {})}
    (folder / "generation_config.json").write_text(json.dumps(entries))
    return folder


def _poison(model: Any, token_id: int) -> None:
    """The first hidden unit is the same positive number everywhere; this token's logit, and only it, is far below."""
    embedding, output = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    embedding[:, 0] = 2.0
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight[0] = 0.0
        layer.mlp.down_proj.weight[0] = 0.0
    output[:, 0] = 0.0
    output[token_id] = 0.0
    output[token_id, 0] = -60.0
    embedding[token_id] = float("nan")


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level BPE tokenizer: 3 special tokens, 256 bytes, and merges up to `vocab_size`.

    Small vocabularies end early and large ones run out of merges, so ids of the model
    may be without a token; they decode to nothing.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        min_frequency=1,
        show_progress=False,
    )
    backend.train_from_iterator(_CORPUS, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=IM_START,
        eos_token=IM_END,
        unk_token=END_OF_TEXT,
        pad_token=IM_END,
        additional_special_tokens=[IM_START],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
