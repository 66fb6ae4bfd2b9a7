"""The records that pass between the loops: what each field holds, and in which unit.

Nothing here imports torch, a database or a web framework, so every part can use these words.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Any

from nextstate.errors import SamplingError, TokenMismatch

TokenIds = tuple[int, ...]

LEAST_TEMPERATURE = 1e-3
"""Lower ones count as 0: dividing by them leaves float32 nothing to tell the likely from the certain by."""

MAX_TOP_LOGPROBS = 20
"""As many as OpenAI's API reports."""

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
    """How tokens are drawn. Log-probs are recorded under exactly this transform.

    `engines/sampling.py` says in which order the parts apply.
    """

    max_tokens: int
    temperature: float = 1.0
    """0 picks the most likely token; such a turn carries no exploration and is left out of training. So does whatever
    is below LEAST_TEMPERATURE."""
    top_p: float = 1.0
    """Only the smallest set of most likely tokens with so much probability can be drawn."""
    top_k: int = 0
    """Only so many of the most likely tokens can be drawn; 0 for all."""
    min_p: float = 0.0
    """Tokens less likely than this share of the most likely one's probability cannot be drawn."""
    presence_penalty: float = 0.0
    """Taken off the logit of every token that the reply already has."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token once for each time that the reply has it."""
    repetition_penalty: float = 1.0
    """Divides positive logits, and multiplies others, of every token in the prompt or the reply."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Token and what is added to its logit."""
    grammar: str | None = None
    """Made by `engines/grammar.py`; only tokens that go on with it can be drawn."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int = 0
    """How many of the most likely tokens are reported beside each sampled one; changes nothing about what is drawn."""

    def __post_init__(self) -> None:
        allowed = {
            "temperature": 0 <= self.temperature < math.inf,
            "top_p": 0 <= self.top_p <= 1,
            "top_k": self.top_k >= 0,
            "min_p": 0 <= self.min_p <= 1,
            "presence_penalty": math.isfinite(self.presence_penalty),
            "frequency_penalty": math.isfinite(self.frequency_penalty),
            "repetition_penalty": 0 < self.repetition_penalty < math.inf,
            "logit_bias": all(token >= 0 and math.isfinite(bias) for token, bias in self.logit_bias),
            "top_logprobs": 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS,
        }
        for name, fine in allowed.items():
            if not fine:
                raise SamplingError(f"{name} is {getattr(self, name)}, which no token can be drawn with.")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken, with certainty."""
        return self.temperature < LEAST_TEMPERATURE

    @property
    def why_not_trainable(self) -> str | None:
        """What training cannot reproduce, e.g. 'top_p 0.9 and a grammar mask'; None for a plain temperature."""
        parts = {
            f"temperature {self.temperature:g}": self.greedy,
            f"top_p {self.top_p}": self.top_p < 1,
            f"top_k {self.top_k}": self.top_k > 0,
            f"min_p {self.min_p}": self.min_p > 0,
            f"presence_penalty {self.presence_penalty}": self.presence_penalty != 0,
            f"frequency_penalty {self.frequency_penalty}": self.frequency_penalty != 0,
            f"repetition_penalty {self.repetition_penalty}": self.repetition_penalty != 1,
            "a logit bias": any(bias != 0 for _, bias in self.logit_bias),
            "a grammar mask": self.grammar is not None,
        }
        used = [what for what, so in parts.items() if so]
        if len(used) > 1:
            return f"{', '.join(used[:-1])} and {used[-1]}"
        return used[0] if used else None

    @property
    def trainable(self) -> bool:
        """Whether training can reproduce the transform: a plain temperature, nothing cut off or moved."""
        return self.why_not_trainable is None

    def as_json(self) -> dict[str, Any]:
        """As the store keeps it: the limit, the temperature, and whatever else is not at its default."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        values = {"temperature": self.temperature, **changed}
        # Lists, so that a row is the same before it is written and after it was read.
        if self.stop:
            values["stop"] = list(self.stop)
        if self.logit_bias:
            values["logit_bias"] = [list(pair) for pair in self.logit_bias]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Sampling:
        """What `as_json` made; rows of earlier releases too, which name their defaults and lack later fields."""
        sequences = {
            "stop": tuple(values.get("stop", ())),
            "logit_bias": tuple((int(token), float(bias)) for token, bias in values.get("logit_bias", ())),
        }
        return cls(**{**values, **sequences})


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
    """For each token the most likely ones with their log-probs, best first; empty when not asked for. Under the same
    distribution as `logprobs`: tokens that could not be drawn are missing, so at temperature 0 there is one."""
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
    layers: tuple[int, ...] = ()
    """Layers, counted from 1, whose hidden state at the last of `ids` comes back too."""
    temperature: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    logprobs: tuple[float, ...]
    """[len(ids) - start] nats, of ids[start:] given what stands before each."""
    choice_logprobs: tuple[float, ...]
    """[len(choices)] nats, normalised over the whole vocabulary."""
    version: int
    states: tuple[tuple[float, ...], ...] = ()
    """[len(layers)][H] as the request asked for them."""


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
    lease_until: float | None = None
    """Seconds since the epoch until which it is claimed; it tells one claim from the next."""


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
    OFF_POLICY = "off_policy"
    UPDATE_FAILED = "update_failed"
    VERSION_REJECTED = "version_rejected"
    HELD_OUT = "held_out"
    REDACTED = "redacted"
    FORGOTTEN = "forgotten"
    EXPIRED = "expired"


class VersionState(StrEnum):
    """A version is trained as a candidate, then serves or is rejected, and retires when the next one serves; or it is
    rolled back by the watch, and never serves again. Of one with full weights that retired long ago the weights are
    removed: nobody can go back to it."""

    CANDIDATE = "candidate"
    SERVING = "serving"
    RETIRED = "retired"
    REJECTED = "rejected"
    ROLLED_BACK = "rolled_back"
    REMOVED = "removed"
