// What a user of the official client for Node.js writes. Usage: node client.mjs BASE_URL; fails at the first surprise.
import assert from "node:assert/strict";
import { once } from "node:events";
import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "any", maxRetries: 0 });
const small = { prompt: "a red circle", size: "32x16" };
const PNG = Buffer.from([0x89, 0x50, 0x4e, 0x47]);

async function refused(kind, ask) {
  try {
    await ask();
  } catch (error) {
    assert.ok(error instanceof kind, `${error.constructor.name}: ${error.message}`);
    assert.match(error.requestID, /^req_/);
    return error;
  }
  return assert.fail(`no ${kind.name}`);
}

async function models() {
  const found = [];
  for await (const model of client.models.list()) found.push(model.id);
  assert.deepEqual(found, ["toy"]);
  assert.equal((await client.models.retrieve("toy")).object, "model");
  const error = await refused(OpenAI.NotFoundError, () => client.models.retrieve("org/other"));
  assert.equal(error.code, "model_not_found");
}

async function pictures() {
  const made = await client.images.generate({ ...small, n: 2, seed: 7, num_inference_steps: 3, quality: "high" });
  assert.deepEqual(made.data.map((image) => image.seed), [7, 8]);
  assert.deepEqual(Buffer.from(made.data[0].b64_json, "base64").subarray(0, 4), PNG);
  assert.deepEqual(made.warnings.map((warning) => warning.param), ["quality"]);
  const named = await client.images.generate({ ...small, response_format: "url" });
  const file = await fetch(named.data[0].url);
  assert.equal(file.headers.get("content-type"), "image/png");
  const error = await refused(OpenAI.BadRequestError, () => client.images.generate({ ...small, size: "33x16" }));
  assert.deepEqual([error.status, error.param, error.type], [400, "size", "invalid_request_error"]);
}

async function edits() {
  const { data } = await client.images.generate(small);
  const image = await toFile(Buffer.from(data[0].b64_json, "base64"), "a.png", { type: "image/png" });
  const one = await client.images.edit({ image, prompt: "make it blue", seed: 7 });
  assert.equal(one.data[0].seed, 7);
  const two = await client.images.edit({ image: [image, image], prompt: "make it blue", extra_params: { a: 1 } });
  assert.equal(two.size, "32x16");
}

async function streams() {
  const events = await client.images.generate({ ...small, stream: true, partial_images: 2, num_inference_steps: 6 });
  const types = [];
  for await (const event of events) types.push(event.type);
  const partial = "image_generation.partial_image";
  assert.deepEqual(types, [partial, partial, "image_generation.completed"]);
}

async function videos() {
  const made = await client.videos.create({ ...small, seconds: "1", seed: 7 });
  let now = made;
  while (["queued", "in_progress"].includes(now.status)) {
    await new Promise((resolve) => setTimeout(resolve, 20));
    now = await client.videos.retrieve(made.id);
  }
  assert.deepEqual([now.status, now.progress, now.seconds], ["completed", 100, "1.125"]);
  const content = await client.videos.downloadContent(made.id);
  assert.equal((await content.arrayBuffer()).byteLength, 1000);
  const second = await client.videos.create(small);
  const listed = [];
  for await (const video of client.videos.list({ limit: 1 })) listed.push(video.id);
  assert.deepEqual(listed, [second.id, made.id]);
  for (const id of listed) assert.equal((await client.videos.delete(id)).deleted, true);
  await refused(OpenAI.NotFoundError, () => client.videos.retrieve(made.id));
}

async function leaving() {
  // whoever started this holds the server's next step now, and says so
  await once(process.stdin, "data");
  const leave = new AbortController();
  setTimeout(() => leave.abort(), 300);
  await assert.rejects(
    client.images.generate({ ...small, user: "leaves" }, { signal: leave.signal }),
    OpenAI.APIUserAbortError,
  );
}

for (const check of [models, pictures, edits, streams, videos, leaving]) {
  await check();
  console.log(check.name);
}
process.stdin.destroy();
