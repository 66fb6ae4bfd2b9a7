"""Requests to a store, as the server writes them, one a second."""

from __future__ import annotations

from nextstate.collect.placement import place
from nextstate.collect.request import Incoming
from nextstate.collect.spine import answer_spine, request_spine
from nextstate.store.status import show_turn
from nextstate.store.store import Store
from nextstate.store.turns import NewTurn, Placement, finish_turn, leave_out, open_turn
from nextstate.types import FinishReason, Message, Sampling, SkipReason


def says(text: str, *calls: Message, **more) -> dict:
    """An assistant message."""
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def tool(text: str, call_id: str = "") -> dict:
    return {"role": "tool", "content": text, **({"tool_call_id": call_id} if call_id else {})}


def call(name: str, arguments: str, call_id: str = "") -> dict:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


TOOLS = ({"type": "function", "function": {"name": "ls"}},)


class Talk:
    def __init__(self, store: Store) -> None:
        self.store = store
        self.now = 1000.0
        """Seconds; each request comes one later."""

    def incoming(self, messages, *, user="", key=None, side=False, retries=0, **fields) -> Incoming:
        named = {"session_id": key} if key is not None else {}
        marked = {"turn_type": "side"} if side else {}
        self.now += 1
        given = {"received_at": self.now, "retry_count": retries, **fields}
        body = {**named, **marked, **given.pop("body", {})}
        return Incoming(user=user, messages=tuple(messages), body=body, **given)

    def place(self, messages, **how) -> Placement:
        return self.store.read_now(place, self.incoming(messages, **how))

    def ask(self, messages, answer=None, finish=FinishReason.STOP, **how) -> int:
        """Open a turn; with an answer, a text or a message, finish it. Returns its id."""
        incoming = self.incoming(messages, **how)
        new = NewTurn(
            user=incoming.user,
            placement=self.store.read_now(place, incoming),
            messages=incoming.messages,
            dialect=incoming.dialect,
            tools=incoming.tools,
            prompt_ids=(1, 2, 3),
            request_spine=request_spine(messages),
            sampling=Sampling(max_tokens=8),
            learn=True,
            received_at=incoming.received_at,
        )
        turn_id, _, _ = self.store.write_now(open_turn, new)
        if answer is not None:
            self.finish(turn_id, messages, answer, finish)
        return turn_id

    def finish(self, turn_id: int, messages, answer, finish=FinishReason.STOP) -> None:
        said = says(answer) if isinstance(answer, str) else answer
        self.store.write_now(
            finish_turn,
            turn_id,
            answer=said,
            malformed_calls=0,
            answer_spine=answer_spine(messages, said),
            finished_at=self.now,
            reply_ids=(4, 5),
            reply_logprobs=(-0.5, -0.25),
            reply_versions=(0, 0),
            finish_reason=finish,
            counted_tokens=2,
        )

    def fail(self, turn_id: int) -> None:
        """The engine could not answer."""
        self.store.write_now(leave_out, [turn_id], SkipReason.ENGINE_FAULT, "It broke.", at=self.now)

    def row(self, turn_id: int):
        return self.store.read_now(show_turn, turn_id)

    def session(self, turn_id: int) -> int:
        return self.row(turn_id).session_id
