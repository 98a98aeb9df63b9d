// Models of one's own: a config that was pasted, files that were dropped or chosen.
import { keepConfig } from "./address.js";
import { tell } from "./python.js";

const MIB = 2 ** 20;
const GGUF_HEADER = [16 * MIB, 128 * MIB]; // most fit into the first; planner/headers/gguf.py reads 100 MB at most
const SAFETENSORS_HEADER = 16 * MIB; // planner/headers/safetensors.py
const INDEX = "model.safetensors.index.json", CONFIG = "config.json";

// the refusal that a user sees
export class Refused extends Error {}

const encode = (text) => new TextEncoder().encode(text);
const firstBytes = async (file, count) => new Uint8Array(await file.slice(0, count).arrayBuffer());

// a name that other content does not have: plans that are kept, and links, go on meaning what they meant
async function nameFor(stem, contents) {
  const all = new Uint8Array(await new Blob(contents).arrayBuffer());
  let hash = 0x811c9dc5; // FNV-1a; crypto.subtle is not there over plain HTTP
  for (const byte of all) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return `own/${stem.replace(/[^\w.-]+/g, "-").slice(0, 40) || "model"}-${hash.toString(16).padStart(8, "0")}`;
}

// whether it is JSON the planner says: Python's has Infinity, which configs have, and JavaScript's has not
const typeOf = (config) => /"model_type"\s*:\s*"([^"]+)"/.exec(config)?.[1] ?? "model";

const put = (path, content, more = {}) => tell("put", { path, content, size: content.length, ...more });

// a folder with these files: [name, bytes, size of the whole file]; config: its config.json as text
async function folder(config, files) {
  const stem = typeOf(config), name = await nameFor(stem, [config, ...files.flatMap(([, bytes, size]) => [bytes, `${size}`])]);
  await put(`${name}/${CONFIG}`, encode(config), { first: true });
  for (const [file, content, size] of files) await put(`${name}/${file}`, content, { size });
  if (!files.length) await keepConfig(name, config);
  return name;
}

export const ofConfig = (text) => folder(text, []);

// a config that a link brought: under the name that it has there
export const ofLink = (name, text) => put(`${name}/${CONFIG}`, encode(text), { first: true });

// current: the model that is shown, whose config is taken where none comes with an index or a checkpoint
export async function ofFiles(list, current) {
  const files = [...list], named = (name) => files.find((file) => file.name === name);
  const gguf = files.filter(({ name }) => name.endsWith(".gguf"));
  if (gguf.length) return ofGguf(gguf[0]);
  const weights = files.filter(({ name }) => name.endsWith(".safetensors")), index = named(INDEX);
  const others = files.filter(({ name }) => name.endsWith(".json") && name !== INDEX && name !== CONFIG);
  if (!weights.length && !index && !named(CONFIG)) {
    if (others.length !== 1) throw new Refused("None of these is a config.json, a safetensors index or file, or a .gguf file.");
    return ofConfig(await others[0].text()); // a config.json that was saved under a name of its own
  }
  const config = named(CONFIG) ? await named(CONFIG).text() : await tell("read", { path: `${current}/${CONFIG}` });
  if (!config) {
    throw new Refused("An index or a .safetensors file has no config: drop config.json with it, or choose its model first.");
  }
  const beside = named(CONFIG) ? others : [];
  const kept = [...beside, ...(index ? [index] : [])].map(async (file) => [file.name, encode(await file.text()), file.size]);
  return folder(config, [...(await Promise.all(kept)), ...(await headers(weights, index))]);
}

// of each .safetensors file its header, under the name that a folder has it by
async function headers(files, index) {
  if (files.length === 1 && !index && /-of-\d+\.safetensors$/.test(files[0].name)) {
    throw new Refused(`${files[0].name} is one of several: drop model.safetensors.index.json, with all of them or alone.`);
  }
  if (files.length > 1 && !index) throw new Refused("Of several .safetensors files the index is needed too: drop model.safetensors.index.json with them.");
  return Promise.all(files.map(async (file) => {
    const prefix = await firstBytes(file, 8);
    const length = prefix.length < 8 ? 0 : Number(new DataView(prefix.buffer).getBigUint64(0, true));
    return [index ? file.name : "model.safetensors", await firstBytes(file, 8 + Math.min(length, SAFETENSORS_HEADER)), file.size];
  }));
}

async function ofGguf(file) {
  const name = await nameFor(file.name.replace(/\.gguf$/, ""), [String(file.size), await file.slice(0, 4096).arrayBuffer()]);
  const path = `${name}/${file.name}`;
  for (const most of GGUF_HEADER) {
    const content = await firstBytes(file, most);
    if (await put(path, content, { first: true, size: file.size })) break;
  }
  return path;
}
