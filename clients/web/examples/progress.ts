import { createClient } from "@connectrpc/connect";
import { createConnectTransport } from "@connectrpc/connect-web";
import { GenerationService } from "../src/gen/omni_grpc/v1/generation_pb";
import { PreviewMethod } from "../src/gen/omni_grpc/v1/options_pb";

const server = new URLSearchParams(location.search).get("server") ?? location.origin;
const client = createClient(GenerationService, createConnectTransport({ baseUrl: server, useBinaryFormat: true }));
const find = <T extends Element>(name: string): T => document.querySelector(name) as T;
const [form, bar] = [find<HTMLFormElement>("form"), find<HTMLProgressElement>("progress")];
const [text, image] = [find<HTMLElement>("p"), find<HTMLImageElement>("img")];

async function generate(prompt: string): Promise<void> {
  const chunks: BlobPart[] = [];
  const options = { preview: { method: PreviewMethod.LATENT_RGB } };
  for await (const { event } of client.generateImage({ prompt, options })) {
    if (event?.event.case === "stepProgress") {
      const { step, totalSteps, previews } = event.event.value;
      bar.value = step / totalSteps;
      text.textContent = `step ${step} of ${totalSteps}`;
      for (const { data, mimeType } of previews) show([data as BlobPart], mimeType);
    } else if (event?.event.case === "artifactChunk") chunks.push(event.event.value.data as BlobPart);
    else if (event) text.textContent = event.event.case ?? "";
  }
  show(chunks, "image/png");
}

function show(parts: BlobPart[], type: string): void {
  URL.revokeObjectURL(image.src);
  image.src = URL.createObjectURL(new Blob(parts, { type }));
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  const said = (error: Error): string => (text.textContent = error.message);
  generate(String(new FormData(form).get("prompt"))).catch(said);
});
