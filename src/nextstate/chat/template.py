"""Messages into the prompt tokens that the model reads, through the tokenizer's own chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from nextstate.errors import NextstateError
from nextstate.types import Message, TokenIds

HINT_SUFFIX = "\n\n{hint}"
"""What a hint looks like to the teacher, behind the words of the user."""


class MessagesRefused(NextstateError, ValueError):
    """The model's chat template cannot render these messages."""


def render(tokenizer: Any, messages: Sequence[Message]) -> TokenIds:
    """The prompt for the next answer, generation prompt included.

    Raises:
        MessagesRefused: the template does not take these messages, for instance roles that do not alternate.
    """
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        raise MessagesRefused(f"The model's chat template does not take these messages: {error}.") from error
    return tuple(ids)


def render_with_hint(tokenizer: Any, messages: Sequence[Message], hint: str) -> TokenIds:
    """The prompt of the teacher: the same messages, with the hint behind the last words of the user.

    Without a user message, the hint stands behind the last message.

    Raises:
        MessagesRefused: as `render`.
    """
    hinted = [dict(message) for message in messages]
    of_user = [message for message in hinted if message["role"] == "user"]
    target = of_user[-1] if of_user else hinted[-1]
    target["content"] = f"{target['content'] or ''}{HINT_SUFFIX.format(hint=hint)}"
    return render(tokenizer, hinted)
