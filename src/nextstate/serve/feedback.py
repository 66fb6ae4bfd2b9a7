"""POST /v1/feedback: a thumb, and words if there are any."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request
from pydantic import BeforeValidator, Field
from sqlalchemy import Connection

from nextstate.serve.auth import Caller, caller, owns
from nextstate.serve.body import RequestBody
from nextstate.serve.errors import ApiError
from nextstate.serve.services import Services
from nextstate.store.judging import add_feedback
from nextstate.store.status import show_turn
from nextstate.types import Feedback, Vote

_VALUES = {"good": Vote.GOOD, "bad": Vote.BAD}


def _number(turn_id: Any) -> Any:
    """A turn's number from a response's id or header, as it came."""
    if isinstance(turn_id, str) and turn_id.removeprefix("chatcmpl-").isdecimal():
        return int(turn_id.removeprefix("chatcmpl-"))
    return turn_id


class FeedbackRequest(RequestBody, extra="forbid"):
    turn_id: Annotated[int, BeforeValidator(_number), Field(ge=0, lt=2**63)]
    """A number, or the id of a response: 'chatcmpl-12'."""
    value: Literal["good", "bad"]
    words: Annotated[str, Field(max_length=10_000)] | None = None


def router(services: Services) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/feedback")
    async def feedback(body: FeedbackRequest, request: Request) -> dict[str, Any]:
        found: Counter[str] = Counter()
        given = Feedback(value=_VALUES[body.value], words=services.redactor.text(body.words or "", found))
        services.metrics.count_redactions(found)
        try:
            outcome = await services.store.write(_add, caller(request), body.turn_id, given)
        except LookupError as error:
            raise ApiError(404, f"There is no turn {body.turn_id}.", param="turn_id", code="turn_not_found") from error
        services.wake_judge()
        return {"turn_id": body.turn_id, "outcome": outcome}

    return routes


def _add(db: Connection, who: Caller, turn_id: int, given: Feedback) -> str:
    turn = show_turn(db, turn_id)
    if turn is None or not owns(who, turn.user):
        # The same for both: nobody learns which turns others have.
        raise LookupError(f"there is no turn {turn_id}")
    return add_feedback(db, turn_id, given)
