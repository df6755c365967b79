export { Client, type Progress } from "./client.js";
export type { CallLimits, ClientOptions, TokenSource } from "./connection.js";
export { CODES, type ErrorCode, type Failure, OmniError, type Violation } from "./error.js";
export * from "./gen/omni_grpc/v1/artifact_pb.js";
export * from "./gen/omni_grpc/v1/event_pb.js";
export * from "./gen/omni_grpc/v1/job_pb.js";
export * from "./gen/omni_grpc/v1/media_pb.js";
export * from "./gen/omni_grpc/v1/model_pb.js";
export * from "./gen/omni_grpc/v1/options_pb.js";
export * from "./gen/omni_grpc/v1/sampling_pb.js";
export type { MediaSource } from "./media.js";
export type { Reconnect, Retry } from "./pace.js";
export type {
  AudioOptions,
  CommonOptions,
  EditOptions,
  ImageOptions,
  TaskName,
  TaskOptions,
  VideoOptions,
} from "./request.js";
export type { Result } from "./result.js";
export { hex, sha256 } from "./sha256.js";
export type { JobStream } from "./stream.js";
