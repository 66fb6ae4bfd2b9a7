"""What the dialects' requests have in common: sampling, tools, who asks, and the turn that comes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field, PositiveInt

from nextstate.collect.request import Incoming
from nextstate.dialects.reading import Read
from nextstate.engines.grammar import json_object_grammar, json_schema_grammar, tool_call_grammar
from nextstate.errors import GrammarError
from nextstate.serve.answer import Answer, Ask, open_answer
from nextstate.serve.auth import caller, learns, owner
from nextstate.serve.body import RequestBody
from nextstate.serve.errors import ApiError
from nextstate.serve.models import resolve_model
from nextstate.serve.services import Services
from nextstate.types import Sampling, TokenIds

_MAX_KEY = 256


class CommonBody(RequestBody, extra="allow"):
    """The fields that all dialects share, by OpenAI's names and ours. Unknown ones are kept, to be counted."""

    model: str = "policy"
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    """Logits are divided by it; by less than this, they would leave float32."""
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = None
    user: str | None = None
    """Keeps the conversations of one key apart."""
    session_id: Annotated[str, Field(max_length=_MAX_KEY)] | None = None
    turn_type: Literal["main", "side"] | None = None
    session_done: bool | None = None
    learn: bool | None = None
    """False: answer as ever, and never judge or train."""


_KNOWN_IGNORED = frozenset(
    {
        "background", "cache_control", "chat_template_kwargs", "client_metadata", "container", "context_management",
        "conversation", "enable_thinking", "include", "inference_geo", "max_tool_calls", "mcp_servers", "metadata",
        "moderation", "output_config", "prediction", "prompt", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning", "reasoning_effort", "safety_identifier", "service_tier", "store",
        "stream_options", "text", "thinking", "top_logprobs", "truncation", "verbosity", "web_search_options",
    }
)  # fmt: skip
"""Fields that get a metric under their own name; any other counts as 'other', so that the page cannot grow."""


def count_ignored(services: Services, body: CommonBody, read: Read | None = None) -> None:
    """Count what a request says and nothing here acts on."""
    counter = services.metrics.ignored_fields
    extra = set(body.model_extra or ())
    known = extra & _KNOWN_IGNORED
    for field in known:
        counter.labels(field).inc()
    if extra - known:
        counter.labels("other").inc(len(extra - known))
    for what, times in (read.ignored if read is not None else {}).items():
        # Of "tool 'web_search'" only the first word: the rest is the client's to choose, without bound.
        counter.labels(what.partition(" ")[0]).inc(times)


def refuse_unreadable(read: Read, param: str = "messages") -> None:
    """Raises ApiError where a message holds what is no text: without it, the message says something else."""
    if read.unreadable:
        what = ", ".join(read.unreadable)
        raise ApiError(
            400,
            f"'{param}' holds {what}; this server takes text only. Nothing was answered.",
            param=param,
            code="unsupported_content",
        )


def refuse(param: str, why: str = "asks for something that this server cannot do") -> ApiError:
    return ApiError(400, f"'{param}' {why}; leave it out.", param=param, code="unsupported_parameter")


def _is_count(text: str) -> bool:
    # Python refuses to read numbers of some thousand digits.
    return text.isdecimal() and len(text) < 19


def sampling_of(
    services: Services,
    body: CommonBody,
    *,
    max_tokens: PositiveInt | None,
    stop: Sequence[str] = (),
    grammar: str | None = None,
    top_logprobs: int = 0,
) -> Sampling:
    """How to draw, from the fields that all dialects share.

    Raises:
        ApiError: a bias for what is no token.
    """
    serve = services.config.serve
    vocabulary = len(services.engine.loaded.tokenizer)
    bias = []
    for token, value in (body.logit_bias or {}).items():
        if not _is_count(token) or int(token) >= vocabulary:
            raise ApiError(
                400, f"logit_bias names '{token[:99]}'; tokens are numbers below {vocabulary}.", param="logit_bias"
            )
        bias.append((int(token), value))
    return Sampling(
        max_tokens=max_tokens or serve.max_tokens,
        temperature=serve.temperature if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else body.top_p,
        top_k=max(0, body.top_k or 0),
        min_p=body.min_p or 0.0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty or 1.0,
        logit_bias=tuple(bias),
        grammar=grammar,
        seed=body.seed,
        stop=tuple(stop),
        top_logprobs=top_logprobs,
    )


_YES, _NO = frozenset({"1", "true", "yes", "on"}), frozenset({"", "0", "false", "no", "off"})

Choice = Literal["auto", "none", "required"]


def only_tools(read: Read, names: Sequence[str]) -> Read:
    """A request of which only these tools may be called.

    Raises:
        ApiError: one of them is not there.
    """
    there = {tool["function"]["name"] for tool in read.tools}
    if strange := [name for name in names if name not in there]:
        raise ApiError(
            400, f"'tool_choice' allows the tool '{strange[0]}', and 'tools' has none such.", param="tool_choice"
        )
    return replace(read, tools=tuple(tool for tool in read.tools if tool["function"]["name"] in names))


def grammar_of(
    services: Services,
    tools: Sequence[Mapping[str, Any]],
    *,
    choice: Choice = "auto",
    named: str | None = None,
    parallel: bool = True,
    json_schema: Mapping[str, Any] | None = None,
    json_object: bool = False,
    param: str = "response_format",
) -> str | None:
    """What the answer is held to: a tool call, a JSON schema, any JSON object, or nothing.

    Raises:
        ApiError: a named tool that is not there, a form beside tools, or a schema that cannot be held to.
    """
    must_call = choice == "required" or named is not None
    formed = json_schema is not None or json_object
    if must_call and not any(named in (None, tool["function"]["name"]) for tool in tools):
        wanted = f"the tool '{named}'" if named is not None else "a tool call"
        raise ApiError(400, f"'tool_choice' asks for {wanted}, and 'tools' has none such.", param="tool_choice")
    if formed and tools and choice != "none":
        raise ApiError(
            400,
            f"'{param}' asks for JSON, and 'tools' offers calls: an answer can be held to one form only. Leave one "
            "out, or send tool_choice 'none'.",
            param=param,
            code="unsupported_parameter",
        )
    try:
        if must_call:
            return tool_call_grammar(tools, services.form.tools, named, parallel=parallel)
        if json_schema is not None:
            return json_schema_grammar(json_schema)
    except GrammarError as error:
        raise ApiError(400, str(error), param="tools" if must_call else param, code="invalid_schema") from error
    return json_object_grammar() if json_object else None


def ask_of(
    services: Services,
    request: Request,
    body: CommonBody,
    read: Read,
    *,
    dialect: str,
    sampling: Sampling,
    callable_tools: bool = True,
    parallel_calls: bool = True,
    continues: int | None = None,
    prompt_ids: TokenIds | None = None,
    prompt_field: str = "messages",
    report_logprobs: bool = False,
) -> Ask:
    """A request in our own words.

    Args:
        callable_tools: False where the client forbids calls: the model does not see the tools then.
        continues: the turn whose answer the client says it continues.
        prompt_ids: the prompt itself, for dialects without messages; the text then comes raw.
        prompt_field: what the dialect calls the field that the prompt is made of.

    Raises:
        ApiError: it asks for what this server does not have.
    """
    headers = {name.lower(): value for name, value in request.headers.items()}
    turn_type = headers.get("x-turn-type", "main").lower()
    if turn_type not in ("main", "side"):
        raise ApiError(400, f"X-Turn-Type is '{turn_type}'; it must be 'main' or 'side'.", param="turn_type")
    if len(headers.get("x-session-id", "")) > _MAX_KEY:
        raise ApiError(400, f"X-Session-Id has more than {_MAX_KEY} characters.", param="session_id")
    who = caller(request)
    done = headers.get("x-session-done", "").lower()
    if done not in _YES | _NO:
        raise ApiError(400, f"X-Session-Done is '{done}'; it must be '1' or '0'.", param="session_done")
    retries = headers.get("x-stainless-retry-count", "0")
    fields = body.model_dump(exclude={"messages", "input", "tools", "system", "prompt", "prompt_ids"})
    incoming = Incoming(
        user=owner(who, body.user),
        messages=read.messages,
        tools=read.tools,
        model=body.model,
        headers=headers,
        body=fields,
        dialect=dialect,
        continues=continues,
        retry_count=int(retries) if _is_count(retries) else 0,
    )
    return Ask(
        incoming=incoming,
        sampling=sampling,
        policy=resolve_model(services.engine, body.model),
        learn=learns(who, headers, body.learn),
        session_done=done in _YES if done else bool(body.session_done),
        tools=read.tools if callable_tools else (),
        parallel_calls=parallel_calls,
        prompt_ids=prompt_ids,
        prompt_field=prompt_field,
        keep_raw=prompt_ids is not None,
        report_logprobs=report_logprobs,
    )


async def open_answers(services: Services, ask: Ask, n: int) -> list[Answer]:
    """`n` answers to one request, each a turn of its own. With a seed, each has its own: seed, seed + 1, ...

    Raises:
        ApiError: there is no room for them, or as `open_answer`; answers that had begun are given up.
    """
    _take_places(services, n)
    answers: list[Answer] = []
    try:
        for i in range(n):
            seed = None if ask.sampling.seed is None else ask.sampling.seed + i
            one = replace(ask, sampling=replace(ask.sampling, seed=seed), beside=answers[0] if answers else None)
            answers.append(await open_answer(services, one))
    except BaseException:
        services.places.taken -= n - len(answers)  # those that had begun give theirs back themselves
        for answer in answers:
            answer.abandon()
        raise
    return answers


def _take_places(services: Services, n: int) -> None:
    """All or none, before anything is written: what was begun and given up again would look like a client that left.

    Raises:
        ApiError: there is no room now, or there never is.
    """
    if n > services.capacity:
        raise ApiError(
            400, f"'n' asks for {n} answers at once; this server has room for {services.capacity}.", param="n"
        )
    if services.places.taken + n > services.capacity:
        services.metrics.overloaded.inc()
        raise ApiError(
            429,
            f"{services.places.taken} answers are under way, and this server has room for {services.capacity}. "
            "Try again soon.",
            type="rate_limit_error",
            code="overloaded",
            headers={"Retry-After": "1"},
        )
    services.places.taken += n
