"""Valid turns to judge; a test spells out only what it is about."""

from __future__ import annotations

from typing import Any

from nextstate.types import Feedback, FinishReason, Message, TurnToJudge


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def tool(text: str, **fields: Any) -> Message:
    return {"role": "tool", "content": text, **fields}


def a_turn(
    *next_state: Message,
    request: str = "What is a volcano?",
    answer: str = "A mountain that lets molten rock out.",
    finish_reason: FinishReason = FinishReason.STOP,
    feedback: Feedback | None = None,
) -> TurnToJudge:
    return TurnToJudge(
        turn_id=7,
        history=(user(request),),
        answer=answer,
        next_state=next_state,
        finish_reason=finish_reason,
        feedback=feedback,
    )
