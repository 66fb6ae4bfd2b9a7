"""The whole loop: talk, be corrected, be judged, learn, serve what was learned, with the real processes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from nextstate.store import judging, learning, status
from nextstate.store.arrays import unpack_versions
from nextstate.types import TurnState, Vote
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People, Seen
from tests.crash.served import Served, talkative, until, write_config

DIRECTIVE = "One short sentence, please."
CORRECTION = f"Too long. {DIRECTIVE}"


async def corrected(people: People, question: str) -> Seen:
    """An answer that ended by itself, and that its user then corrected."""
    while True:
        messages = [{"role": "user", "content": question}]
        answer = await people.ask(messages)
        assert answer is not None
        if answer.finish == "stop":
            break
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": CORRECTION}]
    assert await people.ask(messages)
    return answer


async def read_on(people: People) -> None:
    """One long answer after another."""
    while True:
        assert await people.ask([{"role": "user", "content": "tell me everything"}])


@pytest.mark.slow
async def test_a_correction_becomes_a_version_that_answers_while_long_answers_go_on(
    tmp_path: Path, tiny_model_path: Path
):
    model = talkative(tiny_model_path, tmp_path / "tiny", ends=3)
    with JudgeEndpoint() as judge:
        learn = {"batch_turns": 8, "max_wait_s": 0.5, "steps": 5, "learning_rate": 1e-3}
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store = served.store
        people, readers = People(served, seed=0, max_tokens=100), People(served, seed=1, max_tokens=400)
        reading = [asyncio.create_task(read_on(readers)) for _ in range(2)]
        try:
            first = await corrected(people, "a fox?")
            assert first.version == 0

            def is_trained() -> bool:
                return store.read_now(status.show_turn, first.turn_id).state == TurnState.TRAINED

            await until(is_trained, "the corrected turn is trained")
            [verdict] = store.read_now(judging.list_verdicts, first.turn_id)
            assert verdict.value is Vote.BAD
            assert verdict.hints[0] == DIRECTIVE  # without the complaint
            await until(lambda: store.read_now(learning.serving_version) >= 1, "its version serves")
            later = await people.ask([{"role": "user", "content": "a dog?"}])
            assert later is not None
            assert later.version >= 1

            # One publish may fall between two long answers; of several one falls into an answer.
            def versions_in_one_answer() -> int:
                rows = [store.read_now(status.show_turn, seen.turn_id) for seen in readers.seen]
                return max((len(set(unpack_versions(row.reply_versions))) for row in rows), default=0)

            async with asyncio.timeout(600):
                while versions_in_one_answer() < 2:
                    await corrected(people, "another fox?")

            def at_rest() -> bool:
                running = store.read_now(learning.running_updates)
                return not running and store.read_now(learning.candidate) is None

            await until(at_rest, "no version is made or examined")
            store.write_now(learning.roll_back, 0)
            await until(lambda: store.read_now(learning.serving_version) == 0, "the base serves again")
            assert not any(task.done() for task in reading), "a long answer was cut"
            assert readers.broken == people.broken == 0
            for seen in readers.seen:
                assert store.read_now(status.show_turn, seen.turn_id).answer == seen.text
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
            await served.stop()
