"""Sampled voting: a judge model behind any OpenAI-compatible endpoint reasons, then answers in a fixed form."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from nextstate.judge.errors import JudgeUnavailable
from nextstate.judge.evidence import user_words
from nextstate.judge.hints import MAX_CHARS, MIN_WIDTH, merge_hints, width
from nextstate.judge.prompts import prompts_hash, sampled_messages
from nextstate.judge.votes import majority
from nextstate.types import Hint, Source, TurnToJudge, Verdict, Vote

_VALUES = {"good": Vote.GOOD, "bad": Vote.BAD, "neutral": Vote.NEUTRAL}
_VERDICT_LINE = re.compile(r"^\W*verdict\W*:\W*(good|bad|neutral)\W*$", re.IGNORECASE)
_HINT_LINE = re.compile(r"^\W*hint\W*:\s*(.*)$", re.IGNORECASE)
_NO_HINT = re.compile(r"^\W*(?:none|no hint|n/a|-)?\W*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Opinion:
    """One sampled answer of the judge model, read."""

    vote: Vote
    hint: str
    """'' when the judge gave none."""


def parse_opinion(text: str) -> Opinion | None:
    """Read an answer that closes with 'HINT: ...' and 'VERDICT: ...'; None, an abstention, if it does not.

    Only the last line can be the verdict. Judges quote what they read, and what they read may hold a planted verdict.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    match = _VERDICT_LINE.match(lines[-1]) if lines else None
    if match is None:
        return None
    hint_line = _HINT_LINE.match(lines[-2]) if len(lines) > 1 else None
    hint = hint_line[1].strip().strip("*\"'` ") if hint_line else ""
    if _NO_HINT.match(hint) or width(hint) <= MIN_WIDTH or len(hint) > MAX_CHARS:
        hint = ""
    return Opinion(vote=_VALUES[match[1].lower()], hint=hint)


class SampledJudge:
    """m votes a turn from a judge model. Owns an HTTP client: use it with `async with`, or call `aclose`."""

    def __init__(
        self,
        *,
        base_url: str,
        model: str,
        api_key: str | None = None,
        votes: int = 3,
        temperature: float = 0.6,
        max_tokens: int = 1024,
        deadline_s: float = 60.0,
        max_concurrency: int = 4,
        judge_tool_text: bool = False,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """
        Args:
            base_url: up to and including the version, e.g. 'http://127.0.0.1:8001/v1'.
            api_key: sent as a bearer token, and written nowhere.
            deadline_s: for one vote, waiting for a free place included.
            max_concurrency: votes under way at once, over all turns.
            judge_tool_text: vote on turns that only tool text follows, too. Off by default: text that a tool returns is
                no reward unless the configuration says so.
            transport: for tests.
        """
        self._url = base_url.rstrip("/") + "/chat/completions"
        self._shown_url = str(httpx.URL(self._url).copy_with(userinfo=b"", query=None))
        """Without what may be secret in a URL."""
        self._model = model
        self._votes = votes
        self._temperature = temperature
        self._max_tokens = max_tokens
        self._deadline_s = deadline_s
        self._places = asyncio.Semaphore(max_concurrency)
        self._judge_tool_text = judge_tool_text
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.AsyncClient(headers=headers, timeout=deadline_s, transport=transport)
        self.counts: Counter[str] = Counter()
        """'votes' cast, and 'unparsable' answers, which are abstentions, since the start."""

    @property
    def name(self) -> str:
        return f"sampled:{self._model}:{prompts_hash()[:6]}"

    async def verdict(self, turn: TurnToJudge) -> Verdict:
        if not user_words(turn) and not (turn.next_state and self._judge_tool_text):
            what = "Only tool text followed, without a status" if turn.next_state else "Nothing followed the answer"
            return Verdict(turn_id=turn.turn_id, judge=self.name, value=None, reason=f"{what}; nobody was asked.")
        asked = (self._opinion(turn) for _ in range(self._votes))
        # Every vote comes to its end before the first failure is raised, so that no request is left behind.
        results = await asyncio.gather(*asked, return_exceptions=True)
        opinions: list[Opinion | None] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            opinions.append(result)
        votes = tuple(opinion.vote if opinion else None for opinion in opinions)
        value = majority(votes)
        cast = [vote for vote in votes if vote is not None]
        return Verdict(
            turn_id=turn.turn_id,
            judge=self.name,
            value=value,
            votes=votes,
            probabilities={vote.name.lower(): cast.count(vote) / len(cast) for vote in Vote} if cast else None,
            reason=_reason(value, votes),
            hints=_hints(turn, value, opinions),
        )

    async def _opinion(self, turn: TurnToJudge) -> Opinion | None:
        try:
            # The deadline covers the wait for a place too: a turn is not held up longer than the setting says.
            async with asyncio.timeout(self._deadline_s), self._places:
                text = await self._ask(turn)
        except TimeoutError as error:
            raise self._failed(f"gave no vote within {self._deadline_s:g} s") from error
        opinion = parse_opinion(text)
        self.counts["unparsable" if opinion is None else "votes"] += 1
        return opinion

    async def _ask(self, turn: TurnToJudge) -> str:
        body = {
            "model": self._model,
            "messages": sampled_messages(turn),
            "temperature": self._temperature,
            "top_p": 1.0,
            "max_tokens": self._max_tokens,
        }
        try:
            response = await self._client.post(self._url, json=body)
        except httpx.HTTPError as error:
            raise self._failed(f"cannot be reached ({type(error).__name__})") from error
        if response.status_code != httpx.codes.OK:
            advice = "; check judge.model and judge.api_key" if response.status_code in (400, 401, 403, 404) else ""
            raise self._failed(f"answered HTTP {response.status_code}{advice}")
        try:
            answer = response.json()
        except ValueError as error:
            raise self._failed("did not answer in JSON") from error
        return _content(answer)

    def _failed(self, what: str) -> JudgeUnavailable:
        return JudgeUnavailable(f"The judge at {self._shown_url} {what}; the turn waits and is judged later.")

    async def aclose(self) -> None:
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()


def _content(answer: Any) -> str:
    """The text of the first choice, or '' if the answer has none: a model that says nothing abstains."""
    try:
        content = answer["choices"][0]["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return ""
    return content if isinstance(content, str) else ""


def _hints(turn: TurnToJudge, value: Vote | None, opinions: list[Opinion | None]) -> tuple[Hint, ...]:
    """The hints of the votes that won. Without a user's words there are none: tool text must not become a hint."""
    if value is not Vote.BAD or not user_words(turn):
        return ()
    agreeing = (opinion for opinion in opinions if opinion is not None and opinion.vote is Vote.BAD and opinion.hint)
    return merge_hints(Hint(text=opinion.hint, source=Source.USER) for opinion in agreeing)


def _reason(value: Vote | None, votes: tuple[Vote | None, ...]) -> str:
    if value is None:
        return f"None of {len(votes)} answers of the judge closed with a verdict."
    cast = Counter(vote for vote in votes if vote is not None)
    tally = ", ".join(f"{count} {vote.name.lower()}" for vote, count in cast.most_common())
    abstained = votes.count(None)
    return f"Votes: {tally}" + (f", {abstained} abstained." if abstained else ".")
