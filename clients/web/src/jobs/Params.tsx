import type { JSX } from "preact";
import type { EffectiveParams, GenerationStats } from "../gen/omni_grpc/v1/event_pb";
import { GuidanceNorm, Task } from "../gen/omni_grpc/v1/sampling_pb";
import { TASKS } from "../form/values";
import type { JobView } from "../state/job";
import { bytes, clock, millis, seconds, short, span, words } from "../text";

type Row = readonly [name: string, value: string];

/** What was really done, as names and values. */
export function rowsOf(job: JobView): Row[] {
  const { effective, stats } = job;
  const expires = job.artifacts[0]?.expireTime;
  const rows: Row[] = [
    ["model", job.model],
    ["task", TASKS[job.task]?.label ?? words(Task[job.task] ?? "")],
    ["seed", job.seeds.join(", ")],
    ...(effective ? effectiveRows(effective) : []),
    ...(stats ? statsRows(stats) : []),
    ["made", clock(job.created)],
    ["kept until", expires ? clock(millis(expires)) : ""],
    ["job", job.id],
  ];
  return rows.filter(([, value]) => value !== "");
}

function effectiveRows(effective: EffectiveParams): Row[] {
  const { guidance, loras, cache, quantizedLayers } = effective;
  const schemes = Object.entries(quantizedLayers).map(([scheme, count]) => `${scheme} (${count} layers)`);
  const set = (value: number | undefined): string => (value === undefined ? "" : short(value));
  return [
    ["size", effective.width ? `${effective.width} x ${effective.height}` : ""],
    ["frames", effective.numFrames > 1 ? `${effective.numFrames} at ${short(effective.fps)} per second` : ""],
    ["playing time", effective.duration ? span(seconds(effective.duration)) : ""],
    ["steps", String(effective.steps)],
    ["guidance", set(guidance?.scale)],
    ["CFG scale", set(guidance?.trueCfgScale)],
    ["CFG scale, low noise", set(guidance?.scaleLowNoise)],
    ["norm of guidance", guidance?.norm ? words(GuidanceNorm[guidance.norm] ?? "") : ""],
    ["strength", set(effective.strength)],
    ["scheduler", effective.scheduler],
    ["step cache", cacheOf(cache?.kind)],
    ["LoRA", loras.map(({ loraId, scale }) => `${loraId} x ${short(scale)}`).join(", ")],
    ["quantization", schemes.join(", ")],
    ["attention", effective.attentionBackend],
    ["defaults used", Object.keys(effective.defaultsUsed).sort().join(", ")],
    [
      "dropped tokens",
      Object.entries(effective.droppedTokens)
        .map(([field, count]) => `${field}: ${count}`)
        .join(", "),
    ],
  ];
}

function cacheOf(kind: NonNullable<EffectiveParams["cache"]>["kind"] | undefined): string {
  if (!kind?.case) return "";
  if (kind.case === "off") return "off";
  if (kind.case === "teaCache") return `TeaCache, threshold ${short(kind.value.relL1Thresh ?? 0)}`;
  return words(kind.case);
}

function statsRows(stats: GenerationStats): Row[] {
  const time = (part: GenerationStats["total"]): string => (part && seconds(part) > 0 ? span(seconds(part)) : "");
  const hits = stats.cache.map(({ component, hits: hit, misses }) => `${component}: ${hit} of ${hit + misses}`);
  return [
    ["time in all", time(stats.total)],
    ["waiting", time(stats.queueWait)],
    ["denoising", time(stats.denoise)],
    ["decoding", time(stats.decode)],
    ["steps per second", stats.stepsPerSecond ? short(stats.stepsPerSecond) : ""],
    ["cache hits", hits.join(", ")],
    ["peak memory", stats.peakMemoryBytes ? bytes(Number(stats.peakMemoryBytes)) : ""],
    ["attempts", stats.attempts > 1 ? String(stats.attempts) : ""],
  ];
}

export function Params({ rows, label }: { rows: readonly Row[]; label: string }): JSX.Element {
  return (
    <table class="params" aria-label={label}>
      <tbody>
        {rows.map(([name, value]) => (
          <tr key={name}>
            <th scope="row">{name}</th>
            <td>{value}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
