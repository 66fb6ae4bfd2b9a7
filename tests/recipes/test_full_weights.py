"""Full weights on the real server and the real trainer; and a trainer that finds no room, beside a server that does."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from nextstate.cli.main import app
from nextstate.errors import ConfigError
from nextstate.store import learning, status
from nextstate.store.store import bind_to_weights
from tests.crash.judge_endpoint import JudgeEndpoint
from tests.crash.people import People, Seen
from tests.crash.served import Served, talkative, until, write_config


async def corrected(people: People, question: str) -> Seen:
    """An answer that ended by itself, and that its user then corrected."""
    while True:
        messages = [{"role": "user", "content": question}]
        answer = await people.ask(messages)
        assert answer is not None
        if answer.finish == "stop":
            break
    remark = {"role": "user", "content": "Too long. One short sentence, please."}
    assert await people.ask([*messages, {"role": "assistant", "content": answer.text}, remark])
    return answer


async def probabilities(served: Served, version: int, ids: list[int]) -> list[float]:
    """Log-probs of a short reply by a version; its ids are added to those of the prompt."""
    body = {"model": f"policy@{version}", "prompt_ids": ids, "max_tokens": 4, "temperature": 1.0, "learn": False}
    async with httpx.AsyncClient(verify=False, timeout=60) as http:
        answer = (await http.post(f"{served.url}/generate", json=body)).raise_for_status().json()
    ids += answer["ids"]
    return list(answer["logprobs"])


@pytest.mark.slow
async def test_a_correction_changes_all_weights_and_the_version_outlives_a_restart_and_can_be_taken_back(
    tmp_path: Path, tiny_model_path: Path
):
    model = talkative(tiny_model_path, tmp_path / "tiny", ends=41)
    with JudgeEndpoint() as judge:
        learn = {"weights": "full", "batch_turns": 1, "learning_rate": 1e-4, "max_wait_s": 0.5}
        config = write_config(tmp_path / "config.toml", model=model, judge_url=judge.url, learn=learn)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        store, people = served.store, People(served, seed=0)
        try:
            await corrected(people, "a fox?")
            await until(lambda: store.read_now(learning.serving_version) >= 1, "its version serves")
            await until(lambda: store.read_now(learning.candidate) is None, "no version is examined")
            version = store.read_now(learning.serving_version)
            folder = served.data / store.read_now(learning.version_row, version).artifact
            assert store.read_now(status.last_event, "memory_plan")["weights"] == "full"
            assert store.read_now(status.last_event, "stress_step") is not None

            prompt = [45, 60, 61, 62, 70]
            ids = list(prompt)
            found = await probabilities(served, version, ids)
            with torch.no_grad():
                plain = AutoModelForCausalLM.from_pretrained(folder)
                logprobs = plain(torch.tensor([ids])).logits[0].log_softmax(-1)
            reply = ids[len(prompt) :]
            expected = [float(logprobs[len(prompt) - 1 + n, token]) for n, token in enumerate(reply)]
            assert found == pytest.approx(expected, abs=1e-3)

            await served.kill(trainer=True)
            await served.start()
            assert served.version == version
            answer = await people.ask([{"role": "user", "content": "a dog?"}])
            assert answer is not None
            assert answer.version == version

            assert CliRunner().invoke(app, ["rollback", "0", "--data", str(served.data)]).exit_code == 0
            await until(lambda: store.read_now(learning.serving_version) == 0, "the base serves again")
            answer = await people.ask([{"role": "user", "content": "a cat?"}])
            assert answer is not None
            assert answer.version == 0
            with pytest.raises(ConfigError, match=r"trained with learn\.weights = 'full'"):
                store.write_now(bind_to_weights, "lora")
        finally:
            await served.stop()


@pytest.mark.slow
async def test_where_the_trainer_does_not_fit_the_server_serves_and_says_why_it_does_not_learn(
    tmp_path: Path, tiny_model_path: Path
):
    with JudgeEndpoint() as judge:
        learn = {"memory_gb": 0.05}
        config = write_config(tmp_path / "config.toml", model=tiny_model_path, judge_url=judge.url, learn=learn)
        served = Served(tmp_path / "data", "--config", str(config))
        await served.start()
        try:
            await until(lambda: served.store.read_now(status.why_not_learning), "the trainer refuses")
            await until(lambda: served.store.read_now(status.last_event, "trainer_ended"), "it has ended")
            answer = await People(served, seed=0).ask([{"role": "user", "content": "a fox?"}])
            assert answer is not None
            why = "0.05 GB are available to the trainer (learn.memory_gb), and even turns of 256 tokens would need"
            async with httpx.AsyncClient(verify=False) as http:
                health = (await http.get(served.url.replace("/v1", "/healthz"))).json()
            assert health["status"] == "ok"
            assert why in health["not_learning"]
            shown = CliRunner().invoke(app, ["status", "--data", str(served.data)]).stdout
            assert f"not learning: {why}" in shown
            assert "it starts again in 600 s, serving goes on" in served.log()
            assert "Traceback" not in served.log()
        finally:
            assert await served.stop() == 0
