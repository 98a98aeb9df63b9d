// The controls of the form: lists, sliders and text fields, one per flag.
import { FIRST, view } from "./address.js";
import { byId, grouped, make } from "./dom.js";

const STEPS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576];
const SEQUENCES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
const RANKS = [1, 2, 4, 8, 16];
const ANOTHER = "any other release ...";

// [flag, label, kind, values]; the value "" omits the flag
function planControls(all) {
  return [
    ["Device", [
      ["gpu", "GPU", "list", all.gpus.map((gpu) => gpu.name)],
      ["tensor-parallel-size", "GPUs that share each layer (TP)", "steps", RANKS],
      ["pipeline-parallel-size", "GPUs that share the layers (PP)", "steps", RANKS],
      ["gpu-memory-utilization", "Memory the engine may use", "share"],
    ]],
    ["Load", [
      ["max-model-len", "Context, prompt + answer", "steps", ["", ...STEPS]],
      ["max-num-seqs", "Sequences at once", "steps", ["", ...SEQUENCES]],
      ["request", "Requests like yours, prompt+answer", "text", "2000+300"],
    ]],
    ["Engine and formats", [
      ["engine", "Engine", "list", all.engines],
      ["engine-version", "Version", "version", all.versions[view.flags.engine] ?? []],
      ["quantization", "Quantization of the weights", "list", ["", ...all.quantization]],
      ["kv-cache-dtype", "KV cache dtype", "list", ["", ...(all.kv_cache_dtype[view.flags.engine] ?? [])]],
      ["dtype", "Dtype of the model", "list", ["", ...all.dtype]],
    ]],
  ];
}

function trainControls(all) {
  const list = (name, label) => [name, label, "list", ["", ...all.training[name].filter(Boolean)]];
  return [
    ["Device", [
      ["gpu", "GPU", "list", all.gpus.map((gpu) => gpu.name)],
      ["gpus", "GPUs of a node", "steps", RANKS],
      ["nodes", "Nodes", "steps", RANKS],
      list("strategy", "Strategy"),
    ]],
    ["Method", [
      list("method", "What is trained"), list("precision", "Precision"), list("optimizer", "Optimizer"),
      list("stack", "Stack"),
    ]],
    ["Batch", [
      ["micro-batch", "Sequences of a GPU and pass", "steps", SEQUENCES],
      ["sequence-length", "Tokens of a sequence", "steps", ["", ...STEPS]],
      list("checkpointing", "Checkpointing"), list("attention", "Attention"),
    ]],
  ];
}

let all, changed;

// choices: entries of the lists; whenChanged: called when a flag changes
export function startForm(choices, whenChanged) {
  [all, changed] = [choices, whenChanged];
  const owners = Map.groupBy ? Map.groupBy(all.models, (name) => name.split("/")[0]) : new Map([["models", all.models]]);
  byId("models").append(...all.models.map((value) => make("option", { value })));
  byId("known").append(...[...owners].map(([label, names]) =>
    make("optgroup", { label }, ...names.map((value) => make("option", { value, textContent: value.split("/").at(-1) })))));
}

// Select the newest version of an engine. The command line then names it; without a version, the command would
// plan for the version installed where it runs.
export function newest(engine) {
  if (!all.kv_cache_dtype[engine]?.includes(view.flags["kv-cache-dtype"])) delete view.flags["kv-cache-dtype"];
  view.flags.engine = engine;
  view.flags["engine-version"] = all.versions[engine]?.[0] ?? "";
  drawForm();
}

export function drawForm() {
  const groups = (view.command === "plan" ? planControls : trainControls)(all);
  byId("controls").replaceChildren(...groups.map(([legend, controls]) =>
    make("fieldset", {}, make("legend", { textContent: legend }), ...controls.map(control))));
  showModel();
  for (const name of ["plan", "train"]) byId(`tab-${name}`).setAttribute("aria-pressed", String(view.command === name));
}

export function showModel() {
  const model = view.flags.model ?? "";
  byId("model").value = model;
  byId("known").value = all.models.includes(model) ? model : "";
}

export function otherCommand(name) {
  const { model, gpu } = view.flags;
  view.command = name;
  view.flags = { ...FIRST[name], model, gpu: gpu || FIRST[name].gpu };
  name === "plan" ? newest(view.flags.engine) : drawForm();
}

const set = (name, value, step) => { view.flags[name] = value; changed(step); };
const KINDS = { list, steps, share, text, version };

function control([name, label, kind, values]) {
  const id = `flag-${name}`, shown = make("output", { id: `${id}-shown` });
  shown.htmlFor = id;
  const title = make("label", { htmlFor: id }, label, shown);
  return make("div", { className: "control" }, title, ...KINDS[kind](name, id, values, shown, label));
}

function list(name, id, values) {
  const field = make("select", { id, onchange: () => {
    if (name === "engine") newest(field.value);
    set(name, field.value, true);
    byId(id).focus(); // the form may have been redrawn
  } });
  field.append(...values.map((value) => make("option", { value, textContent: value || "default" })));
  const now = view.flags[name] ?? (values.includes("") ? "" : values[0]);
  if (!values.includes(now)) { // a link may omit the GPU, or contain a value outside the list
    field.append(make("option", { value: now, textContent: now || "this machine's CPU" }));
  }
  field.value = now;
  return [field];
}

function steps(name, id, values, shown) {
  const field = make("input", { id, type: "range", min: 0, max: values.length - 1, step: 1 });
  const at = values.findIndex((value) => String(value) === String(view.flags[name] ?? ""));
  field.value = Math.max(at, 0);
  const tell = () => {
    const value = values[field.value], words = value === "" ? "default" : grouped(value);
    shown.textContent = words;
    field.setAttribute("aria-valuetext", words);
  };
  field.oninput = () => { tell(); set(name, String(values[field.value])); };
  tell();
  if (at < 0 && view.flags[name]) shown.textContent = grouped(view.flags[name]); // from a link
  return [field];
}

function share(name, id, _, shown) {
  const field = make("input", { id, type: "range", min: 0.5, max: 1, step: 0.01, value: view.flags[name] ?? 0.92 });
  const tell = () => {
    shown.textContent = view.flags[name] ? `${Math.round(100 * field.value)} %` : "default";
    field.setAttribute("aria-valuetext", shown.textContent);
  };
  field.oninput = () => { view.flags[name] = Number(field.value).toFixed(2); tell(); changed(); };
  tell();
  return [field];
}

function text(name, id, placeholder) {
  const field = make("input", { id, placeholder, value: view.flags[name] ?? "", oninput: () => set(name, field.value.trim()) });
  return [field];
}

// a list of the releases that changed a plan, and a text field for any other release
function version(name, id, values, shown, label) {
  if (!values.length) return [make("input", { id, disabled: true, value: "none is needed" })];
  const now = view.flags[name] ?? "";
  const other = make("input", { ariaLabel: `${label}, another`, value: now, hidden: values.includes(now),
    oninput: () => set(name, other.value.trim()) });
  const field = make("select", { id, onchange: () => {
    other.hidden = field.value !== ANOTHER;
    if (other.hidden) set(name, field.value, true);
    else other.focus();
  } });
  field.append(...[...values, ANOTHER].map((value) => make("option", { value, textContent: value })));
  field.value = values.includes(now) ? now : ANOTHER;
  const help = make("small", { id: `${id}-help`, className: "soft",
    textContent: "The list has the releases that changed a plan. A release in between plans like the listed one before it." });
  for (const one of [field, other]) one.setAttribute("aria-describedby", help.id);
  return [field, other, help];
}
