import type { JSX } from "preact";

const WIDTH = 300;
const HEIGHT = 80;

interface ChartProps {
  title: string;
  /** One line each, oldest first; NaN leaves a gap. */
  series: readonly { name: string; values: readonly number[] }[];
  /** How a value is written. */
  show: (value: number) => string;
}

/** Values over time as lines, with the newest in words. */
export function Chart({ title, series, show }: ChartProps): JSX.Element {
  const most = Math.max(...series.flatMap(({ values }) => values.filter(Number.isFinite)), 0);
  const newest = series.map(({ name, values }) => {
    const value = values.at(-1);
    return `${name}: ${value === undefined || Number.isNaN(value) ? "not known" : show(value)}`;
  });
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <svg viewBox={`0 0 ${WIDTH} ${HEIGHT}`} role="img" aria-label={`${title}: ${newest.join(", ")}`}>
        <line class="axis" x1="0" y1={HEIGHT - 1} x2={WIDTH} y2={HEIGHT - 1} />
        {series.map(({ name, values }, index) => (
          <polyline key={name} class={`line-${index}`} points={points(values, most)} />
        ))}
      </svg>
      <p class="facts">
        {newest.map((text, index) => (
          <span key={series[index]?.name} class={`key-${index}`}>
            {text}
          </span>
        ))}
        <span class="soft">at most {show(most)}</span>
      </p>
    </figure>
  );
}

function points(values: readonly number[], most: number): string {
  const step = WIDTH / Math.max(values.length - 1, 1);
  const high = HEIGHT - 6;
  return values
    .map((value, index) => [index * step, HEIGHT - 2 - (most ? (value / most) * high : 0)] as const)
    .filter(([, y]) => Number.isFinite(y))
    .map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`)
    .join(" ");
}
