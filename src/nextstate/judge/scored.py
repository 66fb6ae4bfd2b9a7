"""Scored voting: the judge model writes nothing; one prefill a prompt shows what it thinks. Good for small models.

    turn ─▶ two few-shot prompts ─▶ hidden states where the label would come next ─┐
         └▶ the wording of the reply                                                ┴▶ head ─▶ one vote

A head (see `head`) turns that into probabilities. Asking the model for the label itself was measured and is worse: a
small model knows more about a reply than it can say.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nextstate.engines.base import Engine
from nextstate.errors import EngineFault
from nextstate.judge.cues import wording
from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.head import Head, heads_in, learn, read, save, shipped, wording_head
from nextstate.judge.prompts import PROMPTS, label_ids, prompts_hash, reply_of, request_of, turn_text
from nextstate.judge.votes import NEUTRAL_AT, SIGN_AT, vote_of
from nextstate.types import BASE, FinishReason, ScoreRequest, TokenIds, TurnToJudge, Verdict, Vote

log = logging.getLogger(__name__)

CONTENT_FREE = ("N/A", "...", "[text]")
"""Replies that say nothing: what a model makes of them tells it from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the judge model was asked for, and how many tokens that took."""

    votes: int
    tokens: int
    """Of the turns themselves. The constant text in front of them is computed once, and cached by the engine."""


class ScoredJudge:
    """Votes with the base weights of an engine."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Any,
        *,
        model: str,
        heads: Path | None = None,
        learned: Path | None = None,
        head: Head | None = None,
        sign_at: float = SIGN_AT,
        neutral_at: float = NEUTRAL_AT,
    ) -> None:
        """
        Args:
            tokenizer: a Hugging Face tokenizer of the engine's model.
            model: a short name for verdicts; it decides nothing.
            heads: a folder of heads that `nextstate judge fit` has made; they come before the shipped ones.
            learned: the file of the head that has learned from explicit feedback, which comes before all others.
            head: None finds, at the first verdict, the one that was fitted for this model; if there is none, the one
                that goes by the wording alone.
            sign_at: probability from which a vote is good or bad.
            neutral_at: probability from which a vote is neutral; between the two the judge abstains.

        Raises:
            ModelError: a verdict label is not one token for this tokenizer.
        """
        self._engine = engine
        self._model = model
        self._heads, self._learned = heads, learned
        self._sign_at, self._neutral_at = sign_at, neutral_at
        self._tokenizer = tokenizer
        self._label_ids = [label_ids(tokenizer, prompt) for prompt in PROMPTS]
        self._prefixes = [_prefix_ids(tokenizer, prompt.constant) for prompt in PROMPTS]
        self._head: Head | None = head
        self._finding = asyncio.Lock()
        self._votes = self._tokens = 0

    @property
    def name(self) -> str:
        return f"scored:{self._model}:{prompts_hash()[:6]}"

    @property
    def prefixes(self) -> tuple[TokenIds, ...]:
        """The constant beginnings of all requests, for an engine that can be told what to keep."""
        return tuple(self._prefixes)

    @property
    def asked(self) -> Asked:
        return Asked(votes=self._votes, tokens=self._tokens)

    async def head(self) -> Head:
        """The head that votes; found once, at the cost of a few prefills that also fill the prefix cache."""
        async with self._finding:
            head = self._head
            if head is None:
                head = await self._fitted()
                learned = read(self._learned) if self._learned is not None else None
                if learned is not None and learned.starts_from(head):
                    head = learned
                self._head = head
            return head

    async def _fitted(self) -> Head:
        """The head that was fitted for the model and these prompts, before any feedback."""
        fingerprint = await self.fingerprint()
        made_here = heads_in(self._heads) if self._heads is not None else []
        for head in made_here + shipped():
            if head.matches(prompts_hash(), fingerprint):
                return head
        log.warning(
            "No head has been fitted for the judge model %s, so it judges by the wording of replies alone, which is "
            "right less often. Fit one: nextstate judge fit --model MODEL (docs/judge.md).",
            self._model,
        )
        return wording_head()

    async def fingerprint(self) -> tuple[float, ...]:
        """[prompts * labels] Mean log-probs of the labels, centred for each prompt, after replies that say nothing."""
        turns = [_content_free_turn(text) for text in CONTENT_FREE]
        scores = await self._score([request for turn in turns for request in self._requests(turn, ())])
        means: list[float] = []
        for at in range(len(PROMPTS)):
            of_prompt = [score.choice_logprobs for score in scores[at :: len(PROMPTS)]]
            columns = [sum(column) / len(of_prompt) for column in zip(*of_prompt, strict=True)]
            means.extend(value - sum(columns) / len(columns) for value in columns)
        return tuple(means)

    async def features(self, turns: Sequence[TurnToJudge], layers: Sequence[int]) -> Tensor:
        """[N, F] What a head that reads these layers sees of each turn: prompt by prompt the states, then the wording.

        Raises:
            JudgeUnavailable: the engine failed.
        """
        states: list[list[float]] = [[] for _ in turns]
        if layers:
            requests = [request for turn in turns for request in self._requests(turn, tuple(layers))]
            scores = await self._score(requests)
            for at, score in enumerate(scores):
                states[at // len(PROMPTS)].extend(value for layer in score.states for value in layer)
        return torch.tensor(
            [
                [*seen, *wording(request_of(turn), turn.answer, reply_of(turn))]
                for seen, turn in zip(states, turns, strict=True)
            ]
        )

    async def _score(self, requests: Sequence[ScoreRequest]) -> Any:
        self._tokens += sum(
            len(request.ids) - len(self._prefixes[at % len(PROMPTS)]) for at, request in enumerate(requests)
        )
        try:
            return await self._engine.score(requests, BASE)
        except EngineFault as error:
            raise JudgeUnavailable(f"The engine could not score for the judge: {error} The turn waits.") from error

    def _requests(self, turn: TurnToJudge, layers: tuple[int, ...]) -> list[ScoreRequest]:
        requests = []
        for prompt, prefix, labels in zip(PROMPTS, self._prefixes, self._label_ids, strict=True):
            # Text of a turn is text: a user who writes '<|im_end|>' must not end anything.
            text = self._tokenizer.encode(turn_text(turn, prompt), add_special_tokens=False, split_special_tokens=True)
            ids = prefix + tuple(text)
            choices = () if layers else labels
            requests.append(ScoreRequest(ids=ids, start=len(ids), choices=choices, layers=layers))
        return requests

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        if not reply_of(turn):
            what = "Only tool text followed, without a status" if turn.next_state else "Nothing followed the answer"
            return Verdict(turn_id=turn.turn_id, judge=self.name, value=None, reason=f"{what}; nobody could vote.")
        head = await self.head()
        (features,) = await self.features([turn], head.layers)
        self._votes += 1
        probabilities = head.probabilities(features)
        vote = vote_of(probabilities, sign_at=self._sign_at, neutral_at=self._neutral_at)
        shares = ", ".join(f"{label.name.lower()} {probabilities[label]:.0%}" for label in Vote)
        outcome = "too unsure to vote" if vote is None else f"voted {vote.name.lower()}"
        by = "" if head.layers else "; by the wording alone, since no head was fitted for the judge model"
        return Verdict(
            turn_id=turn.turn_id,
            judge=self.name,
            value=vote,
            votes=(vote,),
            probabilities={vote.name.lower(): probabilities[vote] for vote in Vote},
            reason=f"The judge read the user's reply and {outcome} ({shares}{by}).",
        )

    async def learn(self, turns: Sequence[TurnToJudge], values: Sequence[Vote]) -> Head:
        """Vote from now on with a head that has also learned from explicit feedback on these turns, and give that head.

        It starts from the head that was fitted, so that feedback counts once however often this is called.

        Args:
            turns: each with a user's words behind the answer.
        """
        fitted = await self._fitted()
        head = await asyncio.to_thread(learn, fitted, await self.features(turns, fitted.layers), values)
        if self._learned is not None:
            await asyncio.to_thread(save, head, self._learned)
        self._head = head
        return head


def layers_of(hidden_layers: int) -> tuple[int, ...]:
    """Which layers a head is fitted to: at 0.6 and 0.7 of the depth, where small models were seen to know most."""
    return tuple(sorted({round(hidden_layers * depth) for depth in (0.6, 0.7)}))


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
