"""YAML, read strictly: settings, and the presets of models."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml


class StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, where YAML libraries silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def read_yaml(text: str) -> Any:
    """The content of a YAML text. Raises ValueError that says what is wrong with it, and in which line."""
    try:
        return yaml.load(text, StrictLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"is not valid YAML: {error}") from error
