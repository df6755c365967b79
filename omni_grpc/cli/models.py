"""The fleet of a server, from the configurations of its models."""

from __future__ import annotations

from collections.abc import Sequence

from omni_grpc.config import EngineConfig
from omni_grpc.engine import Engine
from omni_grpc.engine.inputs import InputStore
from omni_grpc.engine.rank_link import RankLink
from omni_grpc.engine.workers import executors
from omni_grpc.fleet import Fleet, Opening, Served, opened
from omni_grpc.store.open import open_storage
from omni_grpc.types.errors import ConfigError, Violation
from omni_grpc.types.spec import Checkpoint


def fleet_of(configs: Sequence[EngineConfig], link: RankLink | None = None) -> Fleet:
    """A fleet that has not been started; the settings of the server are those of the first. `link`: to the ranks that
    torchrun started, see `cli.launched`. Raises ConfigError and
    CheckpointError for a model that cannot be served.
    """
    first = configs[0]
    storage, inputs = open_storage(first), InputStore(first.limits.input_budget)

    def make(config: EngineConfig, checkpoint: Checkpoint) -> Engine:
        executor, *more = executors(config, checkpoint, link)
        return Engine(config, checkpoint, executor, storage, more=more, inputs=inputs)

    if all(config.worker.load_later for config in configs):
        rule = "is set for every model; a server begins with one that it loads"
        raise ConfigError(f"--load-later {rule}", violations=(Violation("load_later", rule),))
    models: dict[str, Served] = {}
    for config in configs:
        checkpoint = opened(config)
        if checkpoint.name in models:
            rule = f"names two models {checkpoint.name!r}; give one of them another name (NAME=FOLDER)"
            raise ConfigError(f"--model {rule}", violations=(Violation("model", rule),))
        engine = None if config.worker.load_later else make(config, checkpoint)
        models[checkpoint.name] = Served(config, checkpoint, engine)
    opening = Opening(first, configs)
    return Fleet(first, storage, inputs, list(models.values()), make=make, opening=opening)
