"""Fit the scored judge's calibration on labelled turns, and say how well it judges.

    python -m nextstate.judge.fit_calibration FILE.jsonl [FILE.jsonl] --model MODEL [--write]

With two files it also fits on each and reports on the other, which is the honest figure; the fitted values printed or
written come from all rows. Rows: {"request", "response", "next_state", "label"}. Only rows in which a user speaks are
fitted on, because on the others the scored judge does not vote.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.judge.calibration import Calibration, Readings, content_free
from nextstate.judge.evidence import evidence
from nextstate.judge.prompts import prompts_hash, reply_of
from nextstate.judge.scored import ScoredJudge
from nextstate.judge.votes import NEUTRAL_AT, SIGN_AT, vote_of
from nextstate.types import FinishReason, TurnToJudge, Vote

Verdicts = list[Vote | None]


def turns_of(path: Path, first_id: int = 0) -> list[tuple[TurnToJudge, Vote]]:
    """The labelled turns of a file, numbered from `first_id` on."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [
        (
            TurnToJudge(
                turn_id=first_id + number,
                history=({"role": "user", "content": row["request"]},),
                answer=row["response"],
                next_state=tuple(row["next_state"]),
                finish_reason=FinishReason.STOP,
            ),
            Vote(row["label"]),
        )
        for number, row in enumerate(rows)
    ]


def fit(readings: Sequence[Readings], labels: Sequence[Vote], base: Calibration, *, pull: float = 1.0) -> Calibration:
    """Multinomial logistic regression; each label weighs the same, however many rows have it.

        loss = mean_n w[label_n] * -log softmax(W @ x_n + b)[label_n]  +  pull / N * |W|^2

    Args:
        base: gives prompts, model and fingerprint.
        pull: how strongly weights are held near 0. Readings are divided by their common spread first.
    """
    x_NF = torch.tensor(readings, dtype=torch.float64)
    order = list(Vote)
    target_N = torch.tensor([order.index(label) for label in labels])
    counts = Counter(labels)
    weight_V = torch.tensor([len(labels) / len(order) / max(1, counts[vote]) for vote in order], dtype=torch.float64)
    spread = float(x_NF.std(0).mean())
    weights_VF = torch.zeros(len(order), x_NF.shape[1], dtype=torch.float64, requires_grad=True)
    bias_V = torch.zeros(len(order), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights_VF, bias_V], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        logits_NV = x_NF / spread @ weights_VF.T + bias_V
        loss = torch.nn.functional.cross_entropy(logits_NV, target_N, weight=weight_V)
        loss = loss + pull / len(labels) * weights_VF.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return Calibration(
        kind="fitted",
        prompts_hash=base.prompts_hash,
        model=base.model,
        fingerprint=tuple(round(value, 4) for value in base.fingerprint),
        weights=tuple(tuple(round(value, 4) for value in row) for row in (weights_VF.detach() / spread).tolist()),
        bias=tuple(round(value, 4) for value in bias_V.detach().tolist()),
    )


def report(title: str, labels: Sequence[Vote], verdicts: Sequence[Vote | None]) -> str:
    """Figures as one line, and the confusion table. An abstention counts as wrong in accuracy, as neutral in F1."""
    pairs = list(zip(labels, verdicts, strict=True))
    reversed_ = [(label, verdict) for label, verdict in pairs if verdict is not None and label * verdict < 0]
    signed = [(label, verdict) for label, verdict in pairs if label is not Vote.NEUTRAL]
    voted_sign = [(label, verdict) for label, verdict in pairs if verdict in (Vote.GOOD, Vote.BAD)]
    f1 = []
    for vote in Vote:
        hit = sum(label is vote and (verdict or Vote.NEUTRAL) == vote for label, verdict in pairs)
        said = sum((verdict or Vote.NEUTRAL) == vote for _, verdict in pairs)
        f1.append(2 * hit / max(1, said + sum(label is vote for label in labels)))
    lines = [
        f"{title}: {len(pairs)} rows, accuracy {_share(label is verdict for label, verdict in pairs)}, "
        f"macro-F1 {sum(f1) / len(f1):.3f}, "
        f"wrong sign {len(reversed_) / max(1, len(signed)):.3f} of signed rows, "
        f"right {_share(label is verdict for label, verdict in voted_sign)} of {len(voted_sign)} signed verdicts, "
        f"abstained {_share(verdict is None for _, verdict in pairs)}"
    ]
    table = Counter(pairs)
    for label in Vote:
        cells = ", ".join(f"{_word(verdict)} {table[label, verdict]}" for verdict in (*Vote, None))
        lines.append(f"    {_word(label):>7}: {cells}")
    return "\n".join(lines)


def _share(hits: Iterable[bool]) -> str:
    found = list(hits)
    return f"{sum(found) / len(found):.3f}" if found else "-"


def _word(vote: Vote | None) -> str:
    return "none" if vote is None else vote.name.lower()


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--model", required=True, help="a Hugging Face model, as for serving")
    parser.add_argument("--name", default=None, help="what to call the model; its own name otherwise")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--write", action="store_true", help="put the values into judge/calibration.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    loaded = load(options.model)
    name = options.name or loaded.name
    engine = LocalEngine(loaded, threads=options.threads)
    engine.start()
    judge = ScoredJudge(engine, loaded.tokenizer, model=name)
    base = content_free(name, prompts_hash(), await judge.fingerprint())

    parts = [turns_of(path, number * 1_000_000) for number, path in enumerate(options.files)]
    readings = {turn.turn_id: (await judge.readings([turn]))[0] for part in parts for turn, _ in part if reply_of(turn)}

    def fitted_on(rows: Sequence[tuple[TurnToJudge, Vote]]) -> Calibration:
        kept = [(turn, label) for turn, label in rows if turn.turn_id in readings]
        return fit([readings[turn.turn_id] for turn, _ in kept], [label for _, label in kept], base)

    def show(title: str, rows: Sequence[tuple[TurnToJudge, Vote]], calibration: Calibration) -> None:
        facts: Verdicts = []
        scored: Verdicts = []
        both: Verdicts = []
        for turn, _ in rows:
            found = evidence(turn)
            reading = readings.get(turn.turn_id)
            vote = None
            if reading is not None:
                vote = vote_of(calibration.probabilities(reading), sign_at=SIGN_AT, neutral_at=NEUTRAL_AT)
            facts.append(None if found is None else found.value)
            scored.append(vote)
            both.append(vote if found is None else found.value)
        labels = [label for _, label in rows]
        for what, verdicts in (("evidence", facts), ("scored", scored), ("evidence, then scored", both)):
            print(report(f"{title}, {what}", labels, verdicts))

    if len(parts) == 2:
        for learned, read in ((0, 1), (1, 0)):
            title = f"fitted on {options.files[learned].name}, read on {options.files[read].name}"
            show(title, parts[read], fitted_on(parts[learned]))
    rows = [row for part in parts for row in part]
    calibration = fitted_on(rows)
    for path, part in zip(options.files, parts, strict=True):
        show(f"content-free, read on {path.name}", part, base)
        show(f"fitted on all, read on {path.name} (seen)", part, calibration)
    print(json.dumps(calibration.as_json()))
    if options.write:
        target = Path(__file__).with_name("calibration.json")
        stored = json.loads(target.read_text(encoding="utf-8"))["fitted"]
        # Values for older prompts of the same model are never used again; those for other models stay.
        kept = [values for values in stored if values["model"] != name]
        target.write_text(json.dumps({"fitted": [*kept, calibration.as_json()]}, indent=1) + "\n", encoding="utf-8")
        print(f"Wrote {target}.")


if __name__ == "__main__":
    asyncio.run(main())
