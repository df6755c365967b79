"""A Ray cluster of several nodes, all on this machine: the head, which has room for nothing, and others.

Prints its address, then does what comes by stdin, one word a line, and prints the word again: `kill` a node as if its
machine had lost its power, `add` one, `head` kills the GCS. Ends with stdin.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster

ROOM = {"object_store_memory": 100 << 20, "include_dashboard": False}


def main() -> None:
    folder = tempfile.mkdtemp(prefix="omni-ray-")
    os.environ["RAY_TMPDIR"] = folder
    Path(folder, "ray").mkdir()
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **ROOM})
    nodes = [cluster.add_node(num_cpus=1, **ROOM)]
    try:
        _say(f"{cluster.address} {folder}")
        for line in sys.stdin:
            match line.strip():
                case "kill":
                    cluster.remove_node(nodes.pop(), allow_graceful=False)
                case "add":
                    nodes.append(cluster.add_node(num_cpus=1, **ROOM))
                case "head":
                    cluster.head_node.kill_gcs_server()
            _say(line.strip())
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
