"""How well the local judge judges, measured across files, and the heads that are shipped.

    python -m benchmarks.judging A.jsonl B.jsonl --model MODEL [--ship]

A head is fitted on the package's own cases and one file, and the judge is measured on the other file, and the other
way round. Nothing of a file is ever fitted for the figures that are reported on it. `--ship` then fits on everything
and puts the head into the package; with it goes the head that sees the wording alone.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from nextstate.engines.local import LocalEngine
from nextstate.engines.model import load
from nextstate.judge import head as heads
from nextstate.judge.cues import WORDING_COUNT
from nextstate.judge.evaluating import judged
from nextstate.judge.fitting import blank_head, own_cases, seen, to_vote_on
from nextstate.judge.head import Fold, fit
from nextstate.judge.judge import EvidenceFirst
from nextstate.judge.labelled import read_labelled
from nextstate.judge.measure import Measured, measure
from nextstate.judge.scored import ScoredJudge, layers_of
from nextstate.types import TurnToJudge


class Remembered(ScoredJudge):
    """The scored judge with features that were computed before, so that a file is read once for all heads."""

    def remember(self, turns: Sequence[TurnToJudge], features: torch.Tensor) -> None:
        self._of = {turn.turn_id: row for turn, row in zip(turns, features, strict=True)}

    async def features(self, turns: Sequence[TurnToJudge], layers: Sequence[int]) -> torch.Tensor:
        return torch.stack([self._of[turn.turn_id] for turn in turns])


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs=2, type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--name", help="what to call the model in the head; its own name otherwise")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--features", type=Path, help="a file to keep what the model thought of each turn")
    parser.add_argument("--ship", action="store_true")
    options = parser.parse_args()

    loaded = load(options.model, dtype=options.dtype)
    name = options.name or loaded.name
    engine = LocalEngine(loaded, threads=options.threads)
    engine.start()
    judge = ScoredJudge(engine, loaded.tokenizer, model=name)
    layers = layers_of(int(loaded.model.config.num_hidden_layers))  # type: ignore[union-attr, arg-type]
    cases = to_vote_on(own_cases())
    files = [read_labelled(path, first_id=(at + 1) * 1_000_000) for at, path in enumerate(options.files)]
    asked = [cases, *(to_vote_on(rows) for rows in files)]
    if options.features is not None and options.features.exists():
        folds = torch.load(options.features, weights_only=False)
    else:
        folds = []
        for rows in asked:
            folds.append(await seen(judge, rows, layers, lambda n: print(".", end="", file=sys.stderr, flush=True)))
        if options.features is not None:
            torch.save(folds, options.features)
    blank = await blank_head(judge, name, layers)
    wording_blank = await blank_head(judge, "", ())
    engine.stop()

    for kind, start, sources in (
        (name, blank, folds),
        ("the wording alone", wording_blank, [_wording(fold) for fold in folds]),
    ):
        for learned, read in ((1, 2), (2, 1)):
            head = fit([sources[0], sources[learned]], start)
            remembered = Remembered(engine, loaded.tokenizer, model=name, head=head)
            remembered.remember([row.turn for row in asked[read]], sources[read].features)
            rows = files[read - 1]
            verdicts, seconds = await judged(EvidenceFirst(remembered), rows, lambda n: None)
            title = f"{kind}: {options.files[learned - 1].stem} -> {options.files[read - 1].stem}"
            print(_line(title, measure(rows, verdicts, seconds)), flush=True)
        if options.ship:
            target = Path(heads.__file__).with_name("heads") / f"{start.model or 'wording'}.safetensors"
            heads.save(fit(sources, start), target)
            print(f"wrote {target}, {target.stat().st_size / 1000:.0f} kB")


def _wording(fold: Fold) -> Fold:
    return Fold(features=fold.features[:, -WORDING_COUNT:], labels=fold.labels, groups=fold.groups)


def _line(title: str, found: Measured) -> str:
    ece = "-" if found.calibration is None else f"{found.calibration.error:.3f}"
    return (
        f"{title}: accuracy {found.accuracy:.3f}, macro-F1 {found.macro_f1:.3f}, wrong sign {found.wrong_sign:.3f}, "
        f"abstained {found.abstained:.3f}; on the rows voted on {found.voted_accuracy:.3f} and "
        f"{found.voted_macro_f1:.3f}; ECE {ece}"
    )


if __name__ == "__main__":
    asyncio.run(main())
