"""What the trainer will take, before it takes it.

    fixed      trained weights, their gradients and moments, the moving average
    a pass     what autograd keeps of every token, and the output layer at reply tokens

The longest pass is a micro-batch or the longest turn. Where it does not fit into what is available, micro-batches
become smaller, then longer turns are left out; where not even a short turn fits, the trainer does not start.
`stress.py` then shows whether the estimate is right.

The base weights are no part of it: they are mapped from the model's file and shared with the server.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn

from nextstate.config import LearnConfig
from nextstate.engines.adapters import lora_config
from nextstate.errors import NextstateError
from nextstate.learn.memory import Available, free_memory
from nextstate.learn.scoring import BLOCK

SHORT_TURN = 256
"""Tokens. Where not even a turn of this length fits, nothing worth learning does."""

_FLOAT = 4
"""Bytes. What is trained is float32, whatever the base is kept in."""
_BLOCKS_AT_ONCE = 3
"""[BLOCK, V] matrices in float32 while a block of places goes through the output layer."""
_CHOICE_BYTES = 64
"""Of a token at a place whose log-prob is wanted: its id, and what student, teacher and loss make of it."""
_LAYERS_AT_ONCE = 2
"""Layers' worth of values that a pass makes and drops again on its way."""
_HEAP = 2.0
"""On CPU the C library keeps freed pieces of a pass; measured, a pass takes so many times what is alive in it."""
_RUNTIME_BYTES = 100_000_000
"""Work space of the libraries, from their first call on."""


class TrainingRefused(NextstateError):
    """The trainer does not fit into the memory that there is. Serving goes on without it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a model's memory depends on."""

    parameters: int
    """Each counted once, however often it is used."""
    trained: int
    """Parameters that an update changes."""
    hidden: int
    intermediate: int
    queries: int
    """Heads times their width."""
    keys: int
    """Heads of keys times their width."""
    layers: int
    vocabulary: int
    context: int
    held_bytes: int
    """Of a number of the base's weights."""
    number_bytes: int
    """Of a number that a layer computes."""

    @classmethod
    def of(cls, model: nn.Module, config: LearnConfig, *, context: int) -> Shape:
        """Args:
        model: the base, before there is an adapter in it; on the meta device is enough.
        """
        dims: Any = model.config
        width = getattr(dims, "head_dim", None) or dims.hidden_size // dims.num_attention_heads
        parameters = sum(p.numel() for p in model.parameters())
        full = config.weights == "full"
        held = next(model.parameters()).element_size()
        return cls(
            parameters=parameters,
            trained=parameters if full else _adapter_parameters(model, config),
            hidden=dims.hidden_size,
            intermediate=dims.intermediate_size,
            queries=width * dims.num_attention_heads,
            keys=width * dims.num_key_value_heads,
            layers=dims.num_hidden_layers,
            vocabulary=dims.vocab_size,
            context=context,
            held_bytes=held,
            number_bytes=_FLOAT if full else 2 if config.bfloat16 else held,
        )


def _adapter_parameters(model: nn.Module, config: LearnConfig) -> int:
    """r * (inputs + outputs) of every linear layer that has an adapter; with 'all-linear' the output layer has none."""
    wanted = lora_config(config.rank, config.alpha, config.targets).target_modules
    output = model.get_output_embeddings()  # type: ignore[operator]
    return sum(
        config.rank * (layer.in_features + layer.out_features)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear)
        and (layer is not output if wanted == "all-linear" else name.rpartition(".")[2] in set(wanted or ()))
    )


def activation_bytes_per_token(shape: Shape, config: LearnConfig) -> int:
    """What is kept of one token until the backward pass, in all layers together; see `lean.py`.

    A layer keeps, of H hidden, I intermediate, Q query and K key numbers:

        2 H                 what its two norms read, float32
        2 Q + 2 K           queries, keys, values, and what attention found
        2 I                 gate and up
        LoRA: 7 r           between the two factors of seven adapters
        LoRA, bfloat16      what the norms read once more as it came: 2 H; where `learn.bfloat16` alone asks for it, the
                            residual stream is float32 and is not kept twice
        full: 4 H + I       what the norms give before and after their weights, and what the MLP's last layer reads

    A test compares it with what autograd keeps. With fewer targets than 'all-linear' it is more than is kept.
    """
    h, i, q, k = shape.hidden, shape.intermediate, shape.queries, shape.keys
    as_float, as_computed = 2 * h, 2 * q + 2 * k + 2 * i
    if config.weights == "full":
        as_float += 4 * h + i
    else:
        as_computed += 7 * config.rank + (2 * h if shape.held_bytes != _FLOAT else 0)
    return shape.layers * (_FLOAT * as_float + shape.number_bytes * as_computed)


def head_bytes(shape: Shape, config: LearnConfig, reply_tokens: int) -> int:
    """What the output layer takes: logits of a block, hidden states and log-probs of 1 + top_k tokens at every place.

    With full weights also its gradient, before it is added to what other blocks gave.
    """
    logits = _BLOCKS_AT_ONCE * _FLOAT * shape.vocabulary * min(reply_tokens, BLOCK)
    places = reply_tokens * (2 * _FLOAT * shape.hidden + _CHOICE_BYTES * (1 + config.top_k))
    gradient = _FLOAT * shape.vocabulary * shape.hidden if config.weights == "full" else 0
    return logits + places + gradient


def pass_bytes(shape: Shape, config: LearnConfig, tokens: int, *, device: str, correction: float = 1.0) -> int:
    """Peak of a forward and backward pass over a turn of so many tokens, all of it reply; without gradients of weights.

    Args:
        correction: what a pass was measured to take over what it was estimated to.
    """
    passing = activation_bytes_per_token(shape, config) * (shape.layers + _LAYERS_AT_ONCE) / shape.layers
    alive = tokens * passing + head_bytes(shape, config, tokens)
    return int(correction * (_HEAP if device == "cpu" else 1.0) * alive)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Bytes, and the lengths that fit into them."""

    weights: str
    device: str
    base_bytes: int
    """The base's weights: mapped, shared with the server, and not counted."""
    trained_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    average_bytes: int
    copy_bytes: int
    """Of the base in bfloat16, where `learn.bfloat16` makes one."""
    activation_bytes_per_token: int
    pass_bytes: int
    """Of the longest pass that is planned, all of it reply."""
    needed_bytes: int
    """All of that together but the base."""
    available_bytes: int
    available_from: str
    micro_batch_tokens: int
    max_turn_tokens: int
    messages: tuple[str, ...] = ()
    """What is other than configured, and what to do about it."""
    refusal: str | None = None
    """Why nothing can be trained; None: it can."""

    @property
    def longest(self) -> int:
        """Tokens of the longest pass."""
        return max(self.micro_batch_tokens, self.max_turn_tokens)

    @property
    def fixed_bytes(self) -> int:
        return _RUNTIME_BYTES + sum(
            (self.trained_bytes, self.gradient_bytes, self.optimizer_bytes, self.average_bytes, self.copy_bytes)
        )

    def applied(self, config: LearnConfig) -> LearnConfig:
        """The settings with the lengths that fit."""
        lengths = {"micro_batch_tokens": self.micro_batch_tokens, "max_turn_tokens": self.max_turn_tokens}
        return config.model_copy(update=lengths)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"memory plan: {gb(self.needed_bytes)} needed, {gb(self.available_bytes)} available "
            f"({self.available_from}); {self.weights} weights, moments and gradients {gb(self.fixed_bytes)}, "
            f"a pass of {self.longest} tokens {gb(self.pass_bytes)}; turns of up to {self.max_turn_tokens} tokens, "
            f"micro-batches of {self.micro_batch_tokens}"
        )


def gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"


def available(config: LearnConfig, device: torch.device) -> Available:
    """What the trainer may take beside what this process has already."""
    if config.memory_gb is not None:
        return Available(bytes=int(config.memory_gb * 1e9), source="learn.memory_gb")
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return Available(bytes=int(free * 0.9), source="nine tenths of what is free on the GPU")
    return free_memory()


def make_plan(
    shape: Shape, config: LearnConfig, found: Available, *, device: str = "cpu", correction: float = 1.0
) -> Plan:
    """The plan for a model and settings; `correction` as in `pass_bytes`."""
    fixed = {
        "trained": _FLOAT * shape.trained,
        "gradient": _FLOAT * shape.trained,
        "optimizer": 2 * _FLOAT * shape.trained,
        "average": _FLOAT * shape.trained if config.teacher == "average" else 0,
        "copy": 2 * shape.parameters if config.bfloat16 and shape.held_bytes == _FLOAT else 0,
    }
    fixed_bytes = _RUNTIME_BYTES + sum(fixed.values())

    def takes(tokens: int) -> int:
        return pass_bytes(shape, config, tokens, device=device, correction=correction)

    longest_turn = min(config.max_turn_tokens, shape.context)
    short = min(SHORT_TURN, longest_turn)
    lengths = range(1, max(longest_turn, config.micro_batch_tokens) + 1)
    fits = bisect_right(lengths, found.bytes - fixed_bytes, key=takes)
    micro, turn = (
        min(fits, tokens) if fits >= short else tokens for tokens in (config.micro_batch_tokens, longest_turn)
    )
    plan = Plan(
        weights=config.weights,
        device=device,
        base_bytes=shape.parameters * shape.held_bytes,
        trained_bytes=fixed["trained"],
        gradient_bytes=fixed["gradient"],
        optimizer_bytes=fixed["optimizer"],
        average_bytes=fixed["average"],
        copy_bytes=fixed["copy"],
        activation_bytes_per_token=activation_bytes_per_token(shape, config),
        pass_bytes=takes(max(micro, turn)),
        needed_bytes=fixed_bytes + takes(max(micro, turn)),
        available_bytes=found.bytes,
        available_from=found.source,
        micro_batch_tokens=micro,
        max_turn_tokens=turn,
    )
    seen = f"{gb(found.bytes)} are available to the trainer ({found.source})"
    if fits < short:
        return replace(plan, refusal=_refusal(plan, seen, short, fixed_bytes + takes(short)))
    return replace(plan, messages=tuple(_messages(plan, config, longest_turn, seen, lambda n: fixed_bytes + takes(n))))


def _messages(
    plan: Plan, config: LearnConfig, longest_turn: int, seen: str, needs: Callable[[int], int]
) -> Iterator[str]:
    asked, taken = config.micro_batch_tokens, plan.micro_batch_tokens
    if taken < asked:
        yield (
            f"{seen}, and micro-batches of {asked} tokens would need {gb(needs(asked))}: they are made of {taken}, "
            "which is slower and learns the same. Free memory, set learn.memory_gb if the number is wrong, or set "
            f"learn.micro_batch_tokens = {taken}."
        )
    if plan.max_turn_tokens < longest_turn:
        yield (
            f"{seen}, and turns of {longest_turn} tokens would need {gb(needs(longest_turn))}: turns of more than "
            f"{plan.max_turn_tokens} tokens are left out (too_long). Free memory, set learn.memory_gb if the number is "
            "wrong, or take a smaller model."
        )


def _refusal(plan: Plan, seen: str, short: int, needed: int) -> str:
    smaller = 'learn.weights = "lora"' if plan.weights == "full" else "a smaller learn.rank"
    return (
        f"{seen}, and even turns of {short} tokens would need {gb(needed)}: nothing is learned, and serving goes on. "
        f"Free memory, set learn.memory_gb if the number is wrong, or take a smaller model or {smaller}."
    )
