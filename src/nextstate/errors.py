"""Errors that a user can do something about. Each says what was seen, what was done and what to do."""

from __future__ import annotations


class NextstateError(Exception):
    """Any error of ours that is worth a sentence instead of a traceback."""


class ConfigError(NextstateError):
    """A setting, file or folder that stops the program before a model loads."""


class ModelError(NextstateError):
    """A model that cannot be found, read or run."""


class AdapterError(NextstateError):
    """An adapter that cannot be loaded; the version that serves goes on serving."""


class AdapterMismatch(AdapterError):
    """An adapter that is whole and was made under other settings. Nothing is wrong with it."""


class SamplingError(NextstateError, ValueError):
    """Sampling parameters that no token can be drawn with."""


class GrammarError(SamplingError):
    """A schema or a tool that answers cannot be held to."""


class EngineFault(NextstateError):
    """The engine failed on a request; the request ends, the others go on."""


class ContextLengthExceeded(NextstateError):
    """A prompt that leaves no room for an answer."""

    def __init__(self, prompt_tokens: int, context_tokens: int) -> None:
        self.prompt_tokens, self.context_tokens = prompt_tokens, context_tokens
        super().__init__(
            f"This model's maximum context length is {context_tokens} tokens. However, your messages are "
            f"{prompt_tokens} tokens long, which leaves no room for an answer. Shorten the prompt."
        )


class TokenMismatch(NextstateError):
    """Reply tokens, log-probs and versions that do not belong together."""

    def __init__(self, turn_id: int, tokens: int, logprobs: int, versions: int) -> None:
        super().__init__(
            f"turn {turn_id} has {tokens} reply tokens, {logprobs} log-probs and {versions} versions; it is "
            "quarantined and will not be learned from. Nothing was padded or guessed. Please report this engine fault."
        )
