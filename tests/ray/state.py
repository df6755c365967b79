"""Prints how many actors live in the Ray cluster at RAY_ADDRESS, and how many placement groups there are."""

import json
import logging
import sys

import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

if __name__ == "__main__":
    ray.init(logging_level=logging.ERROR)
    living = [one for one in actors().values() if one["State"] not in ("DEAD", "DEPENDENCIES_UNREADY")]
    groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    sys.stdout.write(json.dumps({"actors": len(living), "groups": len(groups)}) + "\n")
