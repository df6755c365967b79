"""Ranks for the tests of their executor, each in a real process, without torch: what they do follows from the prompt,
which is words of the form RANK:DEED, and from the checkpoint's name.
"""

import os
import signal
import time

from omni_grpc.types.errors import Code, Failure
from omni_grpc.types.load_progress import Loading, LoadPhase
from omni_grpc.types.lora import Adapter
from omni_grpc.types.plan import (
    AdapterFailed,
    AdapterLoaded,
    AdapterUnloaded,
    Beat,
    Broken,
    Decoded,
    Died,
    LoadAdapter,
    Plan,
    Prepared,
    Ready,
    SharedBytes,
    Sleep,
    Slept,
    UnloadAdapter,
    Woken,
)
from omni_grpc.types.shared_inputs import read_inputs


def serve(connection, config, checkpoint, prefix) -> None:
    rank = int(os.environ["RANK"])
    connection.send(Loading(phase=LoadPhase.WARMING_UP))
    if checkpoint.name == f"broken {rank}":
        connection.send(Died(failure=_failure(rank)))
        time.sleep(3600)
    if checkpoint.name == f"stopped {rank}":
        connection.send(Beat())
        os.kill(os.getpid(), signal.SIGSTOP)
    if checkpoint.name == f"slow {rank}":
        time.sleep(2)
    dtype = "bfloat16" if checkpoint.name == f"other {rank}" else "float32"
    connection.send(Ready(pid=os.getpid(), device="cpu", dtype=dtype, load_seconds=0.0, weight_bytes=rank))
    dropped: list[str] = []
    while (message := connection.recv()) is not None:
        if isinstance(message, Plan):
            dropped.extend(message.drop)
            for request in message.admit:
                _prepare(connection, rank, request, dropped)
            if rank < config.parallel.vae_patch_parallel_size:
                for request_id in message.decode:
                    connection.send(_decode(rank, request_id, prefix))
        elif isinstance(message, LoadAdapter):
            connection.send(_load(rank, message))
        elif isinstance(message, UnloadAdapter):
            connection.send(AdapterUnloaded(uid=message.uid, rank=rank))
        else:
            connection.send(Slept(freed_bytes=rank, elapsed=0.0) if isinstance(message, Sleep) else Woken(elapsed=0.0))


def _prepare(connection, rank, request, dropped) -> None:
    deeds = dict(word.split(":") for word in request.prompt.split() if ":" in word)
    tokens = len(dropped)
    match deeds.get(str(rank)):
        case "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        case "dies-late":
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGKILL)
        case "fails":
            connection.send(Broken(id=request.id, phase="prepare", failure=_failure(rank)))
            return
        case "gives-up":
            connection.send(Died(failure=_failure(rank)))
            time.sleep(3600)
        case "hangs":
            time.sleep(3600)
        case "counts":
            tokens = 99
        case "waits":
            time.sleep(0.5)
    inputs = read_inputs(request.inputs)
    sizes = tuple(len(image.data) for image in inputs.images)
    connection.send(Prepared(id=request.id, elapsed=float(rank), prompt_tokens=tokens, rows=sizes))


def _decode(rank, request_id, prefix):
    if request_id == f"fails {rank}":
        return Broken(id=request_id, phase="decode", failure=_failure(rank))
    return Decoded(id=request_id, elapsed=float(rank), media=(SharedBytes(f"{prefix}0", 0),))


def _load(rank, order):
    if order.path == f"fails {rank}":
        return AdapterFailed(uid=order.uid, failure=_failure(rank), rank=rank)
    adapter = Adapter(
        id=order.id, uid=order.uid, file=order.path, sha256="", format="", rank=1, size_bytes=1, applied={}
    )
    return AdapterLoaded(adapter=adapter, rank=rank)


def _failure(rank) -> Failure:
    return Failure(code=Code.INTERNAL, reason="X", message=f"said by {rank}")
