"""Scored voting: the judge model writes nothing; its log-probs are read in one prefill. Good for small models.

    turn ─▶ label prompt       log-probs of ' good', ' none', ' bad' after the turn    ─┐
         └▶ likelihood prompt  log-prob of the user's reply in three lists of replies   ─┴▶ calibration ─▶ one vote

Both readings go into one calibrated vote. Counting them as two votes was measured and is worse: what one reading
is unsure about, the other often knows, and a majority throws that away.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any

from nextstate.engines.base import Engine
from nextstate.errors import EngineFault
from nextstate.judge.calibration import Calibration, Readings, centred, content_free, shipped
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.prompts import LABEL, LIKELIHOOD, label_ids, label_text, likelihood_text, prompts_hash, reply_of
from nextstate.judge.votes import NEUTRAL_AT, SIGN_AT, vote_of
from nextstate.types import BASE, FinishReason, ScoreRequest, TokenIds, TurnToJudge, Verdict, Vote

log = logging.getLogger(__name__)

CONTENT_FREE = ("N/A", "...", "[text]")
"""Replies that say nothing: what a model makes of them is its prejudice."""


class ScoredJudge:
    """Votes with the base weights of an engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        model: str,
        calibration: Calibration | None = None,
        sign_at: float = SIGN_AT,
        neutral_at: float = NEUTRAL_AT,
    ) -> None:
        """
        Args:
            tokenizer: a Hugging Face tokenizer of the engine's model.
            model: a short name for verdicts; it decides nothing.
            calibration: None measures the model's content-free readings at the first verdict, and takes the shipped
                values if they were fitted for this model, else the content-free ones.
            sign_at: probability from which a vote is good or bad.
            neutral_at: probability from which a vote is neutral; between the two the judge abstains.

        Raises:
            ModelError: a verdict label is not one token for this tokenizer.
        """
        self._engine = engine
        self._model = model
        self._sign_at, self._neutral_at = sign_at, neutral_at
        self._tokenizer = tokenizer
        self._label_ids = label_ids(tokenizer)
        self._label_prefix = _prefix_ids(tokenizer, LABEL.constant)
        self._list_prefixes = tuple(_prefix_ids(tokenizer, LIKELIHOOD.constants[vote]) for vote in Vote)
        self._calibration = calibration
        self._calibrating = asyncio.Lock()

    @property
    def name(self) -> str:
        return f"scored:{self._model}:{prompts_hash()[:6]}"

    @property
    def calibration(self) -> Calibration | None:
        """None until the first verdict, unless it was given."""
        return self._calibration

    @property
    def prefixes(self) -> tuple[TokenIds, ...]:
        """The constant beginnings of all requests, for an engine that can be told what to keep."""
        return (self._label_prefix, *self._list_prefixes)

    async def calibrate(self) -> Calibration:
        """Choose the calibration, once; costs a few prefills that also fill the prefix cache."""
        async with self._calibrating:
            if self._calibration is None:
                fingerprint = await self.fingerprint()
                self._calibration = shipped(prompts_hash(), fingerprint)
                if self._calibration is None:
                    self._calibration = content_free(self._model, prompts_hash(), fingerprint)
                    log.warning(
                        "No fitted calibration is shipped for the judge model %s, so its verdicts are calibrated with "
                        "content-free replies only. Fit it: python -m nextstate.judge.fit_calibration.",
                        self._model,
                    )
            return self._calibration

    async def fingerprint(self) -> Readings:
        """The mean readings of replies that say nothing."""
        readings = await self.readings([_content_free_turn(text) for text in CONTENT_FREE])
        return tuple(sum(column) / len(readings) for column in zip(*readings, strict=True))

    async def readings(self, turns: Sequence[TurnToJudge]) -> list[Readings]:
        """What the model makes of each turn, before calibration. Each turn must hold a user's words.

        Raises:
            JudgeUnavailable: the engine failed.
        """
        requests = [request for turn in turns for request in self._requests(turn)]
        try:
            scores = await self._engine.score(requests, BASE)
        except EngineFault as error:
            raise JudgeUnavailable(f"The engine could not score for the judge: {error} The turn waits.") from error
        found: list[Readings] = []
        for at in range(0, len(scores), 4):
            label, *entries = scores[at : at + 4]
            # A long reply's log-probs add up to gaps that look like certainty; the root of the length tames them.
            lists = [sum(entry.logprobs) / math.sqrt(len(entry.logprobs)) for entry in entries]
            found.append(centred(label.choice_logprobs) + centred(lists))
        return found

    def _requests(self, turn: TurnToJudge) -> list[ScoreRequest]:
        label = self._label_prefix + self._ids(label_text(turn))
        entry = self._ids(likelihood_text(turn))
        lists = [ScoreRequest(ids=prefix + entry, start=len(prefix)) for prefix in self._list_prefixes]
        return [ScoreRequest(ids=label, start=len(label), choices=self._label_ids), *lists]

    def _ids(self, text: str) -> TokenIds:
        # Text of a turn is text: a user who writes '<|im_end|>' must not end anything.
        return tuple(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        if not reply_of(turn):
            what = "Only tool text followed, without a status" if turn.next_state else "Nothing followed the answer"
            return Verdict(turn_id=turn.turn_id, judge=self.name, value=None, reason=f"{what}; nobody could vote.")
        calibration = await self.calibrate()
        (readings,) = await self.readings([turn])
        probabilities = calibration.probabilities(readings)
        vote = vote_of(probabilities, sign_at=self._sign_at, neutral_at=self._neutral_at)
        shares = ", ".join(f"{label.name.lower()} {probabilities[label]:.0%}" for label in Vote)
        outcome = "too unsure to vote" if vote is None else f"voted {vote.name.lower()}"
        return Verdict(
            turn_id=turn.turn_id,
            judge=self.name,
            value=vote,
            votes=(vote,),
            probabilities={vote.name.lower(): probabilities[vote] for vote in Vote},
            reason=f"The judge read the user's reply and {outcome} ({shares}; {calibration.kind} calibration).",
        )


def _prefix_ids(tokenizer: Any, text: str) -> TokenIds:
    """The constant text with the tokenizer's opening token, if it has one, and without a closing one."""
    ids = list(tokenizer.encode(text, add_special_tokens=True))
    if ids and ids[-1] == tokenizer.eos_token_id:
        ids.pop()
    return tuple(ids)


def _content_free_turn(reply: str) -> TurnToJudge:
    return TurnToJudge(
        turn_id=0,
        history=({"role": "user", "content": "N/A"},),
        answer="N/A",
        next_state=({"role": "user", "content": reply},),
        finish_reason=FinishReason.STOP,
    )
