import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { explain } from "../api/errors";
import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import { usePage } from "../state/page";

interface Loaded {
  url: string | null;
  problem: string;
}

/** The address of an output. */
export function useAddress(artifactId: string): Loaded {
  const page = usePage();
  const [loaded, setLoaded] = useState<Loaded>({ url: null, problem: "" });
  useEffect(() => {
    let here = true;
    setLoaded({ url: null, problem: "" });
    page.api.files.address(artifactId).then(
      (url) => here && setLoaded({ url, problem: "" }),
      (error: unknown) => here && setLoaded({ url: null, problem: explain(error).message }),
    );
    return () => {
      here = false;
    };
  }, [artifactId, page]);
  return loaded;
}

interface MediaProps {
  artifact: Artifact;
  label: string;
  /** In the gallery: no controls. */
  small?: boolean;
}

/** An output: a picture, or a player for video and sound. */
export function Media({ artifact, label, small = false }: MediaProps): JSX.Element {
  const { url, problem } = useAddress(artifact.artifactId);
  const { mimeType: mime, width, height } = artifact;
  if (problem) return <p class="problem">{problem}</p>;
  if (!url) return <span class="placeholder" aria-hidden="true" />;
  if (mime.startsWith("image/")) {
    return <img src={url} alt={label} width={width || undefined} height={height || undefined} loading="lazy" />;
  }
  if (mime.startsWith("video/")) {
    return <video src={url} controls={!small} loop muted={small} preload="metadata" playsInline aria-label={label} />;
  }
  if (mime.startsWith("audio/")) {
    return small ? (
      <span class="placeholder">sound</span>
    ) : (
      <audio src={url} controls preload="metadata" aria-label={label} />
    );
  }
  return (
    <a href={url} download>
      {mime}
    </a>
  );
}

export function Download({ artifact }: { artifact: Artifact }): JSX.Element | null {
  const { url } = useAddress(artifact.artifactId);
  if (!url) return null;
  const name = `${artifact.jobId}-${artifact.index}${artifact.layer === undefined ? "" : `-${artifact.layer}`}`;
  return (
    <a class="button" href={url} download={name}>
      Download
    </a>
  );
}
