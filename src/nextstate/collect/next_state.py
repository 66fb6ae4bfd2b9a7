"""What follows an answer, as evidence about it."""

from __future__ import annotations

from collections.abc import Sequence

from nextstate.collect import clients, spine
from nextstate.collect.clients import Said
from nextstate.types import Message, Source


def read_next_state(messages: Sequence[Message]) -> tuple[tuple[Message, ...], Source | None]:
    """What follows an answer as evidence about it, and the most trusted of those who speak in it.

    Behind another answer nothing says anything about the first. The client's texts for the model alone are left out; a
    program that speaks in the user's place is the environment, with the role "system".
    """
    kept: list[Message] = []
    speakers: set[Source] = set()
    for message in messages:
        role = message["role"]
        if role == "assistant":
            if spine.says_something(message):
                break
            continue  # it holds nothing that anybody could have answered to
        if role == "user":
            text = clients.read_user_text(spine.flatten(message.get("content")))
            if text.said in (Said.CARRIER, Said.RETRY, Said.POLL, Said.SUMMARY):
                continue
            human = text.said is Said.HUMAN
            speakers.add(Source.USER if human else Source.ENVIRONMENT)
            kept.append({**message, "role": "user" if human else "system", "content": text.text})
            continue
        speakers.add(Source.TOOL if role == "tool" else Source.ENVIRONMENT)
        kept.append(message)
    source = next((s for s in (Source.USER, Source.TOOL, Source.ENVIRONMENT) if s in speakers), None)
    return tuple(kept), source
