import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { test } from "node:test";
import { create } from "@bufbuild/protobuf";
import { OmniError } from "../src/error.js";
import { endedEarly, fromCall } from "../src/failure.js";
import { DownloadArtifactResponseSchema } from "../src/gen/omni_grpc/v1/artifact_pb.js";
import { type JobEvent, JobEventSchema } from "../src/gen/omni_grpc/v1/event_pb.js";
import { ArtifactChunkSchema, ArtifactSchema } from "../src/gen/omni_grpc/v1/media_pb.js";
import { ArtifactDelivery } from "../src/gen/omni_grpc/v1/options_pb.js";
import { DownloadState } from "../src/download.js";
import { RECONNECT } from "../src/pace.js";
import { hex, sha256 } from "../src/sha256.js";
import { WatchState } from "../src/watch.js";

const BYTES = Uint8Array.from({ length: 200 }, (_, i) => i);
const ARTIFACT = create(ArtifactSchema, { artifactId: "a", sizeBytes: 200n, sha256: sha256(BYTES) });
const LOST = fromCall(new TypeError("fetch failed"), "http://x");

function event(seq: bigint, what: JobEvent["event"]): JobEvent {
  return create(JobEventSchema, { jobId: "j", seq, event: what });
}

function chunk(from: number, to: number) {
  return create(ArtifactChunkSchema, { artifactId: "a", offset: BigInt(from), data: BYTES.subarray(from, to) });
}

function step(seq: bigint): JobEvent {
  return create(JobEventSchema, { jobId: "j", seq, event: { case: "stepProgress", value: { step: Number(seq) } } });
}

function has(reason: string) {
  return (error: unknown) => error instanceof OmniError && error.reason === reason;
}

test("the digest is that of node:crypto, at each length around a block", () => {
  for (const size of [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 100_003]) {
    const data = Uint8Array.from({ length: size }, (_, i) => (i * 7 + size) & 255);
    assert.equal(hex(sha256(data)), createHash("sha256").update(data).digest("hex"));
  }
});

test("events come once, and a watch goes on after the last", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.INLINE_CHUNKS);
  assert.deepEqual(
    [1n, 2n, 2n, 1n, 3n].map((seq) => watch.accept(step(seq))),
    [true, true, false, false, true],
  );
  assert.equal(watch.request().afterSeq, 3n);
  assert.equal(watch.request().jobId, "j");
});

test("heartbeats and unknown kinds are passed over", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.INLINE_CHUNKS);
  assert.equal(watch.accept(event(0n, { case: undefined })), false);
  assert.equal(watch.accept(event(7n, { case: undefined })), false);
  assert.equal(watch.request().afterSeq, 7n);
});

test("a lost stream is watched again, eight times in a row", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.INLINE_CHUNKS);
  watch.accept(step(1n));
  for (let i = 0; i < 7; i++) watch.lost(LOST);
  watch.accept(step(2n));
  for (let i = 0; i < 8; i++) assert.ok(watch.lost(LOST) <= 5);
  assert.throws(() => watch.lost(LOST), has("STREAM_LOST"));
});

test("after a restart the job is lost", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.INLINE_CHUNKS);
  watch.accept(step(1n));
  const gone = { ...LOST, lost: false, error: new OmniError({ code: "NOT_FOUND", message: "no such job" }) };
  assert.throws(() => watch.lost(gone), has("JOB_LOST"));
});

test("a watch after the last event asks for it again, once", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.REFERENCE, "j", 9n);
  assert.equal(watch.lost(endedEarly()), 0);
  assert.equal(watch.request().afterSeq, 8n);
  assert.throws(() => watch.lost(endedEarly()), has("STREAM_ENDED"));
});

test("bytes that nobody announced are refused", () => {
  const watch = new WatchState(RECONNECT, ArtifactDelivery.INLINE_CHUNKS);
  const chunkEvent = create(JobEventSchema, { jobId: "j", event: { case: "artifactChunk", value: chunk(0, 10) } });
  assert.throws(() => watch.accept(chunkEvent), has("PROTOCOL_ERROR"));
});

test("a download goes on where it broke off", () => {
  const state = new DownloadState(RECONNECT, "a");
  const accept = (payload: Parameters<typeof create<typeof DownloadArtifactResponseSchema>>[1]) =>
    state.accept(create(DownloadArtifactResponseSchema, payload));
  accept({ payload: { case: "metadata", value: ARTIFACT } });
  accept({ payload: { case: "chunk", value: chunk(0, 120) } });
  state.lost(LOST);
  assert.equal(state.request().offset, 120n);
  accept({ payload: { case: "metadata", value: ARTIFACT } });
  accept({ payload: { case: "chunk", value: chunk(120, 200) } });
  assert.deepEqual(state.finished().data(), BYTES);
});

test("a gap, other bytes and another artifact are corrupt", () => {
  const state = () => {
    const begun = new DownloadState(RECONNECT, "a");
    begun.accept(create(DownloadArtifactResponseSchema, { payload: { case: "metadata", value: ARTIFACT } }));
    return begun.finished();
  };
  assert.throws(() => state().add(chunk(10, 20)), has("ARTIFACT_CORRUPT"));
  const wrong = state();
  wrong.add({ ...chunk(0, 200), data: BYTES.map((byte) => byte ^ 1) });
  assert.throws(() => wrong.data(), has("ARTIFACT_CORRUPT"));
  const other = create(ArtifactSchema, { ...ARTIFACT, sha256: new Uint8Array(32) });
  assert.throws(() => state().checkResumed(other), has("ARTIFACT_CORRUPT"));
  assert.throws(() => state().data(), has("ARTIFACT_CORRUPT"));
});
