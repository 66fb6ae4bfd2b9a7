"""The records that pass between the loops: what each field holds, and in which unit.

Nothing here imports torch, a database or a web framework, so every part can use these words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

from nextstate.errors import TokenMismatch

TokenIds = tuple[int, ...]

Message = Mapping[str, Any]
"""One chat message in OpenAI's shape, its content flattened to a string: {"role": ..., "content": ...}."""


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP = "stop"
    """The model sampled an end token, or a stop string appeared."""
    LENGTH = "length"
    """The token limit or the context window was reached: the answer is truncated."""
    ABORTED = "aborted"
    """The client went away or the server stopped: the answer is not evidence of anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Log-probs are recorded under exactly this transform."""

    max_tokens: int
    temperature: float = 1.0
    """0 picks the most likely token; such a turn carries no exploration and is left out of training."""
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    """How many of the most likely tokens are reported beside each sampled one; changes nothing about what is drawn."""

    @property
    def trainable(self) -> bool:
        """Whether training can reproduce the transform: a plain temperature, nothing cut off."""
        return self.temperature > 0 and self.top_p >= 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRef:
    """Which weights to use: a policy by name, at a version, or at whatever version serves now (None)."""

    name: str = "policy"
    version: int | None = None


BASE = PolicyRef(version=0)
"""The untrained weights: the local judge votes with them, and version 0 of the policy is them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChunk:
    """Tokens that an engine has just sampled for one request, each with its log-prob and version."""

    ids: TokenIds
    logprobs: tuple[float, ...]
    """nats, under the sampling transform in use."""
    versions: tuple[int, ...]
    """policy version behind each token; a publish may land in mid-reply."""
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the most likely ones with their log-probs, best first; empty when not asked for."""
    finish: FinishReason | None = None
    """Set on the last chunk, which may carry no tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """Tokens whose probabilities are wanted, all after one another."""

    ids: TokenIds
    start: int
    """First position whose log-prob is wanted, at least 1 (a first token has no context); len(ids) for none."""
    choices: TokenIds = ()
    """Tokens that might come after `ids`; their log-probs come back too."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    logprobs: tuple[float, ...]
    """[len(ids) - start] nats, of ids[start:] given what stands before each."""
    choice_logprobs: tuple[float, ...]
    """[len(choices)] nats, normalised over the whole vocabulary."""
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation. A reply of [7, 2] carries two log-probs and two versions; its prompt carries neither."""

    turn_id: int
    prompt_ids: TokenIds
    """[P] the prompt as the model saw it, template tokens included."""
    reply_ids: TokenIds
    """[R] sampled tokens, with the end token if one was sampled."""
    reply_logprobs: tuple[float, ...]
    """[R] nats, under the sampling transform in use."""
    reply_versions: tuple[int, ...]
    """[R] policy version behind each token; a publish may land in mid-reply."""
    temperature: float

    def __post_init__(self) -> None:
        counts = len(self.reply_ids), len(self.reply_logprobs), len(self.reply_versions)
        if len(set(counts)) > 1:
            raise TokenMismatch(self.turn_id, *counts)


class Vote(IntEnum):
    """One judge sample about one turn. A judge that abstains casts None, which is not NEUTRAL."""

    GOOD = 1
    NEUTRAL = 0
    BAD = -1


class Source(StrEnum):
    """Who a next state, a verdict or a hint comes from, most trusted first."""

    FEEDBACK = "feedback"
    """Explicit: a thumb or words sent to /v1/feedback."""
    USER = "user"
    ENVIRONMENT = "environment"
    """A status that software reports about the turn: an exit code, a test verdict."""
    TOOL = "tool"
    """Text that a tool returned; never a hint and never a reward by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feedback:
    """What a user said about a turn through /v1/feedback."""

    value: Vote
    words: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnToJudge:
    """All that a judge may see of a turn."""

    turn_id: int
    history: tuple[Message, ...]
    """The conversation up to the answer, oldest first; the last entry is what was answered."""
    answer: str
    """Its text, and its tool calls as lines `name(arguments)` behind it."""
    next_state: tuple[Message, ...]
    """All messages that followed the answer; empty when only feedback arrived."""
    finish_reason: FinishReason
    malformed_calls: int = 0
    """Tool calls in the answer that were none, and stand in it as text."""
    feedback: Feedback | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Hint:
    """A short text that says how the turn should have been done."""

    text: str
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a judge makes of a turn: the aggregate of votes, or hard evidence that made voting needless."""

    turn_id: int
    judge: str
    """Who judged: 'evidence', or a model and a hash of its prompts, e.g. 'scored:smollm2:9f31ab'."""
    value: Vote | None
    """None when every vote abstained."""
    votes: tuple[Vote | None, ...] = ()
    """As cast, kept to audit disagreement; empty when evidence decided."""
    probabilities: Mapping[str, float] | None = None
    """Of the verdict labels, averaged over votes, when the judge gives them."""
    reason: str
    """One sentence for the person who asks why."""
    hints: tuple[Hint, ...] = ()
    """Candidates, most trusted first, duplicates removed."""


class TurnState(StrEnum):
    """Where a turn stands. Each loop takes turns in one state and leaves them in the next."""

    GENERATING = "generating"
    FINISHED = "finished"
    CONTINUED = "continued"
    JUDGED = "judged"
    TRAINING = "training"
    TRAINED = "trained"
    LEFT_OUT = "left_out"


class WaitReason(StrEnum):
    """Why a turn has not been trained yet."""

    BEING_ANSWERED = "being_answered"
    NOTHING_FOLLOWED_YET = "nothing_followed_yet"
    WAITS_FOR_JUDGE = "waits_for_judge"
    WAITS_FOR_UPDATE = "waits_for_update"
    IN_UPDATE = "in_update"


class SkipReason(StrEnum):
    """Why a turn will not be trained. Each has a section in docs/left-out-turns.md."""

    NO_NEXT_STATE = "no_next_state"
    NEUTRAL = "neutral"
    ABSTAINED = "abstained"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    ENGINE_FAULT = "engine_fault"
    SERVER_STOPPED = "server_stopped"
    SIDE_REQUEST = "side_request"
    LEARNING_OFF = "learning_off"
    SAMPLING_NOT_REPRODUCIBLE = "sampling_not_reproducible"
    TOO_LONG = "too_long"
    QUARANTINED = "quarantined"
    JUDGE_GAVE_UP = "judge_gave_up"
    TOO_STALE = "too_stale"
    UPDATE_FAILED = "update_failed"
    VERSION_REJECTED = "version_rejected"


class VersionState(StrEnum):
    """A version is trained as a candidate, then serves or is rejected, and retires when the next one serves."""

    CANDIDATE = "candidate"
    SERVING = "serving"
    RETIRED = "retired"
    REJECTED = "rejected"
