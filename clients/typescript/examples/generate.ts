// Generates an image with progress and saves it: node generate.js http://localhost:8080 "a red circle" out.png
import { writeFile } from "node:fs/promises";
import { Client, OmniError } from "omni-grpc-client";

const [url = "http://localhost:8080", prompt = "a red circle left of a blue square", out = "out.png"] =
  process.argv.slice(2);
const abort = new AbortController();
process.once("SIGINT", () => abort.abort()); // cancels the job on the server, too

try {
  const client = new Client(url);
  const result = await client.generateImage(prompt, {
    signal: abort.signal,
    onStep: ({ step, totalSteps }) => console.error(`step ${step} of ${totalSteps}`),
  });
  for (const warning of result.warnings) console.error(`warning: ${warning.message}`);
  const [file] = result.files;
  if (file) await writeFile(out, file);
  console.log(`${out}: seed ${result.seeds[0]}`);
} catch (error) {
  if (!(error instanceof OmniError)) throw error;
  console.error(`error: ${error.code} ${error.reason}: ${error.message}`);
  process.exitCode = 1;
}
