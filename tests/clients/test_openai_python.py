"""The official OpenAI client for Python, by chat completions and by responses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.sdk import WRITE, client_of, tell, write_file
from tests.clients.served import Served

pytestmark = pytest.mark.parametrize("anonymous", [False])


class Talk:
    """A conversation by chat completions, streamed, whose history holds the client's own message objects."""

    def __init__(self, client: openai.OpenAI, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.messages: list[Any] = [{"role": "system", "content": "You are an assistant."}]

    def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        while True:
            with self._client.chat.completions.stream(
                model="policy", messages=self.messages, tools=[{"type": "function", "function": WRITE}]
            ) as stream:
                message = stream.get_final_completion().choices[0].message
            self.messages.append(message)
            if not message.tool_calls:
                return message.content or ""
            for tool_call in message.tool_calls:
                result = write_file(self._folder, tool_call.function.arguments)
                self.messages.append({"role": "tool", "tool_call_id": tool_call.id, "content": result})

    def leave(self, text: str) -> None:
        request = [*self.messages, {"role": "user", "content": text}]
        stream = self._client.chat.completions.create(model="policy", messages=request, stream=True)
        for _, _ in zip(stream, range(5), strict=False):
            pass
        stream.close()


class ResponsesTalk:
    """A conversation by responses: its items as they came, or the id of the response before."""

    def __init__(self, client: openai.OpenAI, folder: Path, *, by_id: bool) -> None:
        self._client, self._folder, self._by_id = client, folder, by_id
        self.items: list[Any] = []
        self._before: Any = openai.omit

    def say(self, text: str) -> str:
        self.items.append({"role": "user", "content": text})
        while True:
            with self._client.responses.stream(
                model="policy",
                instructions="You are an assistant.",
                input=self.items,
                previous_response_id=self._before,
                tools=[{"type": "function", "strict": False, **WRITE}],  # type: ignore[list-item]
            ) as stream:
                response = stream.get_final_response()
            self.items += response.output
            if self._by_id:
                self.items, self._before = [], response.id
            calls = [item for item in response.output if item.type == "function_call"]
            if not calls:
                return response.output_text
            for item in calls:
                result = write_file(self._folder, item.arguments)
                self.items.append({"type": "function_call_output", "call_id": item.call_id, "output": result})

    def leave(self, text: str) -> None:
        request = [*self.items, {"role": "user", "content": text}]
        stream = self._client.responses.create(
            model="policy", input=request, previous_response_id=self._before, stream=True
        )
        for _, _ in zip(stream, range(8), strict=False):
            pass
        stream.close()


async def test_chat_completions(served: Served, tmp_path: Path):
    client = client_of(served, "openai-python")
    error = await tell(Talk(client, tmp_path), served, tmp_path, openai.BadRequestError)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("by_id", [False, True])
async def test_responses(served: Served, tmp_path: Path, by_id: bool):
    client = client_of(served, "openai-python")
    error = await tell(ResponsesTalk(client, tmp_path, by_id=by_id), served, tmp_path, openai.BadRequestError)
    assert error.code == "context_length_exceeded"
