from __future__ import annotations

from nextstate.store import schema, steering
from nextstate.store.store import Store


def kinds(store: Store) -> list[str]:
    return store.read_now(lambda db: [row.kind for row in db.execute(schema.events.select())])


def test_learning_is_paused_once_and_resumed_once(store: Store):
    assert store.read_now(steering.paused_since) is None
    assert store.write_now(steering.pause_learning)
    since = store.read_now(steering.paused_since)
    assert since is not None
    assert not store.write_now(steering.pause_learning)
    assert store.read_now(steering.paused_since) == since  # the first one counts
    assert store.write_now(steering.resume_learning)
    assert store.read_now(steering.paused_since) is None
    assert not store.write_now(steering.resume_learning)
    assert kinds(store) == ["learning_paused", "learning_resumed"]


def test_a_pause_outlives_the_process(store: Store, tmp_path):
    store.write_now(steering.pause_learning)
    assert Store.open(f"sqlite:///{tmp_path / 'nextstate.db'}").read_now(steering.paused_since) is not None
