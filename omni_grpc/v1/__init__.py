"""Generated from proto/omni_grpc/v1 by tools/gen_protos.py. Do not edit; change the proto files and generate again."""
