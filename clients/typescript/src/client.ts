import type { MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions } from "@connectrpc/connect";
import { build, type TaskRequest } from "./build.js";
import { type CallLimits, type ClientOptions, Connection } from "./connection.js";
import type { UploadAssetResponse } from "./gen/omni_grpc/v1/artifact_pb.js";
import type { JobEvent, Preview, StepProgress } from "./gen/omni_grpc/v1/event_pb.js";
import type { Job, ListJobsRequestSchema } from "./gen/omni_grpc/v1/job_pb.js";
import type { MediaInput } from "./gen/omni_grpc/v1/media_pb.js";
import type { Model } from "./gen/omni_grpc/v1/model_pb.js";
import { ArtifactDelivery } from "./gen/omni_grpc/v1/options_pb.js";
import { tooLarge } from "./media.js";
import { Deadline, UNARY_TIMEOUT } from "./pace.js";
import type { AudioOptions, EditOptions, ImageOptions, TaskName, TaskOptions, VideoOptions } from "./request.js";
import type { Result } from "./result.js";
import { JobStream, watchJob } from "./stream.js";
import { WatchState } from "./watch.js";

/** What is told while a job runs. What these functions throw ends the call, and cancels the job. */
export interface Progress {
  onStep?: (progress: StepProgress, event: JobEvent) => void;
  onPreview?: (preview: Preview, progress: StepProgress) => void;
  onEvent?: (event: JobEvent) => void;
}

/** A client of one server, over its HTTP port. Every method throws OmniError. */
export class Client {
  private readonly connection: Connection;

  /** `url`: http://HOST:PORT or https://HOST:PORT. */
  constructor(url: string, options: ClientOptions = {}) {
    this.connection = new Connection(url, options);
  }

  /** Makes images and waits for them. */
  generateImage(prompt: string, options: ImageOptions & CallLimits & Progress = {}): Promise<Result> {
    return this.generate("image", prompt, options);
  }

  /** Makes images from images. */
  editImage(prompt: string, options: EditOptions & CallLimits & Progress): Promise<Result> {
    return this.generate("edit", prompt, options);
  }

  generateVideo(prompt: string, options: VideoOptions & CallLimits & Progress = {}): Promise<Result> {
    return this.generate("video", prompt, options);
  }

  generateAudio(prompt: string, options: AudioOptions & CallLimits & Progress = {}): Promise<Result> {
    return this.generate("audio", prompt, options);
  }

  /** Starts a job and streams its events. Leaving the loop over them, or aborting `signal`, cancels the job. */
  async stream<T extends TaskName>(task: T, prompt: string, options: TaskOptions[T] & CallLimits): Promise<JobStream> {
    const deadline = new Deadline(options.timeout);
    const delivery = options.options?.delivery ?? ArtifactDelivery.INLINE_CHUNKS;
    const request = await this.request(task, prompt, options, delivery, deadline);
    const watch = new WatchState(this.connection.reconnect, delivery);
    const call = (callOptions: CallOptions) => this.open(request, callOptions);
    return new JobStream(this.connection, call, watch, deadline, true, options.signal).open();
  }

  /** Queues a job that goes on without this client. */
  async createJob<T extends TaskName>(task: T, prompt: string, options: TaskOptions[T] & CallLimits): Promise<Job> {
    const deadline = unary(options);
    const delivery = options.options?.delivery ?? ArtifactDelivery.REFERENCE;
    const request = await this.request(task, prompt, options, delivery, deadline);
    const { jobs } = this.connection;
    const call = (callOptions: CallOptions) => jobs.createJob({ task: request }, callOptions);
    return (await this.connection.unary(call, deadline, options.signal)).job as Job;
  }

  /** The events of any job after `afterSeq`. Neither cancels it nor throws what ended it: see `JobStream.error`. */
  watchJob(jobId: string, options: CallLimits & { afterSeq?: number | bigint } = {}): JobStream {
    const afterSeq = BigInt(options.afterSeq ?? 0);
    return watchJob(this.connection, jobId, afterSeq, new Deadline(options.timeout), options.signal);
  }

  async getJob(jobId: string, limits: CallLimits = {}): Promise<Job> {
    const call = (options: CallOptions) => this.connection.jobs.getJob({ jobId }, options);
    return (await this.connection.unary(call, unary(limits), limits.signal)).job as Job;
  }

  /** A page of jobs, newest first; `nextPageToken` leads to the next. */
  listJobs(query: MessageInitShape<typeof ListJobsRequestSchema> = {}, limits: CallLimits = {}) {
    const call = (options: CallOptions) => this.connection.jobs.listJobs(query, options);
    return this.connection.unary(call, unary(limits), limits.signal);
  }

  /** Asks a job to stop. */
  async cancelJob(jobId: string, reason = "", limits: CallLimits = {}): Promise<Job> {
    const call = (options: CallOptions) => this.connection.jobs.cancelJob({ jobId, reason }, options);
    return (await this.connection.unary(call, unary(limits), limits.signal)).job as Job;
  }

  /** Stores input media on the server. */
  async upload(
    media: Uint8Array | Blob,
    options: CallLimits & { mimeType?: string } = {},
  ): Promise<UploadAssetResponse> {
    const data = media instanceof Blob ? new Uint8Array(await media.arrayBuffer()) : media;
    const mimeType = options.mimeType ?? (media instanceof Blob ? media.type : "");
    return this.connection.upload(data, mimeType, new Deadline(options.timeout), options.signal);
  }

  /** The bytes of an output, checked; goes on where a connection broke off. */
  async download(artifactId: string, limits: CallLimits = {}): Promise<Uint8Array> {
    return (await this.connection.download(artifactId, new Deadline(limits.timeout), limits.signal)).data();
  }

  async listModels(limits: CallLimits = {}): Promise<Model[]> {
    const call = (options: CallOptions) => this.connection.models.listModels({}, options);
    return (await this.connection.unary(call, unary(limits), limits.signal)).models;
  }

  private async generate<T extends TaskName>(
    task: T,
    prompt: string,
    options: TaskOptions[T] & CallLimits & Progress,
  ): Promise<Result> {
    const stream = await this.stream(task, prompt, options);
    for await (const event of stream) {
      options.onEvent?.(event);
      if (event.event.case !== "stepProgress") continue;
      const progress = event.event.value;
      options.onStep?.(progress, event);
      for (const preview of progress.previews) options.onPreview?.(preview, progress);
    }
    return stream.result();
  }

  private async request<T extends TaskName>(
    task: T,
    prompt: string,
    options: TaskOptions[T] & CallLimits,
    delivery: ArtifactDelivery,
    deadline: Deadline,
  ): Promise<TaskRequest> {
    const { request, media } = await build(task, prompt, options, delivery);
    for (const one of tooLarge(media)) await this.replace(one, deadline, options.signal);
    return request;
  }

  /** Uploads bytes of a request and puts their id into their place. */
  private async replace(media: MediaInput, deadline: Deadline, signal?: AbortSignal): Promise<void> {
    if (media.source.case !== "data") return;
    const stored = await this.connection.upload(media.source.value, media.mimeType, deadline, signal);
    media.source = { case: "assetId", value: stored.assetId };
  }

  private open(request: TaskRequest, options: CallOptions): AsyncIterable<{ event?: JobEvent | undefined }> {
    const { generation } = this.connection;
    switch (request.case) {
      case "generateImage":
        return generation.generateImage(request.value, options);
      case "editImage":
        return generation.editImage(request.value, options);
      case "generateVideo":
        return generation.generateVideo(request.value, options);
      case "generateAudio":
        return generation.generateAudio(request.value, options);
    }
  }
}

function unary(limits: CallLimits): Deadline {
  return new Deadline(limits.timeout ?? UNARY_TIMEOUT);
}
