"""The table of version 2: webhooks that are owed."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0002"
down_revision = "0001"

Key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
INDEXES = (
    ("deliveries_due", ("due", "host"), "outcome = 'PENDING'"),
    ("deliveries_by_host", ("host", "due", "id"), "outcome = 'PENDING'"),
    ("deliveries_claimed", ("claimed_by",), "claimed_by <> ''"),
    ("deliveries_ended", ("end_time",), "end_time IS NOT NULL"),
    ("deliveries_by_job", ("job_id", "create_time", "id"), ""),
)


def upgrade(op: Operations) -> None:
    op.create_table(
        "deliveries",
        sa.Column("id", Key, primary_key=True),
        sa.Column("job_id", Key, nullable=False),
        sa.Column("tenant", Key, nullable=False),
        sa.Column("state", Key, nullable=False),
        sa.Column("url", Key, nullable=False),
        sa.Column("host", Key, nullable=False),
        sa.Column("secret_name", Key, nullable=False),
        sa.Column("body", sa.LargeBinary, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
        sa.Column("due", sa.Double, nullable=False),
        sa.Column("attempts", sa.Integer, nullable=False),
        sa.Column("last_error", Key, nullable=False),
        sa.Column("outcome", Key, nullable=False),
        sa.Column("end_time", sa.Double),
        sa.Column("claimed_by", Key, nullable=False),
        sa.Column("claimed_until", sa.Double, nullable=False),
    )
    for name, columns, condition in INDEXES:
        partial = sa.text(condition) if condition else None
        op.create_index(name, "deliveries", list(columns), sqlite_where=partial, postgresql_where=partial)
