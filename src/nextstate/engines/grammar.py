"""Holding an answer to a form: a JSON schema, or a tool call as the model writes one.

    builders   json_schema_grammar(), json_object_grammar(), tool_call_grammar()     a request's wish -> text
    Grammars   compiles the text for one tokenizer, off the event loop               text -> Matcher
    Matcher    which tokens may come next, token by token; ends tokens only when the form is complete

The text is what `Sampling.grammar` holds and what a turn is stored with. The library behind it is llguidance.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor

from nextstate.errors import GrammarError

_WHITESPACE = r"\n {0,16}| {1,2}"
"""Between the parts of a JSON text: a break with indentation, or a blank. Bounded, for small models like to go on."""

_KEPT_GRAMMARS = 64
# A schema comes from a client, and its masks are computed between the steps of everybody's streams: a tenth of what the
# library allows. Its own bounds let a hostile pattern take seconds.
_LIMITS = LLParserLimits(initial_lexer_fuel=100_000, step_lexer_fuel=20_000, verbose_errors=False)
_TAGS = ("<tool_call>", "</tool_call>")
_OPEN, _CLOSE = (f"{name}: {json.dumps(tag)}\n" for name, tag in zip(("opening", "closing"), _TAGS, strict=True))
_SHIFTS = torch.arange(8, dtype=torch.uint8)


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """An answer that is one JSON value of this schema.

    Raises:
        GrammarError: a schema that is wrong, that nothing can fulfil, or with a keyword that cannot be enforced.
    """
    return _checked(f"start: %json {_schema_text(schema)}\n", "The JSON schema")


def json_object_grammar() -> str:
    """An answer that is one JSON object, whatever is in it."""
    return json_schema_grammar({"type": "object"})


def tool_call_grammar(
    tools: Sequence[Mapping[str, Any]], form: Literal["hermes", "llama"], name: str | None, *, parallel: bool = True
) -> str:
    """An answer that is a tool call.

    Args:
        tools: in OpenAI's shape, {"type": "function", "function": {"name": ..., "parameters": {...}}}. Of parameters
            that are not marked strict, keywords that cannot be enforced are passed over.
        form: hermes is `<tool_call>\\n{"name": ..., "arguments": {...}}\\n</tool_call>`, one after another on new
            lines; llama is one `{"name": ..., "parameters": {...}}`.
        name: of the one tool to call, once; None for any of them.
        parallel: whether more than one call may follow one another, eight at most: a small model does not come to an
            end by itself.

    Raises:
        GrammarError: no such tool, or parameters that are wrong or that nothing can fulfil.
    """
    functions = [tool["function"] for tool in tools if tool.get("type") == "function"]
    functions = [function for function in functions if name is None or function["name"] == name]
    if not functions:
        raise GrammarError(f"The tool '{name}' is not in tools." if name else "There is no tool that could be called.")
    key = "arguments" if form == "hermes" else "parameters"
    objects = []
    for function in functions:
        opening = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": '
        objects.append(f"{json.dumps(opening)} %json {_parameters_text(function)} {json.dumps('}')}\n")
    choice = "call: " + " | ".join(f"tool_{n}" for n in range(len(objects))) + "\n"
    if form == "llama":
        start = "start: call\n"
    else:
        more = "" if name is not None or not parallel else r' ("\n" tagged){0,7}'
        start = f'start: tagged{more}\ntagged: opening "\\n" call "\\n" closing\n{_OPEN}{_CLOSE}'
    try:
        return _checked(start + choice + "".join(f"tool_{n}: {text}" for n, text in enumerate(objects)), "tools")
    except GrammarError:
        # Only now one by one, to say which: of a thousand tools that takes ten times as long as all at once.
        for function, text in zip(functions, objects, strict=True):
            _checked(f"start: {text}", f"The schema of the tool '{function['name']}'")
        raise


def _parameters_text(function: Mapping[str, Any]) -> str:
    schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
    kinds = schema.get("type", "object")
    if "object" not in (kinds if isinstance(kinds, list) else [kinds]):
        raise GrammarError(f"The parameters of the tool '{function['name']}' are of type {kinds!r}, not 'object'.")
    return _schema_text({**schema, "type": "object"}, lenient=not function.get("strict"))


def _schema_text(schema: Mapping[str, Any], *, lenient: bool = False) -> str:
    # Ours in place of whatever the client wrote there: it would change how the text is read.
    options = {"whitespace_pattern": _WHITESPACE, "lenient": lenient}
    return json.dumps({**schema, "x-guidance": options})


def _checked(grammar: str, what: str) -> str:
    wrong, said = LLMatcher.validate_grammar_with_warnings(grammar)
    if wrong:
        # Then the library quotes our grammar, which is not what the client wrote.
        reason = said[0].partition("\n   1 | ")[0].rpartition("failed to compile JSON schema: ")[2]
        raise GrammarError(f"{what} cannot be enforced: {' '.join(reason.split())}. Leave that out, or ask without it.")
    return grammar


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


class Matcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    @property
    def error(self) -> str:
        """Why nothing can follow any more, e.g. a limit of the library; empty while something can."""
        return _first_line(self._matcher.get_error())

    def mask(self, vocabulary: int) -> Tensor:
        """[V] bool: the tokens that may come next; only end tokens when the form is complete, none after an error."""
        if self._matcher.is_error():
            return torch.zeros(vocabulary, dtype=torch.bool)
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)
        bits = ((packed[:, None] >> _SHIFTS) & 1).bool().flatten()[:vocabulary]
        # A model may have rows for which its tokenizer has no token.
        return torch.nn.functional.pad(bits, (0, vocabulary - len(bits)))

    def accept(self, token: int) -> None:
        """This token came next. One that the mask did not allow is an error, which stays."""
        self._matcher.consume_token(token)


class Grammars:
    """Grammars made ready for one tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Any, end_ids: Collection[int]) -> None:
        """Args:
        tokenizer: a fast one of transformers.
        end_ids: tokens that end an answer.
        """
        self._tokenizer, self._end_ids = tokenizer, sorted(end_ids)
        self._lock = threading.Lock()
        self._ready: OrderedDict[str, LLMatcher] = OrderedDict()
        self._built: LLTokenizer | None = None

    def matcher(self, grammar: str) -> Matcher:
        """At the beginning of a grammar. Takes up to seconds the first time, so call it in a thread.

        Raises:
            GrammarError: the text is no grammar, or the tokenizer is of a kind that cannot be held to one.
        """
        with self._lock:
            ready = self._ready.get(grammar)
            if ready is None:
                ready = LLMatcher(self._build(), self._with_special_tags(grammar), log_level=0, limits=_LIMITS)
                # The first mask does most of the work for those that follow, and finds out what nothing can fulfil.
                ready.compute_bitmask()
                if ready.is_error():
                    said = _first_line(ready.get_error())
                    why = "nothing can fulfil it" if said.startswith("NoExtension") else said
                    raise GrammarError(f"This JSON schema cannot be enforced: {why}. Change it, or ask without it.")
                self._ready[grammar] = ready
            self._ready.move_to_end(grammar)
            while len(self._ready) > _KEPT_GRAMMARS:
                self._ready.popitem(last=False)
            return Matcher(ready.deep_copy())

    def _build(self) -> LLTokenizer:
        if self._built is None:
            try:
                self._built = from_tokenizer(self._tokenizer, eos_token=self._end_ids or None)
            except ValueError as error:
                raise GrammarError(
                    f"This model's tokenizer cannot be held to a grammar ({error}). Serve a model with a fast "
                    "tokenizer (a tokenizer.json), or ask without response_format and tool_choice."
                ) from error
        return self._built

    def _with_special_tags(self, grammar: str) -> str:
        """A model with tokens of its own for the tags writes those, and a text in quotes would never match them."""
        for rule, tag in zip((_OPEN, _CLOSE), _TAGS, strict=True):
            token = self._tokenizer.get_added_vocab().get(tag)
            if token is not None:
                grammar = grammar.replace(f"\n{rule}", f"\n{rule.partition(':')[0]}: <[{token}]>\n")
        return grammar
