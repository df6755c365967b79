"""A client in a process of its own. It writes each event of a stream as "seq kind coalesced job_id", one a line.

python follower.py ADDRESS generate MODEL
python follower.py ADDRESS watch JOB_ID AFTER_SEQ
"""

import sys

import grpc

from omni_grpc.client.channel import DIRECT
from omni_grpc.v1 import generation_pb2, generation_pb2_grpc, job_pb2, job_pb2_grpc


def generate(channel: grpc.Channel, model: str):
    request = generation_pb2.GenerateImageRequest(
        model=model, prompt="a red circle", width=128, height=128, sampling={"steps": 200, "seed": 3}
    )
    return generation_pb2_grpc.GenerationServiceStub(channel).GenerateImage(request)


def watch(channel: grpc.Channel, job_id: str, after_seq: str):
    request = job_pb2.WatchJobRequest(job_id=job_id, after_seq=int(after_seq))
    return job_pb2_grpc.JobServiceStub(channel).WatchJob(request)


address, call, *arguments = sys.argv[1:]
for message in {"generate": generate, "watch": watch}[call](grpc.insecure_channel(address, options=DIRECT), *arguments):
    event = message.event
    sys.stdout.write(f"{event.seq} {event.WhichOneof('event')} {event.coalesced} {event.job_id}\n")
    sys.stdout.flush()
