import type { Duration, Timestamp } from "@bufbuild/protobuf/wkt";

export function seconds(duration: Duration): number {
  return Number(duration.seconds) + duration.nanos / 1e9;
}

/** Milliseconds since 1970. */
export function millis(time: Timestamp): number {
  return Number(time.seconds) * 1000 + time.nanos / 1e6;
}

/** A time span as people say it: "0.42 s", "12 s", "3 min 5 s", "2 h 4 min". */
export function span(value: number): string {
  if (value < 1) return `${value.toFixed(2)} s`;
  if (value < 10) return `${value.toFixed(1)} s`;
  const whole = Math.round(value);
  if (whole < 60) return `${whole} s`;
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
  return `${Math.floor(whole / 3600)} h ${Math.floor((whole % 3600) / 60)} min`;
}

export function bytes(value: number): string {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let [left, unit] = [value, 0];
  while (left >= 1000 && unit < units.length - 1) {
    left /= 1000;
    unit += 1;
  }
  return `${unit === 0 || left >= 100 ? Math.round(left) : left.toFixed(1)} ${units[unit]}`;
}

/** A number without the digits that 32-bit floats bring along. */
export function short(value: number): string {
  return String(Number(value.toPrecision(4)));
}

export function plural(count: number, one: string, many = `${one}s`): string {
  return `${count} ${count === 1 ? one : many}`;
}

/** "FLOW_MATCH" and "flow_match" -> "flow match". */
export function words(name: string): string {
  return name.toLowerCase().replaceAll("_", " ");
}

export function clock(time: number): string {
  return new Date(time).toLocaleString(undefined, { dateStyle: "short", timeStyle: "short" });
}
