// The user's own models: a pasted config, or dropped or selected files.
import { keepConfig } from "./address.js";
import { tell } from "./python.js";

const MIB = 2 ** 20;
const GGUF_HEADER = [16 * MIB, 128 * MIB]; // most fit into the first; planner/headers/gguf.py reads 100 MB at most
const SAFETENSORS_HEADER = 16 * MIB; // planner/headers/safetensors.py
const INDEX = "model.safetensors.index.json", CONFIG = "config.json";

// an error that is shown to the user
export class Refused extends Error {}

const encode = (text) => new TextEncoder().encode(text);
const firstBytes = async (file, count) => new Uint8Array(await file.slice(0, count).arrayBuffer());

// A name that contains a hash of the content, so that kept plans and links continue to mean the same model.
async function nameFor(stem, contents) {
  const all = new Uint8Array(await new Blob(contents).arrayBuffer());
  let hash = 0x811c9dc5; // FNV-1a; crypto.subtle does not exist over plain HTTP
  for (const byte of all) hash = Math.imul(hash ^ byte, 0x01000193) >>> 0;
  return `own/${stem.replace(/[^\w.-]+/g, "-").slice(0, 40) || "model"}-${hash.toString(16).padStart(8, "0")}`;
}

// The planner validates the JSON: configs may contain Infinity, which Python parses and JavaScript rejects.
const typeOf = (config) => /"model_type"\s*:\s*"([^"]+)"/.exec(config)?.[1] ?? "model";

const put = (path, content, more = {}) => tell("put", { path, content, size: content.length, ...more });

// Write a folder with a config.json (text) and files [name, bytes, size of the whole file].
async function folder(config, files) {
  const stem = typeOf(config), name = await nameFor(stem, [config, ...files.flatMap(([, bytes, size]) => [bytes, `${size}`])]);
  await put(`${name}/${CONFIG}`, encode(config), { first: true });
  for (const [file, content, size] of files) await put(`${name}/${file}`, content, { size });
  if (!files.length) await keepConfig(name, config);
  return name;
}

export const ofConfig = (text) => folder(text, []);

// Write a config from a link, under its name in the link.
export const ofLink = (name, text) => put(`${name}/${CONFIG}`, encode(text), { first: true });

// current: the current model, whose config is used for an index or checkpoint without a config
export async function ofFiles(list, current) {
  const files = [...list], named = (name) => files.find((file) => file.name === name);
  const gguf = files.filter(({ name }) => name.endsWith(".gguf"));
  if (gguf.length) return ofGguf(gguf[0]);
  const weights = files.filter(({ name }) => name.endsWith(".safetensors")), index = named(INDEX);
  const others = files.filter(({ name }) => name.endsWith(".json") && name !== INDEX && name !== CONFIG);
  if (!weights.length && !index && !named(CONFIG)) {
    if (others.length !== 1) throw new Refused("None of these is a config.json, a safetensors index or file, or a .gguf file.");
    return ofConfig(await others[0].text()); // a config.json under another name
  }
  const config = named(CONFIG) ? await named(CONFIG).text() : await tell("read", { path: `${current}/${CONFIG}` });
  if (!config) {
    throw new Refused("An index or a .safetensors file contains no config. Drop config.json with it, or choose its model first.");
  }
  const beside = named(CONFIG) ? others : [];
  const kept = [...beside, ...(index ? [index] : [])].map(async (file) => [file.name, encode(await file.text()), file.size]);
  return folder(config, [...(await Promise.all(kept)), ...(await headers(weights, index))]);
}

// The header of each .safetensors file, with the file's name in a model folder.
async function headers(files, index) {
  if (files.length === 1 && !index && /-of-\d+\.safetensors$/.test(files[0].name)) {
    throw new Refused(`${files[0].name} is one of several shards. Drop model.safetensors.index.json, alone or with all shards.`);
  }
  if (files.length > 1 && !index) throw new Refused("Several .safetensors files need their index: drop model.safetensors.index.json with them.");
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
