import copy

import pytest
from tokenizers import AddedToken

from nextstate.chat.formats import OutputFormat, detect_format, opens_reasoning
from nextstate.chat.template import render
from nextstate.engines.model import LoadedModel
from nextstate.errors import ConfigError
from tests.chat.templates import CHATML, LLAMA31, QWEN3, QWEN25


@pytest.fixture
def tokenizer(tiny: LoadedModel):
    return copy.deepcopy(tiny.tokenizer)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, OutputFormat("none", "hermes")),
        (QWEN25, OutputFormat("none", "hermes")),
        (QWEN3, OutputFormat("think", "hermes")),
        (LLAMA31, OutputFormat("none", "llama")),
        ({"default": CHATML, "tool_use": QWEN3}, OutputFormat("think", "hermes")),
    ],
)
def test_the_forms_are_those_of_the_chat_template(tokenizer, template, expected: OutputFormat):
    tokenizer.chat_template = template
    assert detect_format(tokenizer) == expected


def test_the_vocabulary_tells_what_a_template_leaves_out(tokenizer):
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("<|python_tag|>", special=True)])
    tokenizer.chat_template = CHATML
    # The template shows no tools, so the model reads them in our rendering, which asks for the hermes form.
    assert detect_format(tokenizer) == OutputFormat("think", "hermes")
    tokenizer.chat_template = LLAMA31.replace('"parameters"', '"p"')
    assert detect_format(tokenizer) == OutputFormat("think", "llama")


def test_a_setting_overrules_what_the_model_tells(tokenizer):
    tokenizer.chat_template = LLAMA31
    assert detect_format(tokenizer, reasoning="think", tools="hermes") == OutputFormat("think", "hermes")
    tokenizer.chat_template = QWEN3
    assert detect_format(tokenizer, reasoning="none", tools="llama") == OutputFormat("none", "llama")


def test_a_form_that_does_not_exist_is_refused_with_those_that_do(tokenizer):
    with pytest.raises(ConfigError, match=r'tools is "qwen", which does not exist\. Use one of hermes, llama'):
        detect_format(tokenizer, tools="qwen")
    with pytest.raises(ConfigError, match=r'reasoning is "", which does not exist\. Use one of none, think'):
        detect_format(tokenizer, reasoning="")


def test_the_markers_of_a_format_are_those_it_reads():
    assert OutputFormat("none", "llama").markers == {"<|python_tag|>"}
    assert OutputFormat("think", "hermes").markers == {"<think>", "</think>", "<tool_call>", "</tool_call>"}


@pytest.mark.parametrize("as_ids", [True, False])
def test_a_prompt_may_open_the_reasoning(tokenizer, as_ids: bool):
    def opens(text: str) -> bool:
        return opens_reasoning(tokenizer, tokenizer.encode(text, add_special_tokens=False) if as_ids else text)

    assert opens("<|im_start|>assistant\n<think>\n")
    assert opens("<|im_start|>assistant\n<think>")
    assert not opens("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens("<|im_start|>user\n<think><|im_end|>\n<|im_start|>assistant\n")


def test_a_prompt_opens_the_reasoning_with_a_marker_that_is_a_special_token(tokenizer):
    tokenizer.add_tokens([AddedToken("<think>", special=True)])
    tokenizer.chat_template = QWEN3
    assert opens_reasoning(tokenizer, render(tokenizer, [{"role": "user", "content": "Hi"}]))
