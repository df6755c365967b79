"""The table of version 4: LoRA adapters that were loaded while a server ran."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0004"
down_revision = "0003"


def upgrade(op: Operations) -> None:
    key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "adapters",
        sa.Column("model", key, primary_key=True),
        sa.Column("lora_id", key, primary_key=True),
        sa.Column("uid", key, nullable=False),
        sa.Column("source", key, nullable=False),
        sa.Column("place", key, nullable=False),
        sa.Column("filename", key, nullable=False),
        sa.Column("sha256", key, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("format", key, nullable=False),
        sa.Column("pinned", sa.SmallInteger, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
        sa.Column("tenant", key, nullable=False),
        sa.Column("subject", key, nullable=False),
    )
