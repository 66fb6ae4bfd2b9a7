import pytest

from nextstate.chat.template import HINT_SUFFIX, MessagesRefused, render, render_with_hint
from nextstate.engines.model import LoadedModel

HELLO = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]


def test_a_prompt_ends_where_the_answer_begins(tiny: LoadedModel):
    text = tiny.tokenizer.decode(render(tiny.tokenizer, HELLO))
    assert text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_hint_stands_behind_the_last_words_of_the_user(tiny: LoadedModel):
    messages = [*HELLO, {"role": "assistant", "content": "Hi"}, {"role": "user", "content": "More"}]
    text = tiny.tokenizer.decode(render_with_hint(tiny.tokenizer, messages, "in French"))
    assert "user\nHello<|im_end|>" in text
    assert f"user\nMore{HINT_SUFFIX.format(hint='in French')}<|im_end|>" in text
    assert messages[-1]["content"] == "More"


def test_a_hint_stands_behind_the_last_message_when_no_user_has_spoken(tiny: LoadedModel):
    messages = [{"role": "system", "content": "One"}, {"role": "system", "content": "Two"}]
    text = tiny.tokenizer.decode(render_with_hint(tiny.tokenizer, messages, "shortly"))
    assert "One<|im_end|>" in text
    assert f"Two{HINT_SUFFIX.format(hint='shortly')}<|im_end|>" in text


def test_messages_that_the_template_does_not_take_are_refused_with_its_reason(tiny: LoadedModel):
    with pytest.raises(MessagesRefused, match="a tool speaks first"):
        render(tiny.tokenizer, [{"role": "tool", "content": "42"}])
