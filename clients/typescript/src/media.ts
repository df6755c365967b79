import { create } from "@bufbuild/protobuf";
import { refused } from "./error.js";
import type { UploadAssetResponse } from "./gen/omni_grpc/v1/artifact_pb.js";
import { type Artifact, type MediaInput, MediaInputSchema } from "./gen/omni_grpc/v1/media_pb.js";

/**
 * An image, a video or a sound: the bytes of a file, a Blob or File, what `upload` returned, an output of an earlier
 * job, or a data: or https: URL. In Node, read files with `readFile`.
 */
export type MediaSource = Uint8Array | Blob | UploadAssetResponse | Artifact | string;

/** The most bytes of media that are sent inside a request. If there are more, all of them are uploaded first. */
export const INLINE_BYTES = 4 << 20;

/** Throws INVALID_ARGUMENT, by field, for what is none. */
export async function mediaInput(field: string, value: MediaSource): Promise<MediaInput> {
  if (typeof value === "string") {
    if (/^(data|https?):/i.test(value)) return create(MediaInputSchema, { source: { case: "uri", value } });
    throw refused(field, `${JSON.stringify(value.slice(0, 40))} is no URL; of a file, give the bytes`);
  }
  if (value instanceof Uint8Array) return create(MediaInputSchema, { source: { case: "data", value } });
  if (value instanceof Blob) {
    const data = new Uint8Array(await value.arrayBuffer());
    return create(MediaInputSchema, { source: { case: "data", value: data }, mimeType: value.type });
  }
  if (value?.$typeName === "omni_grpc.v1.UploadAssetResponse") {
    return create(MediaInputSchema, { source: { case: "assetId", value: value.assetId } });
  }
  if (value?.$typeName === "omni_grpc.v1.Artifact") {
    return create(MediaInputSchema, { source: { case: "assetId", value: value.artifactId }, mimeType: value.mimeType });
  }
  throw refused(field, "is no media: expected bytes, a Blob, an upload, an artifact or a URL");
}

/** The media that must be uploaded before their request is sent: all that hold bytes, or none. */
export function tooLarge(media: readonly MediaInput[]): MediaInput[] {
  const inline = media.filter(({ source }) => source.case === "data");
  const size = inline.reduce((sum, { source }) => sum + (source.case === "data" ? source.value.length : 0), 0);
  return size > INLINE_BYTES ? inline : [];
}
