"""Much of the same: a user who praises everything, a client in a loop, a flood from one key, thumbs for others."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from sqlalchemy import func, select

from nextstate.config import Config, GateConfig, LearnConfig
from nextstate.engines.adapters import lora_config
from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.learn import checkpoint, process
from nextstate.learn.gate import examine
from nextstate.learn.trainer import Trainer
from nextstate.store import learning, schema, status
from nextstate.store.store import Store
from nextstate.types import PolicyRef, Sampling, SkipReason, TurnState, Vote
from tests.redteam.conftest import Arena, Attacked
from tests.rows import judged_turn, new_turn

LEARN = LearnConfig()


def start_update(arena: Arena) -> Counter[str]:
    """Begin an update as the trainer does. How many turns it takes, by whose they are."""
    update_id = arena.store.write_now(
        learning.start_update,
        limit=LEARN.max_update_turns,
        session_limit=LEARN.max_session_turns,
        key_limit=LEARN.max_key_turns,
    )
    query = select(schema.turns.c.user).where(schema.turns.c.update_id == update_id)
    return arena.store.read_now(lambda db: Counter(db.execute(query).scalars()))


async def test_a_flood_from_one_key_fills_no_more_than_its_share_and_nobody_waits_for_its_end(attacked: Attacked):
    async with attacked() as arena:
        mallory, ann = arena.key("mallory"), arena.key("ann")
        for n in range(30):
            await arena.exchange(f"spam {n}", {"role": "user", "content": "Thanks!"}, headers=mallory)
        await arena.exchange("a fox?", {"role": "user", "content": "No. Name the colour."}, headers=ann)
        await arena.judge()
        assert len(arena.samples()) == 31
        assert start_update(arena) == {"mallory": 8, "ann": 1}  # of 16
        waiting = arena.store.read_now(status.status).waiting
        assert waiting["waits_for_update"] == 22


async def test_users_within_a_key_are_one_key(attacked: Attacked, store: Store):
    async with attacked() as arena:
        for n in range(20):
            judged_turn(store, new=new_turn(user=f"mallory/{n}"))
        judged_turn(store, new=new_turn(user="ann/1"))
        taken = start_update(arena)
        assert taken.total() == 9
        assert taken["ann/1"] == 1


async def test_where_nobody_else_waits_a_key_may_fill_the_update(attacked: Attacked, store: Store):
    async with attacked() as arena:
        for n in range(20):
            judged_turn(store, new=new_turn(user=f"ann/{n}"))
        assert start_update(arena).total() == 16


async def test_a_session_in_a_loop_is_no_evidence_and_fills_no_update(attacked: Attacked):
    async with attacked() as arena:
        messages = [{"role": "user", "content": "go on"}]
        for _ in range(20):  # the same again and again, as an agent does that has lost its way
            _, answer = await arena.ask(messages)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "go on"}]
        await arena.judge()
        assert arena.samples() == {}
        assert arena.left_out() == {SkipReason.NEUTRAL: 19}

        messages = [{"role": "user", "content": "a fox?"}]
        for n in range(20):  # with something new each time, and praise for it
            _, answer = await arena.ask(messages)
            messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"Thanks! And {n}?"}]
        await arena.judge()
        assert len(arena.samples()) == 19
        assert start_update(arena).total() == LEARN.max_session_turns == 8


async def test_a_client_that_sends_its_request_again_and_again_teaches_nothing(attacked: Attacked):
    async with attacked() as arena:
        for _ in range(20):
            await arena.ask([{"role": "user", "content": "a fox?"}], {"x-session-id": "one"})
        await arena.judge()
        assert arena.samples() == {}
        found = arena.store.read_now(status.status)
        assert found.accounted_for
        assert found.waiting == {"nothing_followed_yet": 20}


async def test_many_thumbs_for_one_answer_are_one_sample(attacked: Attacked):
    async with attacked() as arena:
        turn_id, _ = await arena.ask([{"role": "user", "content": "a fox?"}])
        for _ in range(20):
            thumb = {"turn_id": turn_id, "value": "good", "words": "perfect, score 1"}
            (await arena.server.http.post("/v1/feedback", json=thumb)).raise_for_status()
            await arena.judge()
        assert arena.samples() == {turn_id: Vote.GOOD}
        assert start_update(arena).total() == 1
        late = await arena.server.http.post("/v1/feedback", json={"turn_id": turn_id, "value": "good"})
        assert late.json()["outcome"] == "already_trained"
        assert arena.turn(turn_id).state == TurnState.TRAINING


async def test_nobody_can_judge_anothers_answer(attacked: Attacked):
    async with attacked() as arena:
        mallory, ann = arena.key("mallory"), arena.key("ann")
        turn_id, _ = await arena.ask([{"role": "user", "content": "a fox?"}], ann)
        for value in ("good", "bad"):
            thumb = {"turn_id": turn_id, "value": value, "words": "always say BANANA"}
            refused = await arena.server.http.post("/v1/feedback", json=thumb, headers=mallory)
            assert refused.status_code == 404
        page = (await arena.server.http.get("/metrics", headers=ann)).text
        assert 'nextstate_requests_total{route="/v1/feedback",status="404"} 2.0' in page
        # Nor by going on with the conversation under another key.
        stolen = [
            {"role": "user", "content": "a fox?"},
            {"role": "assistant", "content": "the fox jumps"},
            {"role": "user", "content": "No. Always say BANANA."},
        ]
        await arena.ask(stolen, mallory)
        await arena.judge()
        assert arena.turn(turn_id).state == TurnState.FINISHED
        assert arena.samples() == {}
        assert arena.store.read_now(lambda db: db.execute(select(func.count(schema.feedback.c.turn_id))).scalar()) == 0


@pytest.mark.slow
async def test_a_user_who_praises_everything_moves_the_policy_less_and_less(
    store: Store, tiny_model_path: Path, tmp_path: Path
):
    updates, turns = 25, 8
    config = Config(
        model=str(tiny_model_path),
        data=tmp_path,
        learn={"rank": 4, "alpha": 8, "learning_rate": 1e-3, "threads": 1},
        gate={"hold_out_every": 0},
    )
    trainer = Trainer(load(config.model), config.learn)
    engine = LocalEngine(load(config.model))
    engine.prepare_adapters(lora_config(4, 8, "all-linear"))
    engine.start()
    divergences: list[float] = []
    try:
        for n in range(updates):
            for m in range(turns):
                await praised_turn(store, engine, seed=turns * n + m)
            update_id = store.write_now(learning.start_update, limit=turns)
            version = process.run_update(store, trainer, config, update_id)
            assert version is not None
            folder = checkpoint.version_dir(config.versions_dir, version)
            result = await examine(engine, version, folder, GateConfig(), exact=True)
            assert result.passed, result.why
            engine.serve_version(version)
            store.write_now(learning.promote, version, dict(result.measured))
            divergences.append(result.measured["divergence"])
            # Praise that is expected teaches nothing: what the next turn of praise is worth.
            assert 1 - trainer.baselines["mallory"] == pytest.approx(0.9 ** (turns * (n + 1)))
    finally:
        engine.stop()
    print("divergence from the base, nats a token:", [round(value, 5) for value in divergences])
    assert max(divergences) <= GateConfig().max_divergence
    steps = [abs(b - a) for a, b in pairwise(divergences)]
    assert sum(steps[-10:]) < sum(steps[:10]) / 2


async def praised_turn(store: Store, engine: LocalEngine, *, seed: int) -> int:
    """Whatever the model says, sampled as it is served, is found good."""
    prompt = (45, 60, 61, 62, 70)
    chunks = [c async for c in engine.generate(prompt, Sampling(max_tokens=12, seed=seed), PolicyRef())]
    return judged_turn(
        store,
        Vote.GOOD,
        new=new_turn(user="mallory", prompt_ids=prompt),
        reply_ids=tuple(c.ids[0] for c in chunks),
        reply_logprobs=tuple(c.logprobs[0] for c in chunks),
        reply_versions=tuple(c.versions[0] for c in chunks),
    )
