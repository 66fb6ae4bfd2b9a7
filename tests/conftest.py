"""A model small enough to start in a second, and what runs around it.

Its weights are random, so its words mean nothing; one token in ten ends the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from nextstate.config import Config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import LoadedModel, load
from nextstate.serve.app import create_app
from nextstate.serve.run import bind, serve_http
from nextstate.store.store import Store

CONTEXT_TOKENS = 2048

NEVER_ENDS: dict[str, Any] = {"logit_bias": {str(token): -100 for token in range(42)}}
"""A request's bias against the tiny model's special tokens, so that only a limit ends its answer."""

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' and loop.first %}{{ raise_exception('a tool speaks first') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXTS = [
    "the quick brown fox jumps over the lazy dog",
    "Grüße, naïve café",
    "日本語のテキスト",
    "def f(x): return x + 1",
]


def _make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    ends = [f"<|end_{i}|>" for i in range(40)]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|im_start|>", "<|im_end|>", *ends],
        show_progress=False,
    )
    bpe.train_from_iterator(_TEXTS * 3, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", additional_special_tokens=["<|im_start|>", *ends]
    )
    tokenizer.chat_template = CHATML
    return tokenizer


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a byte-level tokenizer and a ChatML template."""
    folder = tmp_path_factory.mktemp("models") / "tiny"
    tokenizer = _make_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.1,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
    ends = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(f"<|end_{i}|>") for i in range(40))]
    model.generation_config = GenerationConfig(eos_token_id=ends)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny(tiny_model_path: Path) -> LoadedModel:
    return load(str(tiny_model_path), dtype="float32", device="cpu")


@pytest.fixture(scope="session")
def engine(tiny: LoadedModel) -> Iterator[LocalEngine]:
    """The local engine with the tiny model, running; shared by all tests."""
    running = LocalEngine(tiny)
    running.start()
    yield running
    running.stop()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'nextstate.db'}")
    yield opened
    opened.close()


@dataclass
class RunningServer:
    """A server on a free port of loopback, with clients for it."""

    url: str
    client: AsyncOpenAI
    """The official client; it does not retry by itself."""
    http: httpx.AsyncClient
    store: Store
    stop: Callable[[], Awaitable[None]]
    """Stops the server before the test is over."""
    judge_calls: list[None] = field(default_factory=list)
    """One entry for each time the judge was woken."""

    async def turns(self) -> list[Any]:
        """All turns, oldest first."""
        from nextstate.store.status import list_turns

        return list(reversed(await self.store.read(lambda db: list_turns(db, limit=1000))))


ServerFactory = Callable[..., AbstractAsyncContextManager[RunningServer]]


@pytest.fixture
def start_server(store: Store, engine: LocalEngine, tmp_path: Path) -> ServerFactory:
    """Starts servers with other settings or another engine than `server` has."""

    @asynccontextmanager
    async def start(
        *,
        serve: dict[str, Any] | None = None,
        engine_config: dict[str, Any] | None = None,
        store_config: dict[str, Any] | None = None,
        with_engine: Any = None,
        learning: bool = True,
        ready: Callable[[], tuple[bool, str]] = lambda: (True, "ready"),
        key: str = "unused",
    ) -> AsyncIterator[RunningServer]:
        config = Config(data=tmp_path, serve=serve or {}, engine=engine_config or {}, store=store_config or {})
        calls: list[None] = []
        app = create_app(
            store=store,
            engine=with_engine or engine,
            config=config,
            learning=learning,
            ready=ready,
            wake_judge=lambda: calls.append(None),
        )
        listener = bind("127.0.0.1", 0)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        serving = asyncio.create_task(serve_http(app, listener))

        async def stop() -> None:
            serving.cancel()
            await asyncio.wait([serving])

        try:
            async with (
                # Loading certificates takes longer than most tests, and nothing here is encrypted.
                DefaultAsyncHttpxClient(verify=False) as transport,
                AsyncOpenAI(
                    base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=10, http_client=transport
                ) as client,
                httpx.AsyncClient(base_url=url, timeout=10, verify=False) as http,
            ):
                yield RunningServer(url=url, client=client, http=http, store=store, stop=stop, judge_calls=calls)
        finally:
            await stop()

    return start


@pytest.fixture
async def server(start_server: ServerFactory) -> AsyncIterator[RunningServer]:
    async with start_server() as running:
        yield running
