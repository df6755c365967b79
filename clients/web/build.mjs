// Bundles the page into omni_grpc/web/page: `node build.mjs`, or `node build.mjs FOLDER` for another place. With --check
// it compares with what is there and exits with 1 where a file differs. The same sources and packages give the same bytes.
// Exits with 1 where scripts and styles are larger than LIMIT, compressed.
import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { dirname, join, relative, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const LIMIT = 120_000;
const here = dirname(fileURLToPath(import.meta.url));
const check = process.argv.includes("--check");
const folder = process.argv.slice(2).find((argument) => !argument.startsWith("--"));
const out = resolve(folder ?? join(here, "../../omni_grpc/web/page"));

/** The licenses of what is bundled, by package: their files, and the notices at the head of their sources. */
function licenses(inputs) {
  const notices = new Map();
  for (const input of [...inputs].sort()) {
    const name = /node_modules\/((?:@[^/]+\/)?[^/]+)\//.exec(input)?.[1];
    if (!name) continue;
    const found = notices.get(name) ?? new Set();
    const head = /^(?:\s*\/\/.*\n)+/.exec(readFileSync(join(here, input), "utf8"))?.[0] ?? "";
    if (head.includes("Copyright")) found.add(head.replaceAll(/^\/\/ ?/gm, "").trim());
    notices.set(name, found);
  }
  const texts = [...notices].map(([name, heads]) => {
    const root = join(here, "node_modules", name);
    const { version, license } = JSON.parse(readFileSync(join(root, "package.json"), "utf8"));
    const files = readdirSync(root).filter((entry) => /^licen[sc]e/i.test(entry));
    const parts = files.map((file) => readFileSync(join(root, file), "utf8").trim());
    return [`${name} ${version} (${license})`, ...parts, ...[...heads].sort()].join("\n\n");
  });
  const apache = "Where only a notice of the Apache License 2.0 is given, its text is the file LICENSE of omni_grpc.";
  return `${[apache, ...texts.sort()].join("\n\n----\n\n")}\n`;
}

/** The files of the page by name. */
async function bundled() {
  const { outputFiles, metafile } = await build({
    absWorkingDir: here,
    entryPoints: { app: "src/main.tsx", "app.css": "src/style.css" },
    entryNames: "[name]",
    outdir: out,
    bundle: true,
    minify: true,
    format: "esm",
    target: ["chrome123", "firefox120", "safari17.5"],
    jsx: "automatic",
    jsxImportSource: "preact",
    legalComments: "none",
    charset: "ascii",
    metafile: true,
    write: false,
    logLevel: "warning",
  });
  const files = new Map(
    outputFiles.map(({ path, contents }) => [path.endsWith(".css") ? "app.css" : "app.js", contents]),
  );
  for (const name of ["index.html", "icon.svg"]) files.set(name, readFileSync(join(here, "src", name)));
  return files.set("licenses.txt", Buffer.from(licenses(Object.keys(metafile.inputs))));
}

/** Names of the files in `out` that are not what they should be. */
function stale(files) {
  const there = existsSync(out) ? readdirSync(out) : [];
  const same = (name) =>
    there.includes(name) && files.get(name)?.length && readFileSync(join(out, name)).equals(files.get(name));
  return [...new Set([...files.keys(), ...there])].filter((name) => !same(name)).sort();
}

const files = await bundled();
if (check) {
  for (const name of stale(files)) {
    console.error(`${relative(process.cwd(), join(out, name))} is not what the sources give: run make web`);
    process.exitCode = 1;
  }
} else {
  rmSync(out, { recursive: true, force: true });
  mkdirSync(out, { recursive: true });
  for (const [name, contents] of files) writeFileSync(join(out, name), contents);
}
let compressed = 0;
for (const name of ["app.js", "app.css"]) {
  const size = gzipSync(files.get(name), { level: 9 }).length;
  compressed += size;
  console.log(`${name}: ${files.get(name).length} bytes, ${size} compressed`);
}
console.log(`scripts and styles: ${compressed} bytes compressed, the limit is ${LIMIT}`);
if (compressed > LIMIT) process.exitCode = 1;
