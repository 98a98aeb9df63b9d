// The state is the address: flags in its query, configs of one's own behind #, which no server is sent.
export const FIRST = {
  plan: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", engine: "vllm" },
  train: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", method: "lora" },
};
export const KEPT = 3; // plans beside the one that is changed
const LONGEST = 8000; // characters of a config in an address; browsers and chats cut longer ones

// command: plan or train; flags: of the one that is changed, without those left out; kept: of the others
export const view = { command: "plan", flags: {}, kept: [] };
const configs = new Map(); // name of a model of one's own -> its config.json, packed

const commandOf = (flags) => (flags.do === "train" ? "train" : "plan");
// those kept of the command that is shown
export const keptHere = () => view.kept.filter((flags) => commandOf(flags) === view.command);

// a link may say whatever it likes, but is no place for a token, nor for the name of a file to write
function read(query) {
  for (const name of ["hf-token", "html"]) query.delete(name);
  return Object.fromEntries(query);
}

export async function readAddress() {
  const query = new URLSearchParams(location.search);
  view.kept = query.getAll("beside").slice(0, 2 * KEPT).map((one) => read(new URLSearchParams(one)));
  query.delete("beside");
  const { do: _, ...flags } = read(query);
  view.command = commandOf({ do: query.get("do") });
  view.flags = Object.keys(flags).length ? flags : { ...FIRST[view.command] };
  const found = [];
  for (const [name, packed] of new URLSearchParams(location.hash.slice(1))) {
    if (!name.startsWith("own/")) continue;
    try {
      found.push([name, await unpacked(packed)]);
      configs.set(name, packed);
    } catch { /* cut off: the plan says that the model is not here */ }
  }
  return found;
}

export const given = (flags) => Object.fromEntries(Object.entries(flags).filter(([, value]) => value !== ""));

export function address() {
  const query = new URLSearchParams(given(view.flags));
  if (view.command !== "plan") query.set("do", view.command);
  for (const one of view.kept) query.append("beside", new URLSearchParams(one));
  const used = new Set([view.flags, ...view.kept].map(({ model }) => model));
  const hash = new URLSearchParams([...configs].filter(([name]) => used.has(name)));
  return `?${query}${hash.size ? `#${hash}` : ""}`;
}

export function argv({ model, do: _, ...flags } = view.flags) {
  return [model ?? "", ...Object.entries(given(flags)).flatMap(([name, value]) => (value === "true" ? [`--${name}`] : [`--${name}`, value]))];
}

// as a shell takes it
export const quoted = (argv) => argv.map((word) =>
  (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");

// -- configs in the address --

export async function keepConfig(name, text) {
  const packed = await pack(text); // as it is: JavaScript would write 1e6 for 1000000.0
  if (packed.length <= LONGEST) configs.set(name, packed);
}

export const inAddress = (name) => !name.startsWith("own/") || configs.has(name);

const through = (bytes, stream) => new Response(new Blob([bytes]).stream().pipeThrough(stream)).arrayBuffer();

async function pack(text) {
  const bytes = new Uint8Array(await through(text, new CompressionStream("deflate-raw")));
  const binary = Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");
  return btoa(binary).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

async function unpacked(packed) {
  const binary = atob(packed.replaceAll("-", "+").replaceAll("_", "/"));
  const bytes = Uint8Array.from(binary, (letter) => letter.charCodeAt(0));
  return new TextDecoder().decode(await through(bytes, new DecompressionStream("deflate-raw")));
}
