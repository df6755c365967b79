"""The column of version 3: which trace a webhook belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0003"
down_revision = "0002"


def upgrade(op: Operations) -> None:
    op.add_column("deliveries", sa.Column("trace", sa.Text))
