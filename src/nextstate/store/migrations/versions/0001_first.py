"""The first schema.

Released as it stands: a later change is a new file.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("event_id", sa.Integer(), nullable=False),
        sa.Column("at", sa.Float(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("turn_id", sa.Integer(), nullable=True),
        sa.Column("data", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("event_id"),
    )
    op.create_index(op.f("ix_events_kind"), "events", ["kind"], unique=False)
    op.create_table(
        "meta",
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column(
            "value",
            sa.Text(),
            nullable=False,
            comment="what this data folder belongs to: model name, weights fingerprint",
        ),
        sa.PrimaryKeyConstraint("key"),
    )
    op.create_table(
        "api_keys",
        sa.Column("key_id", sa.Text(), nullable=False, comment="the beginning of the key, which is no secret"),
        sa.Column("digest", sa.Text(), nullable=False, comment="SHA-256 of the whole key, hex; see store/keys.py"),
        sa.Column("name", sa.Text(), nullable=False, comment="one key that is not revoked has it"),
        sa.Column("user", sa.Text(), nullable=False, comment="whose conversations it opens"),
        sa.Column("learn", sa.Boolean(), nullable=False, comment="false: what it asks is never judged or trained"),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("used_at", sa.Float(), nullable=True, comment="its last use, to the minute; null before the first"),
        sa.Column("revoked_at", sa.Float(), nullable=True, comment="null while it opens anything"),
        sa.PrimaryKeyConstraint("key_id"),
    )
    op.create_table(
        "sessions",
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False, comment="sessions of different users never meet"),
        sa.Column("key", sa.Text(), nullable=False, comment="the client's own id, or one we made"),
        sa.Column("started_at", sa.Float(), nullable=False, comment="seconds since the epoch, as all times here"),
        sa.Column("last_at", sa.Float(), nullable=False),
        sa.Column("ended_at", sa.Float(), nullable=True, comment="null while it goes on"),
        sa.Column("end_reason", sa.Text(), nullable=True, comment="'done' said by the client, or 'idle'"),
        sa.PrimaryKeyConstraint("session_id"),
        sa.UniqueConstraint("user", "key", name=op.f("uq_sessions_user")),
    )
    op.create_index("ix_sessions_open", "sessions", ["ended_at", "last_at"], unique=False)
    op.create_index("ix_sessions_recent", "sessions", ["user", "last_at"], unique=False)
    op.create_table(
        "updates",
        sa.Column("update_id", sa.Integer(), nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False, comment="the version it makes"),
        sa.Column("state", sa.Text(), nullable=False, comment="running, done or failed"),
        sa.Column("started_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("metrics", sa.JSON(), nullable=True, comment="loss terms, token counts, divergence, seconds"),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("turn_ids", sa.JSON(), nullable=True, comment="the turns that a failed update gave back"),
        sa.PrimaryKeyConstraint("update_id"),
    )
    op.create_table(
        "policy_versions",
        sa.Column("version", sa.Integer(), autoincrement=False, nullable=False),
        sa.Column("parent_version", sa.Integer(), nullable=True),
        sa.Column("update_id", sa.Integer(), nullable=True),
        sa.Column("artifact", sa.Text(), nullable=True, comment="folder under the data folder; null for the base"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("served_at", sa.Float(), nullable=True),
        sa.Column("gate", sa.JSON(), nullable=True, comment="what the gate measured"),
        sa.ForeignKeyConstraint(
            ["update_id"],
            ["updates.update_id"],
        ),
        sa.PrimaryKeyConstraint("version"),
    )
    op.create_table(
        "tool_sets",
        sa.Column("tool_set", sa.Text(), nullable=False, comment="hash of the tools"),
        sa.Column(
            "tools", sa.Text(), nullable=False, comment="JSON, its keys in the client's order: the model read them so"
        ),
        sa.PrimaryKeyConstraint("tool_set"),
    )
    op.create_table(
        "turns",
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("session_id", sa.Integer(), nullable=False),
        sa.Column("user", sa.Text(), nullable=False),
        sa.Column(
            "parent_turn_id", sa.Integer(), nullable=True, comment="the turn whose answer this request continues"
        ),
        sa.Column("kind", sa.Text(), nullable=False, comment="how the request was placed; see collect/placement.py"),
        sa.Column("placed_because", sa.Text(), nullable=False, comment="the reason for that decision"),
        sa.Column(
            "dialect", sa.Text(), nullable=False, comment="the API it came through: chat, responses, messages, ..."
        ),
        sa.Column("tool_set", sa.Text(), nullable=True, comment="the tools that the model saw; null: none"),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column(
            "reason", sa.Text(), nullable=True, comment="why it was left out; set exactly when state is left_out"
        ),
        sa.Column("detail", sa.Text(), nullable=True, comment="one sentence more about the reason"),
        sa.Column(
            "messages_kept",
            sa.Integer(),
            nullable=False,
            comment="leading messages shared with the parent and its answer",
        ),
        sa.Column("messages", sa.JSON(), nullable=False, comment="the request's messages after those"),
        sa.Column(
            "prompt_kept",
            sa.Integer(),
            nullable=False,
            comment="leading tokens shared with the parent's prompt and reply",
        ),
        sa.Column("prompt_suffix", sa.LargeBinary(), nullable=False, comment="int32 prompt tokens after those"),
        sa.Column("prompt_tokens", sa.Integer(), nullable=False),
        sa.Column(
            "request_spine", sa.Text(), nullable=False, comment="hash of the request's messages without system text"
        ),
        sa.Column("answer_spine", sa.Text(), nullable=True, comment="the same with the answer behind them"),
        sa.Column(
            "heard_spine",
            sa.Text(),
            nullable=False,
            comment="the same as request_spine without what the model said",
        ),
        sa.Column(
            "block_spine", sa.Text(), nullable=False, comment="hash of what was said to the model since it last spoke"
        ),
        sa.Column("opening", sa.Text(), nullable=False, comment="hash of the user's first words"),
        sa.Column("setting", sa.Text(), nullable=False, comment="hash of them as sent, and of the system text"),
        sa.Column("wording", sa.Text(), nullable=False, comment="hash of all that was said to the model, as sent"),
        sa.Column("trace", sa.Text(), nullable=True, comment="trace id of the client's run, when it sends one"),
        sa.Column("sampling", sa.JSON(), nullable=False),
        sa.Column("learn", sa.Boolean(), nullable=False, comment="false: serve it, never judge or train it"),
        sa.Column("answer", sa.Text(), nullable=True, comment="the text the client saw"),
        sa.Column(
            "reasoning", sa.Text(), nullable=True, comment="what the model thought before it, as the client saw it"
        ),
        sa.Column(
            "tool_calls",
            sa.JSON(none_as_null=True),
            nullable=True,
            comment="the answer's calls in OpenAI's shape; null when it has none",
        ),
        sa.Column(
            "malformed_calls", sa.Integer(), server_default="0", nullable=False, comment="calls that stayed text"
        ),
        sa.Column("reply_ids", sa.LargeBinary(), nullable=True, comment="int32 sampled tokens"),
        sa.Column(
            "reply_logprobs", sa.LargeBinary(), nullable=True, comment="float32 nats under the sampling transform"
        ),
        sa.Column("reply_versions", sa.JSON(), nullable=True, comment="[[version, tokens], ...] in order"),
        sa.Column("reply_tokens", sa.Integer(), nullable=True),
        sa.Column("finish_reason", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("judge_attempts", sa.Integer(), server_default="0", nullable=False),
        sa.Column(
            "lease_until",
            sa.Float(),
            nullable=True,
            comment="a loop works on it until then; afterwards it may be claimed again",
        ),
        sa.Column("update_id", sa.Integer(), nullable=True),
        sa.ForeignKeyConstraint(
            ["tool_set"],
            ["tool_sets.tool_set"],
        ),
        sa.ForeignKeyConstraint(
            ["parent_turn_id"],
            ["turns.turn_id"],
        ),
        sa.ForeignKeyConstraint(
            ["session_id"],
            ["sessions.session_id"],
        ),
        sa.ForeignKeyConstraint(
            ["update_id"],
            ["updates.update_id"],
        ),
        sa.PrimaryKeyConstraint("turn_id"),
    )
    op.create_index("ix_turns_answer", "turns", ["user", "answer_spine"], unique=False)
    op.create_index("ix_turns_block", "turns", ["user", "block_spine"], unique=False)
    op.create_index("ix_turns_heard", "turns", ["user", "heard_spine"], unique=False)
    op.create_index("ix_turns_opening", "turns", ["user", "opening"], unique=False)
    op.create_index("ix_turns_trace", "turns", ["user", "trace"], unique=False)
    op.create_index("ix_turns_request", "turns", ["user", "request_spine"], unique=False)
    op.create_index(op.f("ix_turns_session_id"), "turns", ["session_id"], unique=False)
    op.create_index("ix_turns_state", "turns", ["state", "turn_id"], unique=False)
    op.create_index(op.f("ix_turns_update_id"), "turns", ["update_id"], unique=False)
    op.create_table(
        "feedback",
        sa.Column("feedback_id", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("value", sa.SmallInteger(), nullable=False, comment="1 or -1"),
        sa.Column("words", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["turn_id"],
            ["turns.turn_id"],
        ),
        sa.PrimaryKeyConstraint("feedback_id"),
    )
    op.create_index(op.f("ix_feedback_turn_id"), "feedback", ["turn_id"], unique=False)
    op.create_table(
        "next_states",
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("from_turn_id", sa.Integer(), nullable=False, comment="the request that brought it"),
        sa.Column("source", sa.Text(), nullable=False, comment="user, environment or tool: the most trusted one in it"),
        sa.Column("messages", sa.JSON(), nullable=False, comment="all messages after the answer"),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["from_turn_id"],
            ["turns.turn_id"],
        ),
        sa.ForeignKeyConstraint(
            ["turn_id"],
            ["turns.turn_id"],
        ),
        sa.PrimaryKeyConstraint("turn_id"),
    )
    op.create_table(
        "verdicts",
        sa.Column("verdict_id", sa.Integer(), nullable=False),
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("judge", sa.Text(), nullable=False, comment="'evidence', or a model and a hash of its prompts"),
        sa.Column("value", sa.SmallInteger(), nullable=True, comment="1, 0 or -1; null when every vote abstained"),
        sa.Column("probabilities", sa.JSON(), nullable=True, comment="of the labels, when the judge gives them"),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["turn_id"],
            ["turns.turn_id"],
        ),
        sa.PrimaryKeyConstraint("verdict_id"),
    )
    op.create_index(op.f("ix_verdicts_turn_id"), "verdicts", ["turn_id"], unique=False)
    op.create_table(
        "hints",
        sa.Column("verdict_id", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False, comment="most trusted first"),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("source", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(
            ["verdict_id"],
            ["verdicts.verdict_id"],
        ),
        sa.PrimaryKeyConstraint("verdict_id", "n"),
    )
    op.create_table(
        "samples",
        sa.Column("turn_id", sa.Integer(), nullable=False),
        sa.Column("verdict_id", sa.Integer(), nullable=False),
        sa.Column("reward", sa.SmallInteger(), nullable=False, comment="1 or -1"),
        sa.Column("hint", sa.Text(), nullable=True, comment="what the teacher reads; null: this turn has no teacher"),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(
            ["turn_id"],
            ["turns.turn_id"],
        ),
        sa.ForeignKeyConstraint(
            ["verdict_id"],
            ["verdicts.verdict_id"],
        ),
        sa.PrimaryKeyConstraint("turn_id"),
    )
    op.create_table(
        "votes",
        sa.Column("verdict_id", sa.Integer(), nullable=False),
        sa.Column("n", sa.Integer(), nullable=False),
        sa.Column("value", sa.SmallInteger(), nullable=True, comment="null: this vote abstained"),
        sa.ForeignKeyConstraint(
            ["verdict_id"],
            ["verdicts.verdict_id"],
        ),
        sa.PrimaryKeyConstraint("verdict_id", "n"),
    )
