"""How a model writes what is not plain text: which markers stand around its reasoning and its tool calls.

hermes   <tool_call>{"name": "f", "arguments": {...}}</tool_call>, with newlines inside; Qwen, Hermes, many others
llama    {"name": "f", "parameters": {...}}, bare at the beginning of an answer or behind <|python_tag|>; Llama 3.1+
think    <think>...</think> before the answer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from nextstate.chat.template import template_text, tool_support
from nextstate.errors import ConfigError

ReasoningForm = Literal["none", "think"]
ToolForm = Literal["hermes", "llama"]

OPEN_THINK, CLOSE_THINK = "<think>", "</think>"
OPEN_CALL, CLOSE_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"

_PROMPT_END_TOKENS = 32
"""More than `<think>` and the newlines behind it take, even if every byte is a token."""


@dataclass(frozen=True, slots=True)
class OutputFormat:
    reasoning: ReasoningForm
    tools: ToolForm

    @property
    def markers(self) -> frozenset[str]:
        """What the parser must see, even where the vocabulary has it as a special token."""
        of_tools = {OPEN_CALL, CLOSE_CALL} if self.tools == "hermes" else {PYTHON_TAG}
        return frozenset(of_tools | ({OPEN_THINK, CLOSE_THINK} if self.reasoning == "think" else set()))


def detect_format(tokenizer: Any, *, reasoning: str | None = None, tools: str | None = None) -> OutputFormat:
    """The forms that a model was trained on, as its chat template and its vocabulary tell.

    A model whose template knows no tools reads them in our default rendering, which asks for the hermes form.

    Args:
        reasoning: the form to use instead of the detected one.
        tools: likewise.

    Raises:
        ConfigError: a form of that name does not exist.
    """
    return OutputFormat(
        reasoning=cast(ReasoningForm, _known("reasoning", reasoning, ReasoningForm)) or _reasoning_form(tokenizer),
        tools=cast(ToolForm, _known("tools", tools, ToolForm)) or _tool_form(tokenizer),
    )


def opens_reasoning(tokenizer: Any, prompt: Sequence[int] | str) -> bool:
    """Whether a prompt, as text or as token ids, has already opened the reasoning that the answer goes on with."""
    end = prompt if isinstance(prompt, str) else tokenizer.decode(list(prompt[-_PROMPT_END_TOKENS:]))
    return bool(end.rstrip().endswith(OPEN_THINK))


def _known(setting: str, name: str | None, forms: Any) -> str | None:
    if name is not None and name not in get_args(forms):
        raise ConfigError(
            f'The output form for {setting} is "{name}", which does not exist. Use one of '
            f"{', '.join(get_args(forms))}, or leave the setting out to go by the model."
        )
    return name


def _reasoning_form(tokenizer: Any) -> ReasoningForm:
    return "think" if OPEN_THINK in template_text(tokenizer) or OPEN_THINK in tokenizer.get_vocab() else "none"


def _tool_form(tokenizer: Any) -> ToolForm:
    template = template_text(tokenizer)
    if not tool_support(tokenizer).native or OPEN_CALL in template:
        return "hermes"
    # The template of Llama 3.2 asks for "parameters" and never writes the tag, which its vocabulary has.
    says_llama = PYTHON_TAG in template or '"parameters"' in template or PYTHON_TAG in tokenizer.get_vocab()
    return "llama" if says_llama else "hermes"
