// Fetches a model of the hub: config.json, index and the first bytes of its safetensors files. The planner decides
// what to fetch and interprets it (page/hub.py).
import { Refused } from "./files.js";
import { tell } from "./python.js";

const AT_ONCE = 8;
const notes = new Map(); // model -> how its plan differs from the command's

export const noteOf = (model) => notes.get(model);

// said: called with progress messages
export async function ofHub(name, said) {
  for (let answers = []; ;) {
    const { model, note, wanted, refused } = await tell("hub", { name, answers });
    if (refused) throw new Refused(`${refused}. Or drop its files here, or paste its config.json.`);
    if (!wanted) {
      notes.set(model, note);
      return model;
    }
    let left = wanted.length;
    answers = await each(wanted, async (one) => {
      const found = await fetched(one);
      left -= 1;
      if (wanted.length > 1) said(`Reading the headers of ${name}: ${wanted.length - left} of ${wanted.length} files`);
      return found;
    });
  }
}

// Make the requests, AT_ONCE of them in parallel; return the responses in the order of the requests.
async function each(all, ask) {
  const found = new Array(all.length), left = all.entries();
  await Promise.all(Array.from({ length: AT_ONCE }, async () => {
    for (const [at, one] of left) found[at] = await ask(one);
  }));
  return found;
}

// [status, headers, body, error]; the request carries no cookie, token or address of this page
async function fetched([address, range, most]) {
  try {
    const response = await fetch(address, { credentials: "omit", referrerPolicy: "no-referrer", headers: range ? { Range: range } : {} });
    const whole = range && response.status === 200; // the server sends the whole file, possibly many gigabytes
    return [response.status, [...response.headers], await begins(response, whole ? 0 : most), ""];
  } catch (error) {
    return [0, [], new Uint8Array(), String(error.message ?? error)];
  }
}

async function begins(response, most) {
  const reader = response.body?.getReader(), parts = [];
  for (let size = 0; reader && size < most;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    size += value.length;
  }
  await reader?.cancel();
  return new Uint8Array(await new Blob(parts).slice(0, most).arrayBuffer());
}
