"""What every engine can do: tokens in, tokens and log-probs out, score, publish."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from nextstate.types import PolicyRef, Sampling, ScoreRequest, TokenChunk, TokenIds, TokenScores


class Engine(Protocol):
    def generate(self, prompt: TokenIds, sampling: Sampling, policy: PolicyRef) -> AsyncIterator[TokenChunk]:
        """Sample a reply. The last chunk has a finish reason. Closing the iterator frees the request at once.

        Raises:
            ContextLengthExceeded: the prompt leaves no room for a reply.
            SamplingError: this model cannot sample so; GrammarError, if it is for the grammar.
            EngineFault: the engine failed; the tokens so far are not an answer.
        """
        ...

    async def score(self, sequences: Sequence[ScoreRequest], policy: PolicyRef) -> list[TokenScores]:
        """Log-probs of given tokens, one answer a request, in order."""
        ...

    async def publish(self, policy: PolicyRef, artifact: Path) -> None:
        """Load the adapter or the weights in `artifact` as a version; `serve_version` makes it the one that answers.

        Raises:
            AdapterError: it cannot be loaded; nothing has changed.
        """
        ...

    def serve_version(self, version: int) -> None:
        """Answer with this loaded version from the next decoding step on, streams in flight included."""
        ...

    @property
    def version(self) -> int:
        """The version that answers now."""
        ...
