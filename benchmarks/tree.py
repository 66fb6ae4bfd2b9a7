"""What a session costs to train: `python -m benchmarks.tree`.

Sessions of 1, 5, 20 and 50 turns in two shapes, a hint on every turn, the default objective (student with gradient,
base and hinted teacher without):

    grows     each prompt is the last one, its reply and new words of the user
    passing   the same, but passing words close each prompt and are gone from the next, as OpenClaw sends them

    tree      nextstate.learn.trainer.Trainer as it runs in production
    by turn   the same trainer, a turn a micro-batch, and a teacher that reads every hinted prompt from its beginning

Both give the same gradient: its norm is compared, and a difference stops the benchmark. The model is a small random one
(4 layers, 128 wide, a token a character), or 50 turns one by one would take most of an hour. The tokens computed do not
depend on it.
"""

from __future__ import annotations

import argparse
import math
import random
import string
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks import machine
from benchmarks.tiny import tiny_model
from nextstate.chat.template import render
from nextstate.config import LearnConfig
from nextstate.engines.model import LoadedModel, load
from nextstate.learn import trainer as trainer_module
from nextstate.learn.trainer import Trainer
from nextstate.learn.tree import grouped
from nextstate.store.learning import Sample
from nextstate.types import Turn

TURNS = (1, 5, 20, 50)
SHAPES = ("grows", "passing")
LEARN = LearnConfig(max_log_ratio=1000)
"""No turn is kept out for the log-probs that were made up for it."""
SYSTEM, WORDS, PASSING, REPLY = 200, 20, 40, 30
"""Tokens of the system text, of what the user says each time, of the passing words, and of a reply."""


def a_session(tokenizer: Any, shape: str, turns: int) -> list[Sample]:
    """Its turns as they are trained; the characters are random, and the same for both shapes."""
    draw = random.Random(0)

    def text(length: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=length))

    messages = [{"role": "system", "content": text(SYSTEM)}]
    samples = []
    for n in range(turns):
        messages.append({"role": "user", "content": text(WORDS)})
        reply, passing = text(REPLY), {"role": "user", "content": text(PASSING)}
        asked = (*messages, passing) if shape == "passing" else tuple(messages)
        ids = (*tokenizer.encode(reply, add_special_tokens=False), tokenizer.eos_token_id)
        turn = Turn(
            turn_id=n,
            prompt_ids=render(tokenizer, asked),
            reply_ids=ids,
            reply_logprobs=(-5.0,) * len(ids),
            reply_versions=(0,) * len(ids),
            temperature=1.0,
        )
        samples.append(Sample(turn=turn, user="u", reward=-1, hints=("Be brief.",), messages=asked))
        messages.append({"role": "assistant", "content": reply})
    return samples


def measure(shape: str, turns: int) -> dict[str, Any]:
    samples, found = [], {}
    for way in ("tree", "by turn"):
        loaded = _small_model()
        samples = a_session(loaded.tokenizer, shape, turns)
        update = {"teacher": "policy" if way == "tree" else "average"}  # an average that has not moved is the policy
        trainer = Trainer(loaded, LEARN.model_copy(update=update))
        trainer_module.grouped = grouped if way == "tree" else _one_by_one  # type: ignore[attr-defined]
        started, busy = time.perf_counter(), time.process_time()
        metrics = trainer.update(samples, oldest_version=0)
        found[way] = {
            "seconds": round(time.perf_counter() - started, 3),
            "cpu_seconds": round(time.process_time() - busy, 3),
            "tokens_computed": metrics["tokens_computed"],
            "grad_norm": metrics["grad_norm"],
        }
    norms = [found[way]["grad_norm"] for way in found]
    if not math.isclose(*norms, rel_tol=1e-3):
        raise RuntimeError(f"the two ways give different gradients, of norms {norms[0]} and {norms[1]}")
    longest = len(samples[-1].turn.prompt_ids) + len(samples[-1].turn.reply_ids)
    return {"shape": shape, "turns": turns, "longest_turn": longest, **found}


def _one_by_one(sequences: list[Any], **_: Any) -> list[list[int]]:
    return [[i] for i in range(len(sequences))]


def _small_model() -> LoadedModel:
    with tempfile.TemporaryDirectory() as folder:
        path = tiny_model(Path(folder))
        config = LlamaConfig.from_pretrained(
            path,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=8192,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(path)
        return load(str(path), dtype="float32", device="cpu")


def show(result: dict[str, Any]) -> None:
    rows = []
    for run in result["runs"]:
        tree, by_turn = run["tree"], run["by turn"]
        rows.append(
            [
                run["shape"],
                run["turns"],
                run["longest_turn"],
                by_turn["tokens_computed"],
                tree["tokens_computed"],
                by_turn["tokens_computed"] / tree["tokens_computed"],
                by_turn["seconds"],
                tree["seconds"],
                by_turn["seconds"] / tree["seconds"],
                by_turn["cpu_seconds"] / tree["cpu_seconds"],
            ]
        )
    start, end = result["load_average"]
    machine.show(
        f"{result['threads']} threads, load average {start} to {end}",
        [
            "shape", "turns", "last turn, tokens", "computed by turn", "by tree", "ratio", "seconds by turn", "by tree",
            "ratio", "by CPU",
        ],
        rows,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tree", description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, nargs="+", default=list(TURNS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    load_at_start = machine.load_average()
    runs = [measure(shape, turns) for shape in SHAPES for turns in options.turns]
    result = {
        "machine": machine.facts(),
        "threads": options.threads,
        "load_average": [load_at_start, machine.load_average()],
        "runs": runs,
    }
    show(result)
    machine.write(result, options.json)


if __name__ == "__main__":
    main()
