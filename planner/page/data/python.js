// The planner, in worker.js: what is asked of it and what it answers.
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

// kind: one of worker.js's KINDS
export function tell(kind, rest = {}) {
  return new Promise((resolve, reject) => {
    waiting.set(++asked, { resolve, reject });
    worker.postMessage({ id: asked, kind, ...rest });
  });
}

// the JSON of a command, or its refusal in words
export async function json(command, argv) {
  const found = await tell("ask", { command, argv: [...argv, "--json"] });
  return found.out ? JSON.parse(found.out) : { refused: found.err.replace(/^[^:]*: /, "").trim() };
}
