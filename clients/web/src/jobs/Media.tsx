import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { explain } from "../api/errors";
import type { Artifact } from "../gen/omni_grpc/v1/media_pb";
import { usePage } from "../state/page";

interface Loaded {
  url: string | null;
  problem: string;
  /** Asks for another address, once: the one that there is may be too old by now. */
  renew: () => void;
}

/** The address of an output. */
export function useAddress(artifactId: string): Loaded {
  const page = usePage();
  const [loaded, setLoaded] = useState({ url: null as string | null, problem: "" });
  const [tries, setTries] = useState(0);
  useEffect(() => {
    let here = true;
    page.api.files.address(artifactId).then(
      (url) => here && setLoaded({ url, problem: "" }),
      (error: unknown) => here && setLoaded({ url: null, problem: explain(error).message }),
    );
    return () => {
      here = false;
    };
  }, [artifactId, tries, page]);
  const renew = (): void => {
    if (tries > 0) return;
    page.api.files.forget(artifactId);
    setTries(1);
  };
  return { ...loaded, renew };
}

interface MediaProps {
  artifact: Artifact;
  label: string;
  /** In the gallery: no controls. */
  small?: boolean;
}

/** An output: a picture, or a player for video and sound. */
export function Media({ artifact, label, small = false }: MediaProps): JSX.Element {
  const { url, problem, renew } = useAddress(artifact.artifactId);
  const { mimeType: mime, width, height } = artifact;
  if (problem) return <p class="problem">{problem}</p>;
  if (!url) return <span class="placeholder" aria-hidden="true" />;
  if (mime.startsWith("image/")) {
    const size = { width: width || undefined, height: height || undefined };
    return <img src={url} alt={label} {...size} loading="lazy" onError={renew} />;
  }
  if (mime.startsWith("video/")) {
    return (
      <video
        src={url}
        controls={!small}
        loop
        muted={small}
        preload="metadata"
        playsInline
        aria-label={label}
        onError={renew}
      />
    );
  }
  if (mime.startsWith("audio/")) {
    return small ? (
      <span class="placeholder">sound</span>
    ) : (
      <audio src={url} controls preload="metadata" aria-label={label} onError={renew} />
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
