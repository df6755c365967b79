"""The worker as it is, except that it keeps the pixels of each output, as they are before they are encoded, in the
folder of OMNI_TEST_RAW, as JOB.npy.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from omni_grpc.pipeline.outputs import Output
from omni_grpc.types.request import Request
from omni_grpc.worker import delivery, process


def serve(*arguments: Any) -> None:
    encode = delivery.encode

    def kept(output: Output, request: Request, **rates: Any) -> Any:
        np.save(Path(os.environ["OMNI_TEST_RAW"]) / f"{request.id}.npy", np.asarray(output.pixels))
        return encode(output, request, **rates)

    delivery.encode = kept
    process.serve(*arguments)
