// The page's state is its address: flags in the query, the user's own configs after #, which no server receives.
export const FIRST = {
  plan: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", engine: "vllm" },
  train: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", method: "lora" },
};
export const KEPT = 3; // plans shown beside the current one
const LONGEST = 8000; // characters of a config in an address; browsers and chats cut longer addresses

// command: plan or train; flags: the current plan's flags; kept: the flags of plans shown beside it
export const view = { command: "plan", flags: {}, kept: [] };
const configs = new Map(); // name of the user's own model -> its compressed config.json

const commandOf = (flags) => (flags.do === "train" ? "train" : "plan");
// the kept plans of the current command
export const keptHere = () => view.kept.filter((flags) => commandOf(flags) === view.command);

// A link may contain any flag except a token and the name of a file to write.
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
    } catch { /* a truncated address: the plan then reports that the model is missing */ }
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

// the command line, quoted for a shell
export const quoted = (argv) => argv.map((word) =>
  (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");

// -- configs in the address --

export async function keepConfig(name, text) {
  const packed = await pack(text); // unchanged text: JavaScript would write 1000000.0 as 1e6
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
