"""Databases as older versions left them. `version1.sql` is what version 1 wrote, bodies included: it is never made
again, so that a record of version 1 is what is read, and not one of today's. `version2.sql` has webhooks beside that,
`version3.sql` the trace of one,
`version4.sql` an adapter that was loaded.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import sqlalchemy as sa

from omni_grpc.store.sql import SqlStore, upgrade
from omni_grpc.store.sql.tables import VERSION_TABLE

FOLDER = Path(__file__).parent
DUMPS = {path.stem.removeprefix("version").zfill(4): path for path in FOLDER.glob("version*.sql")}
"""By revision."""


def sqlite_of(revision: str, path: Path) -> None:
    """A file of that version, with its rows."""
    with sqlite3.connect(path) as connection:
        connection.executescript(DUMPS[revision].read_text(encoding="utf-8"))
    connection.close()


async def postgresql_of(revision: str, url: str, path: Path) -> None:
    """The same rows in tables that the migrations up to there make. `path`: of a file that is made on the way."""
    sqlite_of(revision, path)
    source = sqlite3.connect(path)
    source.row_factory = sqlite3.Row
    store = SqlStore.postgresql(url)

    def copy(connection: sa.Connection) -> None:
        upgrade.upgrade(connection, revision)
        for (table,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
            rows = [dict(row) for row in source.execute(f"SELECT * FROM {table}")]
            if rows and table != VERSION_TABLE:
                names = ", ".join(rows[0])
                values = ", ".join(f":{name}" for name in rows[0])
                connection.execute(sa.text(f"INSERT INTO {table} ({names}) VALUES ({values})"), rows)

    await store._upgrading.write(copy)
    await store.close()
    source.close()
