"""What settings say of where things are kept."""

from __future__ import annotations

from pathlib import Path

from omni_grpc.config import EngineConfig
from omni_grpc.store.seam import Blobs, Store
from omni_grpc.store.storage import Storage

DATABASE, FILES = "jobs.db", "files"
"""What is in --state-dir: the database, and the folder of outputs and uploads."""


def open_storage(config: EngineConfig) -> Storage:
    """What a server keeps, and where. It is not opened. Raises ConfigError for addresses that are none."""
    if not config.store.on:
        return Storage(config)
    return Storage(config, _store(config), _blobs(config))


def _store(config: EngineConfig) -> Store:
    # a database and its library are loaded where they are asked for alone
    from omni_grpc.store.sql import SqlStore

    if config.store.state_url is not None:
        return SqlStore.postgresql(config.store.state_url)
    assert config.store.state_dir is not None
    return SqlStore.sqlite(Path(config.store.state_dir) / DATABASE)


def _blobs(config: EngineConfig) -> Blobs:
    from omni_grpc.store.blobs.open import artifacts_at

    if config.store.artifact_url is not None:
        return artifacts_at(config.store.artifact_url)
    assert config.store.state_dir is not None
    return artifacts_at(Path(config.store.state_dir) / FILES)
