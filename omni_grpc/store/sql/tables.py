"""The tables, as the newest migration leaves them. `migrations/` makes them; a test compares both.

The columns of `jobs` are the fields of JobRecord by their names. `ended` is 1 where its state is terminal.
"""

from __future__ import annotations

import sqlalchemy as sa

METADATA = sa.MetaData()
VERSION_TABLE = "omni_grpc_version"

Key = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
"""Text that is sorted by code points, as Python does."""

UNFINISHED = sa.text("ended = 0")
QUEUED = sa.text("state = 'QUEUED'")
ENDED = sa.text("end_time IS NOT NULL")
EXPIRES = sa.text("expire_time IS NOT NULL")
REQUESTED = sa.text("request_id <> ''")
PENDING = sa.text("outcome = 'PENDING'")
CLAIMED = sa.text("claimed_by <> ''")
"""Conditions of partial indexes: a query uses an index where it has the same words."""


class FreeText(sa.types.TypeDecorator[str]):
    """Text that a caller wrote. It may have NUL characters, which PostgreSQL does not take."""

    impl = Key
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or ("\0" not in value and "\\" not in value):
            return value
        return value.replace("\\", "\\\\").replace("\0", "\\0")

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> str | None:
        if value is None or "\\" not in value:
            return value
        return "\\".join(part.replace("\\0", "\0") for part in value.split("\\\\"))


def _index(name: str, *columns: str, where: sa.TextClause | None = None, unique: bool = False) -> sa.Index:
    return sa.Index(name, *columns, unique=unique, sqlite_where=where, postgresql_where=where)


jobs = sa.Table(
    "jobs",
    METADATA,
    sa.Column("id", Key, primary_key=True),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("subject", FreeText, nullable=False),
    sa.Column("model", FreeText, nullable=False),
    sa.Column("task", Key, nullable=False),
    sa.Column("state", Key, nullable=False),
    sa.Column("ended", sa.SmallInteger, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("start_time", sa.Double),
    sa.Column("end_time", sa.Double),
    sa.Column("expire_time", sa.Double),
    sa.Column("priority", sa.BigInteger, nullable=False),
    sa.Column("request_id", FreeText, nullable=False),
    sa.Column("fingerprint", sa.LargeBinary, nullable=False),
    sa.Column("client_job_id", FreeText, nullable=False),
    sa.Column("labels", sa.Text, nullable=False),
    sa.Column("server", Key, nullable=False),
    sa.Column("reserved_seq", sa.BigInteger, nullable=False),
    sa.Column("restarts", sa.Integer, nullable=False),
    sa.Column("cancel_reason", FreeText),
    sa.Column("spec", sa.Text, nullable=False),
    _index("jobs_by_time", "create_time", "id"),
    _index("jobs_by_state", "state", "create_time", "id"),
    _index("jobs_by_model", "model", "create_time", "id"),
    _index("jobs_by_tenant", "tenant", "create_time", "id"),
    _index("jobs_by_tenant_state", "tenant", "state", "create_time", "id"),
    _index("jobs_by_tenant_model", "tenant", "model", "create_time", "id"),
    _index("jobs_by_request", "tenant", "request_id", where=REQUESTED, unique=True),
    _index("jobs_unfinished", "server", "create_time", "id", where=UNFINISHED),
    _index("jobs_queued", "model", "priority", "create_time", where=QUEUED),
    _index("jobs_expiring", "expire_time", "id", where=EXPIRES),
    _index("jobs_ended", "tenant", "end_time", "id", where=ENDED),
)

events = sa.Table(
    "events",
    METADATA,
    sa.Column("job_id", Key, primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("time", sa.Double, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    # not WITHOUT ROWID, as the narrow tables are: a body of more than a quarter of a page would take one of its own
    sa.Column("body", sa.Text, nullable=False),
)

labels = sa.Table(
    "labels",
    METADATA,
    sa.Column("tenant", FreeText, primary_key=True),
    sa.Column("name", FreeText, primary_key=True),
    sa.Column("value", FreeText, primary_key=True),
    sa.Column("create_time", sa.Double, primary_key=True),
    sa.Column("job_id", Key, primary_key=True),
    _index("labels_of_all", "name", "value", "create_time", "job_id"),
    sqlite_with_rowid=False,
)

inputs = sa.Table(
    "inputs",
    METADATA,
    sa.Column("job_id", Key, primary_key=True),
    sa.Column("blob", Key, primary_key=True),
    _index("inputs_by_blob", "blob"),
    sqlite_with_rowid=False,
)

artifacts = sa.Table(
    "artifacts",
    METADATA,
    sa.Column("artifact_id", Key, primary_key=True),
    sa.Column("job_id", Key, nullable=False),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    _index("artifacts_by_job", "job_id", "create_time", "artifact_id"),
    _index("artifacts_by_tenant", "tenant", "create_time", "artifact_id"),
    _index("artifacts_by_time", "create_time", "artifact_id"),
)

assets = sa.Table(
    "assets",
    METADATA,
    sa.Column("id", Key, primary_key=True),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("mime_type", FreeText, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("sha256", Key, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("expire_time", sa.Double, nullable=False),
    _index("assets_expiring", "expire_time", "id"),
)

adapters = sa.Table(
    "adapters",
    METADATA,
    sa.Column("model", FreeText, primary_key=True),
    sa.Column("lora_id", Key, primary_key=True),
    sa.Column("uid", Key, nullable=False),
    sa.Column("source", Key, nullable=False),
    sa.Column("place", FreeText, nullable=False),
    sa.Column("filename", FreeText, nullable=False),
    sa.Column("sha256", Key, nullable=False),
    sa.Column("size_bytes", sa.BigInteger, nullable=False),
    sa.Column("format", Key, nullable=False),
    sa.Column("pinned", sa.SmallInteger, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("subject", FreeText, nullable=False),
)

gone = sa.Table(
    "gone",
    METADATA,
    sa.Column("name", FreeText, primary_key=True),
    sa.Column("cause", Key, nullable=False),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("time", sa.Double, nullable=False),
    _index("gone_by_time", "time"),
)

servers = sa.Table(
    "servers",
    METADATA,
    sa.Column("name", Key, primary_key=True),
    sa.Column("until", sa.Double, nullable=False),
)

deliveries = sa.Table(
    "deliveries",
    METADATA,
    sa.Column("id", Key, primary_key=True),
    sa.Column("job_id", Key, nullable=False),
    sa.Column("tenant", FreeText, nullable=False),
    sa.Column("state", Key, nullable=False),
    sa.Column("url", FreeText, nullable=False),
    sa.Column("host", Key, nullable=False),
    sa.Column("secret_name", FreeText, nullable=False),
    sa.Column("body", sa.LargeBinary, nullable=False),
    sa.Column("create_time", sa.Double, nullable=False),
    sa.Column("due", sa.Double, nullable=False),
    sa.Column("attempts", sa.Integer, nullable=False),
    sa.Column("last_error", FreeText, nullable=False),
    sa.Column("outcome", Key, nullable=False),
    sa.Column("end_time", sa.Double),
    sa.Column("claimed_by", Key, nullable=False),
    sa.Column("claimed_until", sa.Double, nullable=False),
    sa.Column("trace", sa.Text),
    _index("deliveries_due", "due", "host", where=PENDING),
    _index("deliveries_by_host", "host", "due", "id", where=PENDING),
    _index("deliveries_claimed", "claimed_by", where=CLAIMED),
    _index("deliveries_ended", "end_time", where=ENDED),
    _index("deliveries_by_job", "job_id", "create_time", "id"),
)
