// What a project that has installed the package sees of it.
import assert from "node:assert/strict";
import { Client, OmniError } from "omni-grpc-client";
import { tlsFetch } from "omni-grpc-client/node";

await assert.rejects(new Client("http://localhost:1").generateImage("x", { outputFormat: "GIFF" }), (error) => {
  assert.ok(error instanceof OmniError);
  return error.violations[0].field === "output_format";
});
assert.equal(typeof tlsFetch({}), "function");
