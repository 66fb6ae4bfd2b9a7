"""The official Anthropic client for Python."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from tests.clients.sdk import WRITE, client_of, tell, write_file
from tests.clients.served import Served

pytestmark = pytest.mark.parametrize("anonymous", [False])


class Talk:
    """A conversation by messages, streamed, whose history holds the client's own blocks."""

    def __init__(self, client: anthropic.Anthropic, folder: Path) -> None:
        self._client, self._folder = client, folder
        self.messages: list[Any] = []
        self._tool: Any = {
            "name": WRITE["name"],
            "description": WRITE["description"],
            "input_schema": WRITE["parameters"],
        }

    def say(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        while True:
            with self._client.messages.stream(
                model="policy",
                max_tokens=200,
                system="You are an assistant.",
                messages=self.messages,
                tools=[self._tool],
            ) as stream:
                message = stream.get_final_message()
            self.messages.append({"role": "assistant", "content": message.content})
            uses = [block for block in message.content if block.type == "tool_use"]
            if not uses:
                return "".join(block.text for block in message.content if block.type == "text")
            results = [
                {
                    "type": "tool_result",
                    "tool_use_id": use.id,
                    "content": write_file(self._folder, json.dumps(use.input)),
                }
                for use in uses
            ]
            self.messages.append({"role": "user", "content": results})

    def leave(self, text: str) -> None:
        request = [*self.messages, {"role": "user", "content": text}]
        with self._client.messages.stream(model="policy", max_tokens=4000, messages=request) as stream:
            for _, _ in zip(stream.text_stream, range(5), strict=False):
                pass


async def test_messages(served: Served, tmp_path: Path):
    client = client_of(served, "anthropic-python")
    await tell(Talk(client, tmp_path), served, tmp_path, anthropic.BadRequestError)


async def test_tokens_are_counted(served: Served):
    client = client_of(served, "anthropic-python")
    asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "Hello"}]}
    counted = await asyncio.to_thread(client.messages.count_tokens, **asked)
    answered = await asyncio.to_thread(client.messages.create, max_tokens=9, **asked)
    assert counted.input_tokens == answered.usage.input_tokens
