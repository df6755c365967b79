"""A store in a database, by SQLAlchemy. Only a server that is told to keep its jobs imports this."""

from omni_grpc.store.sql.store import SqlStore

__all__ = ["SqlStore"]
