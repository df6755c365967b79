"""Brings the tables to the version of this program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import sqlalchemy as sa

from omni_grpc.store.sql.tables import METADATA, VERSION_TABLE
from omni_grpc.types.errors import ConfigError

NEWEST = "0004"
"""The revision of the newest migration. Said here, so that a start with nothing to do does not load alembic."""
FOLDER = Path(__file__).parent / "migrations"
LOCK = 0x6F6D6E69
"""The advisory lock of PostgreSQL under which one server migrates while the others wait."""


def version(connection: sa.Connection) -> str | None:
    """The version of the tables; None where there are none."""
    if not sa.inspect(connection).has_table(VERSION_TABLE):
        return None
    found: str | None = connection.scalar(sa.text(f"SELECT version_num FROM {VERSION_TABLE}"))
    return found


def upgrade(connection: sa.Connection, to: str = NEWEST, folder: Path = FOLDER) -> None:
    """Runs the migrations that are missing, within the transaction of this connection: all of them or none. Raises
    ConfigError for tables of a newer version, and for tables that are not ours.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(LOCK)))
    found = version(connection)
    if found == to:
        return
    import alembic.config
    import alembic.script
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    config = alembic.config.Config()
    config.set_main_option("script_location", str(folder).replace("%", "%%"))
    scripts = alembic.script.ScriptDirectory.from_config(config)
    known = [script.revision for script in scripts.walk_revisions()]
    if found is None and (foreign := set(sa.inspect(connection).get_table_names()) & set(METADATA.tables)):
        raise ConfigError(
            f"the database has tables that are not of omni_grpc ({', '.join(sorted(foreign))}): give one of its own"
        )
    if found is not None and found not in known:
        raise ConfigError(
            f"the job store was written by a newer version (its tables are of version {found}, this program knows"
            f" {NEWEST}): run that version or a newer one, or give another --state-dir or --state-url"
        )

    def missing(revision: Any, context: Any) -> Any:
        return scripts._upgrade_revs(to, revision)

    options = {"fn": missing, "version_table": VERSION_TABLE, "transactional_ddl": True}
    context = MigrationContext.configure(connection, opts=options)
    # given to each migration, since `alembic.op` is one for the whole process
    context.run_migrations(op=Operations(context))
