import assert from "node:assert/strict";
import { test } from "node:test";
import { create, type DescMessage, type MessageInitShape, toBinary } from "@bufbuild/protobuf";
import { anyPack } from "@bufbuild/protobuf/wkt";
import { Code, ConnectError } from "@connectrpc/connect";
import { build } from "../src/build.js";
import { Client } from "../src/client.js";
import { OmniError } from "../src/error.js";
import { fromCall, fromStatus } from "../src/failure.js";
import { BadRequestSchema, ErrorInfoSchema, RetryInfoSchema } from "../src/gen/google/rpc/error_details_pb.js";
import { StatusSchema } from "../src/gen/google/rpc/status_pb.js";
import { ImageFormat, ImageFormatSchema } from "../src/gen/omni_grpc/v1/media_pb.js";
import { ArtifactDelivery } from "../src/gen/omni_grpc/v1/options_pb.js";
import { TaskSchema } from "../src/gen/omni_grpc/v1/sampling_pb.js";
import { named } from "../src/names.js";
import { backoff, Deadline, RECONNECT, RETRY, Starting } from "../src/pace.js";

const DETAILS = [
  create(ErrorInfoSchema, { reason: "QUEUE_FULL", domain: "omni_grpc", metadata: { job_id: "j" } }),
  create(RetryInfoSchema, { retryDelay: { seconds: 1n, nanos: 500_000_000 } }),
  create(BadRequestSchema, { fieldViolations: [{ field: "width", description: "64 is nearest" }] }),
];
const URL = "http://localhost:1";

function checkDecoded(error: OmniError): void {
  assert.equal(error.code, "RESOURCE_EXHAUSTED");
  assert.equal(error.reason, "QUEUE_FULL");
  assert.equal(error.message, "full");
  assert.equal(error.retryAfter, 1.5);
  assert.deepEqual(error.violations, [{ field: "width", description: "64 is nearest" }]);
  assert.equal(error.jobId, "j");
}

function detail<T extends DescMessage>(desc: T, value: MessageInitShape<T>) {
  return { type: desc.typeName, value: toBinary(desc, create(desc, value)) };
}

test("the details of a call's error", () => {
  const thrown = new ConnectError("full", Code.ResourceExhausted);
  const [info, retry, fields] = DETAILS;
  thrown.details = [
    detail(ErrorInfoSchema, info as MessageInitShape<typeof ErrorInfoSchema>),
    detail(RetryInfoSchema, retry as MessageInitShape<typeof RetryInfoSchema>),
    detail(BadRequestSchema, fields as MessageInitShape<typeof BadRequestSchema>),
    { type: "other.Detail", value: new Uint8Array([1]) },
  ];
  const ended = fromCall(thrown, URL);
  checkDecoded(ended.error);
  assert.equal(ended.fromServer, true);
});

test("the details of a failed job", () => {
  const details = [
    anyPack(ErrorInfoSchema, DETAILS[0] as never),
    anyPack(RetryInfoSchema, DETAILS[1] as never),
    anyPack(BadRequestSchema, DETAILS[2] as never),
  ];
  checkDecoded(fromStatus(create(StatusSchema, { code: Code.ResourceExhausted, message: "full", details })));
});

test("a server that cannot be reached, and one whose certificate is not trusted", () => {
  const refused = Object.assign(new Error("connect"), { code: "ECONNREFUSED" });
  const away = fromCall(new TypeError("fetch failed", { cause: refused }), URL);
  assert.deepEqual([away.error.code, away.error.reason], ["UNAVAILABLE", "SERVER_UNREACHABLE"]);
  assert.deepEqual([away.lost, away.permanent], [true, false]);
  const untrusted = Object.assign(new Error("no"), { code: "SELF_SIGNED_CERT_IN_CHAIN" });
  const other = fromCall(new TypeError("fetch failed", { cause: untrusted }), URL);
  assert.deepEqual([other.error.code, other.permanent], ["UNAVAILABLE", true]);
});

test("the deadline of a call, and a message that cannot be sent", () => {
  const late = fromCall(new ConnectError("late", Code.DeadlineExceeded), URL);
  assert.deepEqual([late.error.reason, late.timedOut, late.lost], ["CALL_DEADLINE", true, false]);
  assert.equal(fromCall(new ConnectError("cannot encode", Code.Internal), URL).lost, false);
});

test("names of enums, by the field that they are for", () => {
  for (const name of ["webp", "WEBP", "IMAGE_FORMAT_WEBP", ImageFormat.WEBP]) {
    assert.equal(named("output_format", ImageFormatSchema, name), ImageFormat.WEBP);
  }
  for (const wrong of ["GIFF", "", "unspecified", "VIDEO_FORMAT_MP4", 0, 99]) {
    assert.throws(
      () => named("output_format", ImageFormatSchema, wrong),
      (error) => error instanceof OmniError && error.violations[0]?.field === "output_format",
    );
  }
  assert.equal(named("task", TaskSchema, "inpaint"), 4);
});

test("a request has the fields that were given, and no others", async () => {
  const { request } = await build("image", "x", { width: 64, seed: 0 }, ArtifactDelivery.INLINE_CHUNKS);
  assert.equal(request.case, "generateImage");
  const { value } = request;
  if (value.$typeName !== "omni_grpc.v1.GenerateImageRequest") throw new Error(value.$typeName);
  assert.deepEqual([value.width, value.height, value.negativePrompt], [64, undefined, undefined]);
  assert.deepEqual([value.sampling?.seed, value.sampling?.steps, value.sampling?.guidance], [0n, undefined, undefined]);
  assert.match(value.options?.requestId ?? "", /^[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$/);
  for (const wrong of [{ width: -1 }, { width: 1.5 }, { seed: 2 ** 60 }, { runTimeout: Number.NaN }]) {
    await assert.rejects(build("image", "x", wrong, ArtifactDelivery.INLINE_CHUNKS), OmniError);
  }
});

test("a call is made again for as long as the policies say", () => {
  const full = new OmniError({ code: "RESOURCE_EXHAUSTED", message: "full", retryAfter: 1 });
  const starting = new Starting(RETRY, new Deadline(undefined));
  for (let i = 0; i < 5; i++) {
    const pause = starting.pause(full, false) ?? 0;
    assert.ok(pause >= 1 && pause <= 1.1);
  }
  assert.equal(starting.pause(full, false), undefined);
  assert.equal(new Starting({ ...RETRY, attempts: 0 }, new Deadline(undefined)).pause(full, false), undefined);
  assert.equal(new Starting(RETRY, new Deadline(0.5)).pause(full, false), undefined);
  const away = new OmniError({ code: "UNAVAILABLE", message: "away" });
  assert.ok((new Starting(RETRY, new Deadline(undefined)).pause(away, false) ?? 9) <= 0.2);
  assert.equal(new Starting(RETRY, new Deadline(undefined)).pause(away, true), undefined);
  for (let i = 0; i < 20; i++) assert.ok(backoff(RECONNECT, i) <= 5);
});

test("a token goes to another machine over TLS alone", () => {
  const token = "secret";
  const refused = (error: unknown) => error instanceof OmniError && error.reason === "TOKEN_NEEDS_TLS";
  assert.throws(() => new Client("http://server.example:50051", { token }), refused);
  assert.throws(() => new Client("http://localhost.example", { token }), refused);
  for (const url of ["https://server.example", "http://localhost:8080", "http://127.0.0.1:1", "http://[::1]:1"]) {
    assert.ok(new Client(url, { token }));
  }
  assert.throws(() => new Client("localhost:8080"), OmniError);
});
