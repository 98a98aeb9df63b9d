// The planner in a thread of its own, so that the page stays responsive.
import { loadPyodide } from "./pyodide/pyodide.mjs";

const HOME = "/models";

async function bytes(name) {
  const response = await fetch(new URL(name, import.meta.url));
  if (!response.ok) throw new Error(`${name}: ${response.status}`);
  return new Uint8Array(await response.arrayBuffer());
}

let python, browser;

async function start() {
  const [loaded, planner, models] = await Promise.all([
    loadPyodide({ indexURL: new URL("./pyodide/", import.meta.url).href }),
    bytes("planner.zip"),
    bytes("models.zip"),
  ]);
  python = loaded;
  python.unpackArchive(planner, "zip", { extractDir: "/lib/planner" });
  python.unpackArchive(models, "zip", { extractDir: HOME });
  python.FS.chdir(HOME);
  browser = python.runPython(
    "import os, sys; sys.path.insert(0, '/lib/planner'); os.environ['HF_HUB_OFFLINE'] = '1'\n" // page.js fetches from the hub
    + "from tonnage.planner.page import browser; browser",
  );
  return JSON.parse(browser.choices());
}

function empty(folder) {
  for (const name of python.FS.readdir(folder)) {
    if (name !== "." && name !== "..") python.FS.unlink(`${folder}/${name}`);
  }
}

const KINDS = {
  start,
  ask: ({ command, argv }) => {
    const answer = browser.ask(command, argv);
    const [code, out, err] = answer.toJs();
    answer.destroy();
    return { code, out, err };
  },
  // the next requests for a model of the hub, given the responses to the previous ones
  hub: ({ name, answers }) => {
    const given = python.toPy(answers), found = JSON.parse(browser.hub(name, given));
    given.destroy();
    return found;
  },
  costs: ({ gpus }) => JSON.parse(browser.costs(gpus)),
  // Write a file of a model, and clear the folder before the first file. `content` may be the first bytes of a file
  // of `size` bytes; return whether these are enough.
  put: ({ path, content, first, size }) => {
    const full = `${HOME}/${path}`;
    const folder = full.slice(0, full.lastIndexOf("/"));
    python.FS.mkdirTree(folder);
    if (first) {
      empty(folder);
      browser.forget_model(path);
    }
    python.FS.writeFile(full, content);
    return size > content.length ? browser.register_partial(full, size) : true;
  },
  // the text of a model's file, or null if it does not exist
  read: ({ path }) => {
    const full = `${HOME}/${path}`;
    return python.FS.analyzePath(full).exists ? python.FS.readFile(full, { encoding: "utf8" }) : null;
  },
};

onmessage = async ({ data: { id, kind, ...rest } }) => {
  try {
    postMessage({ id, value: await KINDS[kind](rest) });
  } catch (error) {
    postMessage({ id, error: String(error.message ?? error).slice(-2000) });
  }
};
