"""A model with next to no arithmetic: what is measured with it is everything around the arithmetic."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NAME = "tiny"
"""What the benchmarks' --model option calls it."""

_CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_BLANK, _BREAK = "Ġ", "Ċ"
"""How a byte-level vocabulary writes them."""


def tiny_model(folder: Path) -> Path:
    """Make a random two-layer Llama with one token for each ASCII character; one token in a hundred ends an answer.

    A token is a character, so each piece of text that a client gets is one token, and none is held back for its bytes.
    """
    characters = [chr(code) for code in range(33, 127)] + [_BLANK, _BREAK]
    bpe = Tokenizer(models.BPE(vocab={character: n for n, character in enumerate(characters)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>"]
    )
    tokenizer.chat_template = _CHATML
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
