"""Messages and tools into the prompt tokens that the model reads, through the tokenizer's own chat template.

Templates differ in what they know of tools: some know nothing, some want a call's arguments as an object, some as
text, some take one call a message. Each template is asked once, with a made-up tool and call; `docs/tools.md` says
what happens to those that know none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError

from nextstate.errors import NextstateError
from nextstate.types import Message, TokenIds

HINT_SUFFIX = "\n\n{hint}"
"""What a hint looks like to the teacher, behind the words of the user."""

Tool = Mapping[str, Any]
"""A tool in OpenAI's shape: {"type": "function", "function": {"name": ..., "parameters": {...}}}."""

_TOOLS_PROMPT = """\
You can use tools. Each line between <tools> and </tools> describes one of them in JSON:
<tools>
{tools}
</tools>

To use a tool, write its name and its arguments as a JSON object between <tool_call> and </tool_call>:
<tool_call>
{{"name": "the tool's name", "arguments": {{"an argument's name": "its value"}}}}
</tool_call>
Use several tools at once by writing several such blocks. The results come back between <tool_response> and \
</tool_response>."""

_REFUSALS = (TemplateError, TypeError, ValueError, KeyError, AttributeError)
"""What a template raises over messages that it does not take."""

_PROBE_NAME, _PROBE_KEY = "nextstate_probe", "nextstate_key"


class MessagesRefused(NextstateError, ValueError):
    """The model's chat template cannot render these messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolSupport:
    """What a chat template does with tools."""

    native: bool
    """Whether it shows tools, calls and results by itself; the other fields mean something only then."""
    text_arguments: bool
    """Whether a call's arguments must be JSON text; else an object, so that JSON is not written as a JSON string."""
    parallel: bool
    """Whether one message may hold several calls."""


def render(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> TokenIds:
    """The prompt for the next answer, generation prompt included.

    Only the template writes control tokens. The text of one inside a message, or inside a web page that a tool has
    read, is text to the model, so nobody can speak in another's role by it.

    Raises:
        MessagesRefused: the template does not take these messages, for instance roles that do not alternate.
    """
    prepared: Sequence[Message] = messages
    with_tools = bool(tools) or any(message.get("tool_calls") for message in messages)
    support = tool_support(tokenizer) if with_tools else None
    if support is not None:
        prepared = list(_for_template(messages, support)) if support.native else _as_text(messages, tools)
    try:
        ids = tokenizer.apply_chat_template(
            [dict(message) for message in prepared],
            tools=[dict(tool) for tool in tools] if tools and support is not None and support.native else None,
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            sanitize_control_tokens=True,
        )
    except _REFUSALS as error:
        raise MessagesRefused(f"The model's chat template does not take these messages: {error}.") from error
    return tuple(ids)


def render_with_hint(tokenizer: Any, messages: Sequence[Message], hint: str, tools: Sequence[Tool] = ()) -> TokenIds:
    """The prompt of the teacher: the same messages, with the hint behind the last words of the user.

    Without a user message, the hint stands behind the last message.

    Raises:
        MessagesRefused: as `render`.
    """
    hinted = [dict(message) for message in messages]
    of_user = [message for message in hinted if message["role"] == "user"]
    target = of_user[-1] if of_user else hinted[-1]
    target["content"] = f"{target['content'] or ''}{HINT_SUFFIX.format(hint=hint)}"
    return render(tokenizer, hinted, tools)


def template_text(tokenizer: Any) -> str:
    """The chat template as it was written; all of them where the tokenizer has several, nothing where it has none."""
    template = tokenizer.chat_template
    return "\n".join(template.values()) if isinstance(template, Mapping) else template or ""


def tool_support(tokenizer: Any) -> ToolSupport:
    """What the tokenizer's chat template does with tools, found out by rendering a made-up one."""
    return _probe(tokenizer, template_text(tokenizer))


@lru_cache(maxsize=16)
def _probe(tokenizer: Any, _template: str) -> ToolSupport:
    """`tool_support`, once for each template that a tokenizer has had."""

    def shown(calls: int, arguments: Any) -> str:
        """What becomes of a conversation with so many calls; empty when the template refuses it."""
        call = {"type": "function", "function": {"name": _PROBE_NAME, "arguments": arguments}}
        messages: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
        if calls:
            with_ids = [{"id": f"callprobe{n}", **call} for n in range(calls)]
            messages.append({"role": "assistant", "content": "", "tool_calls": with_ids})
            messages += [{"role": "tool", "tool_call_id": one["id"], "content": "0"} for one in with_ids]
        nothing = {"type": "object", "properties": {}}
        tool = {"type": "function", "function": {"name": _PROBE_NAME, "description": "?", "parameters": nothing}}
        try:
            return str(
                tokenizer.apply_chat_template(messages, tools=[tool], add_generation_prompt=True, tokenize=False)
            )
        except _REFUSALS:
            return ""

    as_object, as_text = {_PROBE_KEY: 0}, f'{{"{_PROBE_KEY}": 0}}'
    # An object put into text without a thought comes out as Python writes it.
    takes_object = _PROBE_KEY in (text := shown(1, as_object)) and f"'{_PROBE_KEY}'" not in text
    takes_text = _PROBE_KEY in shown(1, as_text)
    return ToolSupport(
        native=_PROBE_NAME in shown(0, None) and (takes_object or takes_text),
        text_arguments=not takes_object,
        parallel=shown(2, as_object if takes_object else as_text) != "",
    )


def _for_template(messages: Sequence[Message], support: ToolSupport) -> Iterator[Message]:
    """The messages, with their calls as the template wants them."""
    for message in messages if support.parallel else _one_call_a_message(messages):
        if message.get("tool_calls"):
            yield {**message, "tool_calls": [_with_arguments(call, support) for call in message["tool_calls"]]}
        else:
            yield message


def _with_arguments(call: Mapping[str, Any], support: ToolSupport) -> dict[str, Any]:
    arguments = call["function"]["arguments"]
    if not support.text_arguments:
        arguments = _parsed(arguments)
    elif not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": arguments}}


def _parsed(arguments: Any) -> Any:
    """The object that a call's arguments are; as they came when they are none."""
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}  # how some clients write a call without arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _one_call_a_message(messages: Sequence[Message]) -> Iterator[Message]:
    """The same conversation as if the model had waited for each result before the next call.

    A result goes to the call that it names, and where ids are lost to the first that has none.
    """
    at = 0
    while at < len(messages):
        message = messages[at]
        at += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            yield message
            continue
        results = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        ids = {call.get("id") for call in calls}
        for n, call in enumerate(calls):
            # What the message said and thought, it said before its first call.
            said = message if n == 0 else {"role": message["role"], "content": ""}
            yield {**said, "tool_calls": [call]}
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            own = own or [one for one in results if one.get("tool_call_id") not in ids]
            if own:
                results.remove(own[0])
                yield own[0]
        yield from results


def _as_text(messages: Sequence[Message], tools: Sequence[Tool]) -> list[Message]:
    """The default rendering, for templates that know no tools: everything as text, in the hermes form.

    A result that no call came before is passed on as it is; what it means is for the template to say.
    """
    texts: list[Message] = []
    called = answering = False
    for message in messages:
        if message.get("tool_calls"):
            called = True
            blocks = [_call_text(call["function"]) for call in message["tool_calls"]]
            rest = {key: value for key, value in message.items() if key != "tool_calls"}
            said = [message["content"]] if message.get("content") else []
            texts.append({**rest, "content": "\n".join(said + blocks)})
        elif called and message["role"] == "tool":
            block = f"<tool_response>\n{message['content']}\n</tool_response>"
            # Results of one answer share a message: many templates refuse two of one role in a row.
            if answering:
                block = f"{texts.pop()['content']}\n{block}"
            texts.append({"role": "user", "content": block})
        else:
            texts.append(message)
        answering = called and message["role"] == "tool"
    if not tools:
        return texts
    described = _TOOLS_PROMPT.format(tools="\n".join(json.dumps(dict(tool), ensure_ascii=False) for tool in tools))
    if texts and texts[0]["role"] == "system":
        return [{**texts[0], "content": f"{texts[0]['content']}\n\n{described}"}, *texts[1:]]
    return [{"role": "system", "content": described}, *texts]


def _call_text(function: Mapping[str, Any]) -> str:
    call = {"name": function["name"], "arguments": _parsed(function["arguments"])}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
