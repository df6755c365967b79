import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { explain } from "../api/errors";
import type { GetServerInfoResponse, ServerStats } from "../gen/omni_grpc/v1/admin_pb";
import { ModelState } from "../gen/omni_grpc/v1/model_pb";
import { Params } from "../jobs/Params";
import { useCell } from "../state/cell";
import { CHART_VALUES, type Page, usePage } from "../state/page";
import { bytes, plural, seconds, short, span, words } from "../text";
import { Chart } from "./Chart";

const EVERY_MS = 1000;

/** The newest loads of the server, and why there are none. */
function useStats(page: Page): { stats: readonly ServerStats[]; problem: string } {
  const stats = useCell(page.stats);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    let here = true;
    const ask = async (): Promise<void> => {
      while (here) {
        try {
          const answer = await page.api.admin.getServerStats({});
          if (answer.stats) page.stats.value = [...page.stats.value, answer.stats].slice(-CHART_VALUES);
          setProblem("");
        } catch (error) {
          setProblem(explain(error).message);
        }
        await new Promise((resolve) => setTimeout(resolve, EVERY_MS));
      }
    };
    void ask();
    return () => {
      here = false;
    };
  }, [page]);
  return { stats, problem };
}

export function ServerTab(): JSX.Element {
  const page = usePage();
  const info = useCell(page.info);
  const { stats, problem } = useStats(page);
  const now = stats.at(-1);
  const times = useCell(page.stepTimes);
  return (
    <section class="panel" aria-label="Server">
      <h2>Server</h2>
      {problem && (
        <p class="problem" role="alert">
          {problem}
        </p>
      )}
      {now?.draining && <p class="problem">It is draining: it takes no more jobs.</p>}
      <div class="charts">
        <Chart
          title="Jobs"
          series={[
            { name: "running", values: stats.map(({ running }) => running) },
            { name: "waiting", values: stats.map(({ queued }) => queued) },
          ]}
          show={(value) => String(value)}
        />
        <Chart
          title="Denoising steps per second"
          series={[{ name: "steps", values: stats.map(({ stepsPerSecond }) => stepsPerSecond) }]}
          show={short}
        />
        <Chart title="Time of a step" series={[{ name: "my jobs", values: times }]} show={span} />
        <Memory stats={stats} />
        <Chart
          title="Wait of a new job"
          series={[{ name: "predicted", values: stats.map(({ estQueueDelay: wait }) => (wait ? seconds(wait) : NaN)) }]}
          show={span}
        />
      </div>
      {now && <ByModel stats={now} />}
      <Params label="About the server" rows={about(info, now)} />
      {Object.keys(info.features).length > 0 && (
        <details>
          <summary>Settings</summary>
          <Params label="Settings" rows={Object.entries(info.features).sort()} />
        </details>
      )}
    </section>
  );
}

function about(info: GetServerInfoResponse, now: ServerStats | undefined): (readonly [string, string])[] {
  const { storage } = info;
  const rows = [
    ["version", info.version],
    ["jobs that may wait", info.maxQueue ? String(info.maxQueue) : ""],
    ["jobs are kept", storage ? `${storage.rows}, ${storage.durable ? "beyond a restart" : "until it ends"}` : ""],
    ["streams", now ? String(now.openStreams) : ""],
    ["worker restarts", now ? String(now.workerRestarts) : ""],
  ] as const;
  return rows.filter(([, value]) => value !== "");
}

function Memory({ stats }: { stats: readonly ServerStats[] }): JSX.Element {
  const now = stats.at(-1);
  const devices = now?.gpus ?? [];
  const outputs = { name: "outputs kept", values: stats.map(({ artifactBytes }) => Number(artifactBytes)) };
  const used = devices.map(({ name, index }) => ({
    name: `${name} ${index}`,
    values: stats.map(({ gpus }) => Number(gpus.find((gpu) => gpu.index === index)?.memoryUsedBytes ?? NaN)),
  }));
  return <Chart title="Memory" series={used.length ? used : [outputs]} show={bytes} />;
}

function ByModel({ stats }: { stats: ServerStats }): JSX.Element | null {
  if (!stats.models.length) return null;
  return (
    <table class="params" aria-label="Models">
      <thead>
        <tr>
          <th scope="col">model</th>
          <th scope="col">state</th>
          <th scope="col">running</th>
          <th scope="col">waiting</th>
          <th scope="col">replicas</th>
        </tr>
      </thead>
      <tbody>
        {stats.models.map(({ model, state, running, queued, replicas }) => (
          <tr key={model}>
            <th scope="row">{model}</th>
            <td>{words(ModelState[state] ?? "")}</td>
            <td>{running}</td>
            <td>{queued}</td>
            <td>{replicas.length ? plural(replicas.length, "replica") : ""}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
