// Messages to and from the planner, which runs in worker.js.
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let asked = 0;

worker.onmessage = ({ data: { id, value, error } }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  error === undefined ? resolve(value) : reject(new Error(error));
};

export const onFailure = (fail) => {
  worker.onerror = (event) => fail(`Python did not start: ${event.message ?? "a file is missing"}`);
};

// kind: a key of KINDS in worker.js
export function tell(kind, rest = {}) {
  return new Promise((resolve, reject) => {
    waiting.set(++asked, { resolve, reject });
    worker.postMessage({ id: asked, kind, ...rest });
  });
}

// the JSON output of a command, or its error message
export async function json(command, argv) {
  const found = await tell("ask", { command, argv: [...argv, "--json"] });
  return found.out ? JSON.parse(found.out) : { refused: found.err.replace(/^[^:]*: /, "").trim() };
}
