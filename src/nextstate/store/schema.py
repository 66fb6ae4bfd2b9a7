"""The tables. The store is the queue: a turn's `state` says which loop takes it next.

    generating ─▶ finished ─▶ continued ─▶ judged ─▶ training ─▶ trained
        │            │            │           │          │
        └────────────┴────────────┴───────────┴──────────┴─────▶ left_out, with a reason

Token ids and log-probs are little-endian int32 and float32 arrays in blobs, so a log-prob is stored as it was drawn.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(naming_convention={"ix": "ix_%(column_0_label)s", "uq": "uq_%(table_name)s_%(column_0_name)s"})

meta = Table(
    "meta",
    metadata,
    Column("key", Text, primary_key=True),
    Column("value", Text, nullable=False, comment="what this data folder belongs to: model name, weights fingerprint"),
)

# Rows stay when a key is revoked: a folder that ever had a key never serves without one again.
api_keys = Table(
    "api_keys",
    metadata,
    Column("key_id", Text, primary_key=True, comment="the beginning of the key, which is no secret"),
    Column("digest", Text, nullable=False, comment="SHA-256 of the whole key, hex; see store/keys.py"),
    Column("name", Text, nullable=False, comment="one key that is not revoked has it"),
    Column("user", Text, nullable=False, comment="whose conversations it opens"),
    Column("learn", Boolean, nullable=False, comment="false: what it asks is never judged or trained"),
    Column("created_at", Float, nullable=False),
    Column("used_at", Float, comment="its last use, to the minute; null before the first"),
    Column("revoked_at", Float, comment="null while it opens anything"),
)

sessions = Table(
    "sessions",
    metadata,
    Column("session_id", Integer, primary_key=True),
    Column("user", Text, nullable=False, comment="sessions of different users never meet"),
    Column("key", Text, nullable=False, comment="the client's own id, or one we made"),
    Column("started_at", Float, nullable=False, comment="seconds since the epoch, as all times here"),
    Column("last_at", Float, nullable=False),
    Column("ended_at", Float, comment="null while it goes on"),
    Column("end_reason", Text, comment="'done' said by the client, or 'idle'"),
    UniqueConstraint("user", "key"),
    Index("ix_sessions_open", "ended_at", "last_at"),
    Index("ix_sessions_recent", "user", "last_at"),
)

tool_sets = Table(
    "tool_sets",
    metadata,
    Column("tool_set", Text, primary_key=True, comment="hash of the tools"),
    Column("tools", Text, nullable=False, comment="JSON, its keys in the client's order: the model read them so"),
)

turns = Table(
    "turns",
    metadata,
    Column("turn_id", Integer, primary_key=True),
    Column("session_id", ForeignKey("sessions.session_id"), nullable=False, index=True),
    Column("user", Text, nullable=False),
    Column("parent_turn_id", ForeignKey("turns.turn_id"), comment="the turn whose answer this request continues"),
    Column("kind", Text, nullable=False, comment="how the request was placed; see collect/placement.py"),
    Column("placed_because", Text, nullable=False, comment="the reason for that decision"),
    Column("dialect", Text, nullable=False, comment="the API it came through: chat, responses, messages, ..."),
    Column("tool_set", ForeignKey("tool_sets.tool_set"), comment="the tools that the model saw; null: none"),
    Column("state", Text, nullable=False),
    Column("reason", Text, comment="why it was left out; set exactly when state is left_out"),
    Column("detail", Text, comment="one sentence more about the reason"),
    # What a turn has in common with its parent is stored with the parent: a session costs what it is long.
    Column("messages_kept", Integer, nullable=False, comment="leading messages shared with the parent and its answer"),
    Column("messages", JSON, nullable=False, comment="the request's messages after those"),
    Column("prompt_kept", Integer, nullable=False, comment="leading tokens shared with the parent's prompt and reply"),
    Column("prompt_suffix", LargeBinary, nullable=False, comment="int32 prompt tokens after those"),
    Column("prompt_tokens", Integer, nullable=False),
    Column("request_spine", Text, nullable=False, comment="hash of the request's messages without system text"),
    Column("answer_spine", Text, comment="the same with the answer behind them"),
    Column("heard_spine", Text, nullable=False, comment="the same as request_spine without what the model said"),
    Column("block_spine", Text, nullable=False, comment="hash of what was said to the model since it last spoke"),
    Column("opening", Text, nullable=False, comment="hash of the user's first words"),
    Column("setting", Text, nullable=False, comment="hash of them as sent, and of the system text"),
    Column("wording", Text, nullable=False, comment="hash of all that was said to the model, as sent"),
    Column("trace", Text, comment="trace id of the client's run, when it sends one"),
    Column("sampling", JSON, nullable=False),
    Column("learn", Boolean, nullable=False, comment="false: serve it, never judge or train it"),
    Column("answer", Text, comment="the text the client saw"),
    Column("reasoning", Text, comment="what the model thought before it, as the client saw it"),
    Column(
        "tool_calls",
        JSON(none_as_null=True),
        comment="the answer's calls in OpenAI's shape; null when it has none",
    ),
    Column("malformed_calls", Integer, nullable=False, server_default="0", comment="calls that stayed text"),
    Column("reply_ids", LargeBinary, comment="int32 sampled tokens"),
    Column("reply_logprobs", LargeBinary, comment="float32 nats under the sampling transform"),
    Column("reply_versions", JSON, comment="[[version, tokens], ...] in order"),
    Column("reply_tokens", Integer),
    Column("finish_reason", Text),
    Column("created_at", Float, nullable=False),
    Column("finished_at", Float),
    Column("judge_attempts", Integer, nullable=False, server_default="0"),
    Column("lease_until", Float, comment="a loop works on it until then; afterwards it may be claimed again"),
    Column("update_id", ForeignKey("updates.update_id"), index=True),
    Index("ix_turns_state", "state", "turn_id"),
    # Counting why turns were not trained reads nothing but this, however long the turns are.
    Index("ix_turns_why", "state", "reason"),
    Index("ix_turns_answer", "user", "answer_spine"),
    Index("ix_turns_request", "user", "request_spine"),
    Index("ix_turns_heard", "user", "heard_spine"),
    Index("ix_turns_block", "user", "block_spine"),
    Index("ix_turns_opening", "user", "opening"),
    Index("ix_turns_trace", "user", "trace"),
)

next_states = Table(
    "next_states",
    metadata,
    Column("turn_id", ForeignKey("turns.turn_id"), primary_key=True),
    Column("from_turn_id", ForeignKey("turns.turn_id"), nullable=False, comment="the request that brought it"),
    Column("source", Text, nullable=False, comment="user, environment or tool: the most trusted one in it"),
    Column("messages", JSON, nullable=False, comment="all messages after the answer"),
    Column("created_at", Float, nullable=False),
)

feedback = Table(
    "feedback",
    metadata,
    Column("feedback_id", Integer, primary_key=True),
    Column("turn_id", ForeignKey("turns.turn_id"), nullable=False, index=True),
    Column("value", SmallInteger, nullable=False, comment="1 or -1"),
    Column("words", Text, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
)

# Another judgement adds a row and overwrites nothing, so any past update can be explained from the rows that fed it.
verdicts = Table(
    "verdicts",
    metadata,
    Column("verdict_id", Integer, primary_key=True),
    Column("turn_id", ForeignKey("turns.turn_id"), nullable=False, index=True),
    Column("judge", Text, nullable=False, comment="'evidence', or a model and a hash of its prompts"),
    Column("value", SmallInteger, comment="1, 0 or -1; null when every vote abstained"),
    Column("probabilities", JSON, comment="of the labels, when the judge gives them"),
    Column("reason", Text, nullable=False),
    Column("created_at", Float, nullable=False, index=True),
)

votes = Table(
    "votes",
    metadata,
    Column("verdict_id", ForeignKey("verdicts.verdict_id"), primary_key=True),
    Column("n", Integer, primary_key=True),
    Column("value", SmallInteger, comment="null: this vote abstained"),
)

hints = Table(
    "hints",
    metadata,
    Column("verdict_id", ForeignKey("verdicts.verdict_id"), primary_key=True),
    Column("n", Integer, primary_key=True, comment="most trusted first"),
    Column("text", Text, nullable=False),
    Column("source", Text, nullable=False),
)

samples = Table(
    "samples",
    metadata,
    Column("turn_id", ForeignKey("turns.turn_id"), primary_key=True),
    Column("verdict_id", ForeignKey("verdicts.verdict_id"), nullable=False),
    Column("reward", SmallInteger, nullable=False, comment="1 or -1"),
    Column("hint", Text, comment="the most trusted hint; null: this turn has no teacher"),
    Column("created_at", Float, nullable=False),
)

updates = Table(
    "updates",
    metadata,
    Column("update_id", Integer, primary_key=True),
    Column("parent_version", Integer, nullable=False),
    Column("version", Integer, nullable=False, comment="the version it makes"),
    # Comments may change, migrations may not: superseded came later, see give_back.
    Column(
        "state",
        Text,
        nullable=False,
        comment="running, done, failed, interrupted, empty or stopped; see abandon_update",
    ),
    Column("started_at", Float, nullable=False),
    Column("finished_at", Float),
    Column(
        "metrics", JSON, comment="loss terms, token counts, divergence, seconds; forgotten_turns: see forgetting.py"
    ),
    Column("error", Text),
    Column("turn_ids", JSON, comment="the turns that an update without a version had taken"),
)

policy_versions = Table(
    "policy_versions",
    metadata,
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("parent_version", Integer),
    Column("update_id", ForeignKey("updates.update_id")),
    Column("artifact", Text, comment="folder under the data folder; null for the base"),
    Column("state", Text, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("served_at", Float),
    Column("gate", JSON, comment="what the gate measured"),
)

events = Table(
    "events",
    metadata,
    Column("event_id", Integer, primary_key=True),
    Column("at", Float, nullable=False),
    Column("kind", Text, nullable=False, index=True),
    Column("turn_id", Integer),
    Column("data", JSON, nullable=False),
)
