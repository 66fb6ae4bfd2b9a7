"""Finished runs on disk, one JSON file each, and what they say together.

A run that has its file is not run again, so a table can be made in pieces, by several processes at once.
"""

from __future__ import annotations

import fcntl
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nextstate.errors import ConfigError
from nextstate.people.experiment import Outcome, Run
from nextstate.people.sticking import last_third, sessions_until_it_sticks, share

_SHOWN_CHARS = 400


def as_json(plan: Run, outcome: Outcome, *, cpu_s: float) -> dict[str, Any]:
    """A run's record. In `met` a # is a first answer as wished; in `cut` an x is one that broke off."""
    return {
        "personas": [persona.name for persona in plan.personas],
        "method": plan.method,
        "seed": plan.seed,
        "sessions": plan.sessions,
        "round_sessions": plan.round_sessions,
        "answers": plan.answers,
        "temperature": plan.temperature,
        "settings": outcome.settings,
        "first_answers": {
            name: {
                "met": "".join("#" if answer.fault is None else "." for answer in answers),
                "cut": "".join("x" if answer.finish == "length" else "." for answer in answers),
                "versions": [answer.version for answer in answers],
                "faults": Counter(str(answer.fault) for answer in answers if answer.fault is not None),
                "first": answers[0].text[:_SHOWN_CHARS],
                "last": answers[-1].text[:_SHOWN_CHARS],
            }
            for name, answers in outcome.first_answers.items()
        },
        "verdicts": [
            {"as_wished": met, "verdict": verdict, "count": count}
            for (met, verdict), count in sorted(outcome.verdicts.items())
        ],
        "turns": dict(outcome.turns),
        "updates": outcome.updates,
        "cpu_s": round(cpu_s, 1),
    }


@contextmanager
def claimed(folder: Path, name: str) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Claim a run. Gives the function that writes its record, or None where it is there or another process has it.

    The claim is a lock on the file's part, so it ends with the process whatever happens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, part = folder / f"{name}.json", folder / f"{name}.json.part"
    if path.exists():
        yield None
        return
    with part.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            yield None
            return
        if path.exists():  # its process ended between the look and the lock
            yield None
            return

        def write(record: Mapping[str, Any]) -> None:
            part.write_text(json.dumps(record, indent=1) + "\n")
            part.rename(path)

        try:
            yield write
        finally:
            part.unlink(missing_ok=True)


def read(folder: Path) -> list[dict[str, Any]]:
    """All records of a folder, by file name.

    Raises:
        ConfigError: one cannot be read.
    """
    records = []
    for file in sorted(folder.glob("*.json")):
        try:
            records.append(json.loads(file.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file} is no record of a run ({error}). Remove it to make the run again.") from error
    return records


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One persona under one method: what all seeds say."""

    sessions: int
    """In each run."""
    until: tuple[int | None, ...]
    """A run each; None: it never stuck."""
    first_round: tuple[float, ...]
    """Share of first answers as wished, of those before anything could be learned."""
    overall: tuple[float, ...]
    at_the_end: tuple[float, ...]
    """The same in the last third of the sessions."""

    @property
    def censored(self) -> int:
        return sum(one is None for one in self.until)

    @property
    def sessions_until(self) -> tuple[int, ...]:
        """Of a run in which it never stuck, as many as there were: at least so many would have been needed."""
        return tuple(self.sessions if one is None else one for one in self.until)


def cell(records: Iterable[Mapping[str, Any]], persona: str) -> Cell | None:
    """A persona's cell from the records that have it; None where there is none."""
    chosen = [record for record in records if persona in record["first_answers"]]
    if not chosen:
        return None
    met = [[sign == "#" for sign in record["first_answers"][persona]["met"]] for record in chosen]
    rounds = [record["round_sessions"] for record in chosen]
    return Cell(
        sessions=len(met[0]),
        until=tuple(sessions_until_it_sticks(row) for row in met),
        first_round=tuple(_share(row[:size]) for row, size in zip(met, rounds, strict=True)),
        overall=tuple(_share(row) for row in met),
        at_the_end=tuple(_share(last_third(row)) for row in met),
    )


def _share(met: Sequence[bool]) -> float:
    found = share(met)
    assert found is not None, "a run without sessions"
    return found


def agreement(records: Iterable[Mapping[str, Any]]) -> Counter[tuple[bool, str]]:
    """How often answers that are as wished (True) or not had which verdict, over records."""
    counts: Counter[tuple[bool, str]] = Counter()
    for record in records:
        for row in record["verdicts"]:
            counts[row["as_wished"], row["verdict"]] += row["count"]
    return counts
