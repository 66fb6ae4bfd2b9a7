"""Indexes for people who look: counts by reason, and what was said since a moment."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    op.create_index("ix_turns_why", "turns", ["state", "reason"])
    op.create_index("ix_verdicts_created_at", "verdicts", ["created_at"])
    op.create_index("ix_feedback_created_at", "feedback", ["created_at"])
