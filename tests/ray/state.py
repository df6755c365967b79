"""Writes how many actors live in the Ray cluster at RAY_ADDRESS, and how many placement groups there are, into a file.

Not to stdout: Ray prints there too, at any moment.
"""

import json
import logging
import sys
from pathlib import Path

import ray
from ray._private.state import actors
from ray.util.placement_group import placement_group_table

if __name__ == "__main__":
    ray.init(logging_level=logging.ERROR)
    living = [one for one in actors().values() if one["State"] not in ("DEAD", "DEPENDENCIES_UNREADY")]
    groups = [one for one in placement_group_table().values() if one["state"] != "REMOVED"]
    Path(sys.argv[1]).write_text(json.dumps({"actors": len(living), "groups": len(groups)}))
