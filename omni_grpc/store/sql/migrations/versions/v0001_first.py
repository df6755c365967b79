"""The tables of version 1: jobs with their logs and labels, outputs, uploads, gone names, servers."""

from __future__ import annotations

import sqlalchemy as sa
from alembic.operations import Operations

revision = "0001"
down_revision = None

Key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
INDEXES = (
    ("jobs_by_time", "jobs", ("create_time", "id"), ""),
    ("jobs_by_state", "jobs", ("state", "create_time", "id"), ""),
    ("jobs_by_model", "jobs", ("model", "create_time", "id"), ""),
    ("jobs_by_tenant", "jobs", ("tenant", "create_time", "id"), ""),
    ("jobs_by_tenant_state", "jobs", ("tenant", "state", "create_time", "id"), ""),
    ("jobs_by_tenant_model", "jobs", ("tenant", "model", "create_time", "id"), ""),
    ("jobs_unfinished", "jobs", ("server", "create_time", "id"), "ended = 0"),
    ("jobs_queued", "jobs", ("model", "priority", "create_time"), "state = 'QUEUED'"),
    ("jobs_expiring", "jobs", ("expire_time", "id"), "expire_time IS NOT NULL"),
    ("jobs_ended", "jobs", ("tenant", "end_time", "id"), "end_time IS NOT NULL"),
    ("labels_of_all", "labels", ("name", "value", "create_time", "job_id"), ""),
    ("inputs_by_blob", "inputs", ("blob",), ""),
    ("artifacts_by_job", "artifacts", ("job_id", "create_time", "artifact_id"), ""),
    ("artifacts_by_tenant", "artifacts", ("tenant", "create_time", "artifact_id"), ""),
    ("artifacts_by_time", "artifacts", ("create_time", "artifact_id"), ""),
    ("assets_expiring", "assets", ("expire_time", "id"), ""),
    ("gone_by_time", "gone", ("time",), ""),
)


def upgrade(op: Operations) -> None:
    _jobs(op)
    _beside_jobs(op)
    _files(op)
    where = sa.text("request_id <> ''")
    columns = ["tenant", "request_id"]
    op.create_index("jobs_by_request", "jobs", columns, unique=True, sqlite_where=where, postgresql_where=where)
    for name, table, indexed, condition in INDEXES:
        partial = sa.text(condition) if condition else None
        op.create_index(name, table, list(indexed), sqlite_where=partial, postgresql_where=partial)


def _jobs(op: Operations) -> None:
    op.create_table(
        "jobs",
        sa.Column("id", Key, primary_key=True),
        sa.Column("tenant", Key, nullable=False),
        sa.Column("subject", Key, nullable=False),
        sa.Column("model", Key, nullable=False),
        sa.Column("task", Key, nullable=False),
        sa.Column("state", Key, nullable=False),
        sa.Column("ended", sa.SmallInteger, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
        sa.Column("start_time", sa.Double),
        sa.Column("end_time", sa.Double),
        sa.Column("expire_time", sa.Double),
        sa.Column("priority", sa.BigInteger, nullable=False),
        sa.Column("request_id", Key, nullable=False),
        sa.Column("fingerprint", sa.LargeBinary, nullable=False),
        sa.Column("client_job_id", Key, nullable=False),
        sa.Column("labels", sa.Text, nullable=False),
        sa.Column("server", Key, nullable=False),
        sa.Column("reserved_seq", sa.BigInteger, nullable=False),
        sa.Column("restarts", sa.Integer, nullable=False),
        sa.Column("cancel_reason", Key),
        sa.Column("spec", sa.Text, nullable=False),
    )


def _beside_jobs(op: Operations) -> None:
    op.create_table(
        "events",
        sa.Column("job_id", Key, primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("time", sa.Double, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("body", sa.Text, nullable=False),
    )
    op.create_table(
        "labels",
        sa.Column("tenant", Key, primary_key=True),
        sa.Column("name", Key, primary_key=True),
        sa.Column("value", Key, primary_key=True),
        sa.Column("create_time", sa.Double, primary_key=True),
        sa.Column("job_id", Key, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "inputs",
        sa.Column("job_id", Key, primary_key=True),
        sa.Column("blob", Key, primary_key=True),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "servers",
        sa.Column("name", Key, primary_key=True),
        sa.Column("until", sa.Double, nullable=False),
    )


def _files(op: Operations) -> None:
    op.create_table(
        "artifacts",
        sa.Column("artifact_id", Key, primary_key=True),
        sa.Column("job_id", Key, nullable=False),
        sa.Column("tenant", Key, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
    )
    op.create_table(
        "assets",
        sa.Column("id", Key, primary_key=True),
        sa.Column("tenant", Key, nullable=False),
        sa.Column("mime_type", Key, nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("sha256", Key, nullable=False),
        sa.Column("create_time", sa.Double, nullable=False),
        sa.Column("expire_time", sa.Double, nullable=False),
    )
    op.create_table(
        "gone",
        sa.Column("name", Key, primary_key=True),
        sa.Column("cause", Key, nullable=False),
        sa.Column("tenant", Key, nullable=False),
        sa.Column("time", sa.Double, nullable=False),
    )
