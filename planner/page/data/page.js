// Form, address and pictures; every figure comes from the commands that worker.js runs.
const byId = (id) => document.getElementById(id);
const worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
const waiting = new Map();
let asked = 0;

worker.onmessage = ({ data: { id, value, error } }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  error === undefined ? resolve(value) : reject(new Error(error));
};
worker.onerror = (event) => fail(`Python did not start: ${event.message ?? "a file is missing"}`);

function tell(kind, rest = {}) {
  return new Promise((resolve, reject) => {
    waiting.set(++asked, { resolve, reject });
    worker.postMessage({ id: asked, kind, ...rest });
  });
}

// -- what can be chosen ---------------------------------------------------------------------------------------

const STEPS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288, 1048576];
const SEQUENCES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048];
const RANKS = [1, 2, 4, 8, 16];

// flag -> control; the first of a list, "", leaves the flag out
function planControls(all) {
  return [
    ["Device", [
      ["gpu", "GPU", "list", all.gpus.map((gpu) => gpu.name)],
      ["tensor-parallel-size", "GPUs that share a layer (TP)", "steps", RANKS, 0],
      ["pipeline-parallel-size", "GPUs that share the layers (PP)", "steps", RANKS, 0],
      ["gpu-memory-utilization", "Share of its memory", "share"],
    ]],
    ["Load", [
      ["max-model-len", "Longest prompt and answer", "steps", ["", ...STEPS], 0],
      ["max-num-seqs", "Sequences at once", "steps", ["", ...SEQUENCES], 0],
      ["request", "Requests of prompt+answer tokens, 2000+300", "text"],
    ]],
    ["Engine and formats", [
      ["engine", "Engine", "list", all.engines],
      ["engine-version", "Version", "text", all.versions[state.engine] ?? []],
      ["quantization", "Weights", "list", ["", ...all.quantization]],
      ["kv-cache-dtype", "KV cache", "list", ["", ...(all.kv_cache_dtype[state.engine] ?? [])]],
      ["dtype", "Dtype", "list", ["", ...all.dtype]],
    ]],
  ];
}

function trainControls(all) {
  const list = (name, label) => [name, label, "list", ["", ...all.training[name].filter(Boolean)]];
  return [
    ["Device", [
      ["gpu", "GPU", "list", all.gpus.map((gpu) => gpu.name)],
      ["gpus", "GPUs per node", "steps", RANKS, 0],
      ["nodes", "Nodes", "steps", RANKS, 0],
      list("strategy", "Strategy"),
    ]],
    ["Method", [
      list("method", "What is trained"), list("precision", "Precision"), list("optimizer", "Optimizer"),
      list("stack", "Stack"),
    ]],
    ["Batch", [
      ["micro-batch", "Sequences per GPU and pass", "steps", SEQUENCES, 0],
      ["sequence-length", "Tokens of a sequence", "steps", ["", ...STEPS], 0],
      list("checkpointing", "Checkpointing"), list("attention", "Attention"),
    ]],
  ];
}

const FIRST = {
  plan: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", engine: "vllm" },
  train: { model: "Qwen/Qwen3-8B", gpu: "h100-80g", method: "lora" },
};
const KEPT = 3; // plans beside the one that is changed

// -- the state is the address ---------------------------------------------------------------------------------

let all, command = "plan", state = {}, kept = [];

function readAddress() {
  const query = new URLSearchParams(location.search);
  command = query.get("do") === "train" ? "train" : "plan";
  kept = query.getAll("beside").slice(0, KEPT).map((one) => {
    const flags = new URLSearchParams(one);
    flags.delete("hf-token");
    return String(flags);
  });
  query.delete("do");
  query.delete("beside");
  query.delete("hf-token"); // no place for one, and a page fetches nothing by itself
  state = query.size ? Object.fromEntries(query) : { ...FIRST[command] };
}

function address() {
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value !== ""));
  if (command !== "plan") query.set("do", command);
  for (const one of kept) query.append("beside", one);
  return `?${query}`;
}

function argv(of = state) {
  const { model, ...flags } = of;
  const given = Object.entries(flags).filter(([, value]) => value !== "");
  return [model, ...given.flatMap(([name, value]) => [`--${name}`, value])];
}

// as a shell takes it
const quoted = (words) => words.map((word) => (/^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`)).join(" ");

// -- the form -------------------------------------------------------------------------------------------------

function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    name in node ? (node[name] = value) : node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

const grouped = (number) => Number(number).toLocaleString("en-US");

function control([name, label, kind, values, first]) {
  const id = `flag-${name}`;
  const shown = make("output", { id: `${id}-shown` });
  shown.htmlFor = id;
  const title = make("label", { htmlFor: id }, label, shown);
  const set = (value) => { state[name] = value; changed(); };
  if (kind === "list") {
    const field = make("select", { id, onchange: () => {
      if (name === "engine") newest(field.value);
      set(field.value);
    } });
    field.append(...values.map((value) => make("option", { value, textContent: value || "the default" })));
    if (name === "gpu") field.append(make("option", { value: "", textContent: "this machine's CPU", hidden: true }));
    field.value = state[name] ?? (values.includes("") ? "" : values[0]);
    return [title, field];
  }
  if (kind === "steps") {
    const field = make("input", { id, type: "range", min: 0, max: values.length - 1, step: 1 });
    const at = values.findIndex((value) => String(value) === String(state[name] ?? ""));
    field.value = at < 0 ? first : at;
    const tell = () => {
      const value = values[field.value];
      const words = value === "" ? "the engine's choice" : grouped(value);
      shown.textContent = words;
      field.setAttribute("aria-valuetext", words);
    };
    field.oninput = () => { tell(); set(String(values[field.value])); };
    tell();
    if (at < 0 && state[name]) shown.textContent = grouped(state[name]); // from a link
    return [title, field];
  }
  if (kind === "share") {
    const field = make("input", { id, type: "range", min: 0.5, max: 1, step: 0.01, value: state[name] ?? 0.92 });
    const tell = () => { shown.textContent = state[name] ? Number(field.value).toFixed(2) : "the engine's own"; };
    field.oninput = () => { state[name] = Number(field.value).toFixed(2); tell(); changed(); };
    tell();
    return [title, field];
  }
  const field = make("input", { id, value: state[name] ?? "", oninput: () => set(field.value.trim()) });
  if (!values) return [title, field];
  field.setAttribute("list", `${id}-list`);
  return [title, field, make("datalist", { id: `${id}-list` }, ...values.map((value) => make("option", { value })))];
}

// rules are a version's: the command says which, or it would answer for the one installed where it is run
function newest(engine) {
  if (!all.kv_cache_dtype[engine]?.includes(state["kv-cache-dtype"])) delete state["kv-cache-dtype"];
  state.engine = engine;
  state["engine-version"] = all.versions[engine]?.[0] ?? "";
  drawForm();
}

function drawForm() {
  const groups = (command === "plan" ? planControls : trainControls)(all);
  byId("controls").replaceChildren(...groups.map(([legend, controls]) =>
    make("fieldset", {}, make("legend", { textContent: legend }), ...controls.flatMap(control))));
  byId("model").value = state.model ?? "";
  byId("hub").hidden = !unknown(state.model ?? "");
  for (const name of ["plan", "train"]) byId(`tab-${name}`).setAttribute("aria-pressed", String(command === name));
}

// -- asking ---------------------------------------------------------------------------------------------------

let turn = 0, running = false;

function changed() {
  history.replaceState(null, "", address());
  turn += 1;
  if (!running) answer();
}

async function answer() {
  running = true;
  try {
    for (let mine = -1; mine !== turn; ) { // what changed meanwhile is asked once, as it is now
      mine = turn;
      const start = performance.now();
      const found = await tell("ask", { command, argv: [...argv(), ...extra()] });
      if (mine === turn) {
        draw(found);
        window.tonnage.milliseconds = performance.now() - start;
        window.tonnage.answers += 1;
      }
    }
  } catch (error) {
    fail(error.message);
  }
  running = false;
  later(turn);
}

const extra = () => (command === "plan" ? ["--explain", "--json"] : ["--json"]);

// what takes longer than an answer may: the other GPUs, plans kept beside, the line to serve with
async function later(mine) {
  if (command !== "plan" || !byId("result").hasChildNodes()) return;
  const steps = [serveLine, beside, otherGpus];
  for (const step of steps) {
    if (mine !== turn) return;
    try {
      await step(() => mine === turn);
    } catch (error) {
      return fail(error.message);
    }
  }
  if (mine === turn) window.tonnage.settled = mine;
}

async function json(flags) {
  const found = await tell("ask", { command: "plan", argv: [...flags, "--json"] });
  return found.out ? JSON.parse(found.out) : { refused: found.err.replace(/^[^:]*: /, "") };
}

// -- the answer -----------------------------------------------------------------------------------------------

const GIB = 2 ** 30;
const gib = (bytes) => `${(bytes / GIB).toFixed(bytes < 10 * GIB ? 2 : 1)} GiB`;
const COMPONENTS = [
  ["weights", "Weights"], ["kv_pool", "KV cache pool"], ["activation", "Activation peak"],
  ["cuda_graph", "CUDA graphs"], ["framework", "Engine and drivers"], ["lora", "LoRA slots"],
  ["draft", "Draft model"], ["free", "Left over"],
];
const TERMS = { weights: "weights", kv_pool: "kv_cache", activation: "activation", cuda_graph: "cuda_graph",
  framework: "framework", lora: "lora", draft: "draft", free: "free" };

function fail(words) {
  byId("status").textContent = words;
  byId("status").className = "no";
  byId("answer").setAttribute("aria-busy", "false");
}

function draw({ code, out, err }) {
  window.tonnage.out = out;
  byId("answer").setAttribute("aria-busy", "false");
  const status = byId("status");
  status.className = "";
  status.textContent = "";
  if (!out) {
    fail(err.trim());
    byId("result").replaceChildren();
    return;
  }
  const plan = JSON.parse(out);
  byId("result").replaceChildren(...(command === "plan" ? drawPlan(plan, code) : drawTraining(plan, code)));
}

const between = (range, words) => (range && range[0] !== range[1]
  ? make("small", { textContent: `${words(range[0])} to ${words(range[1])}` }) : "");

function figure(name, value, range, words) {
  return make("div", {}, make("dt", { textContent: name }), make("dd", {}, words(value), between(range, words)));
}

function table(heads, rows, name, attributes = {}) {
  const head = make("tr", {}, ...heads.map((text, at) => {
    const cell = make("th", { scope: "col" });
    if (!attributes.sorts) cell.textContent = text;
    else cell.append(make("button", { type: "button", textContent: text, onclick: () => sort(cell, at) }));
    return cell;
  }));
  const body = make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) =>
    (cell instanceof HTMLTableCellElement ? cell : make("td", {}, cell))))));
  const made = make("table", { className: attributes.className ?? "" }, make("thead", {}, head), body);
  made.setAttribute("aria-label", name);
  return make("div", { className: "scroll", tabIndex: 0, role: "region", ariaLabel: name }, made);
}

function sort(cell, at) {
  const body = cell.closest("table").tBodies[0];
  const down = cell.getAttribute("aria-sort") !== "descending";
  const value = (row) => row.cells[at].dataset.value ?? row.cells[at].textContent;
  const rows = [...body.rows].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = Number.isNaN(Number(x) + Number(y)) ? x.localeCompare(y) : x - y;
    return down ? -order : order;
  });
  for (const other of cell.parentNode.cells) other.removeAttribute("aria-sort");
  cell.setAttribute("aria-sort", down ? "descending" : "ascending");
  body.replaceChildren(...rows);
}

const words = (text) => make("td", { className: "words", textContent: text });
const valued = (text, value) => { const cell = make("td", {}, text); cell.dataset.value = value; return cell; };

function drawPlan(plan, code) {
  const rank = plan.ranks[plan.worst_rank], ranges = plan.intervals;
  const sized = COMPONENTS.map(([name, title]) => [name, title, rank[`${name}_bytes`]]);
  const needed = sized.reduce((sum, [, , size]) => sum + Math.max(0, size), 0);
  const total = Math.max(rank.total_bytes, needed);
  const ranks = plan.ranks.length;
  const explain = make("div", { id: "terms" });
  const open = (name) => drawTerms(explain, plan.terms, name);
  const bar = make("div", { className: "bar", role: "group", ariaLabel: `Memory of a GPU: ${gib(rank.total_bytes)}` },
    ...sized.filter(([, , size]) => size > 0).map(([name, title, size]) => {
      const part = make("button", { type: "button", className: name, title: `${title}: ${gib(size)}`,
        onclick: () => open(name), ariaLabel: `${title}: ${gib(size)}, ${(100 * size / total).toFixed(0)} %` });
      part.style.flexBasis = `${(100 * size) / total}%`;
      return part;
    }));
  const rows = sized.filter(([, , size]) => size !== 0).map(([name, title, size]) => [
    make("td", {}, make("span", { className: `key ${name}` }), make("button", { type: "button", className: "term",
      textContent: size < 0 ? "Missing" : title, onclick: () => open(name) })),
    grouped(Math.abs(size)), gib(Math.abs(size)),
    make("td", {}, between(ranges[`${name}_bytes`], gib) || (name === "free" ? "" : "exact")),
  ]);
  const cache = plan.kv_cache;
  const figures = make("dl", { className: "figures" });
  if (cache && cache.tokens !== undefined) {
    figures.append(
      figure("Tokens in the pool", cache.tokens, ranges.tokens, grouped),
      figure(`Sequences of ${grouped(plan.deployment.max_model_len)} tokens`, cache.max_concurrency,
        ranges.max_concurrency, (value) => value.toFixed(value < 100 ? 2 : 0)),
      figure("Most sequences at once", plan.deployment.max_num_seqs, null, grouped),
      figure("A token of KV cache", cache.bytes_per_token, null, (value) => `${grouped(value)} bytes`),
      ...plan.requests.map((one) => figure(`Requests of ${grouped(one.prompt_tokens)}+${grouped(one.output_tokens)} at once`,
        one.at_once, one.bounds, grouped)),
    );
  }
  const title = plan.fits ? "Fits." : "Does not fit.";
  const many = ranks > 1 ? ` on each of ${ranks} GPUs` : "";
  return [
    make("p", { className: `verdict ${plan.fits ? "yes" : "no"}`, textContent: title }),
    make("p", { textContent: `${plan.model.id}: ${plan.model.architecture}, ${grouped(plan.model.parameters)} parameters, `
      + `${plan.model.attention}; ${plan.deployment.engine} ${plan.deployment.engine_version ?? ""} on `
      + `${plan.deployment.gpu ?? "this machine's CPU"}${many}` }),
    ...[...plan.reasons, ...plan.notes].map((text) => make("p", { className: plan.fits ? "" : "no", textContent: text })),
    ...(plan.advice.length ? [make("p", { textContent: "What would make it fit:" }),
      make("ul", {}, ...plan.advice.map((text) => make("li", { textContent: text })))] : []),
    bar,
    table(["component", "bytes", "", "between"], rows, "Memory of one GPU"),
    explain,
    figures,
    make("div", { id: "line" }),
    make("div", { className: "noprint" },
      make("button", { type: "button", id: "keep", textContent: "Keep this plan beside the next",
        disabled: kept.length >= KEPT, onclick: keep })),
    make("div", { id: "beside" }),
    make("div", { id: "gpus" }),
  ];
}

function drawTerms(place, terms, name) {
  const found = terms.filter((term) => term.name.startsWith(TERMS[name]));
  const title = COMPONENTS.find(([key]) => key === name)[1];
  place.replaceChildren(make("h2", { textContent: `${title}: how it comes about`, tabIndex: -1 }),
    found.length ? table(["term", "value", "formula", "source"], found.map((term) =>
      [words(term.name), grouped(term.value), words(term.formula), words(term.source)]), "Terms")
      : make("p", { textContent: "What is left of the memory after the other components." }));
  place.firstChild.focus();
}

function drawTraining(plan, code) {
  const rows = plan.lines.map((line) => [words(line.name), words(line.place), grouped(line.bytes), gib(line.bytes)]);
  const verdict = code === 0 ? "Fits." : "Does not fit.";
  return [
    make("p", { className: `verdict ${code === 0 ? "yes" : "no"}`, textContent: verdict }),
    make("p", { textContent: `${plan.model.id}: ${grouped(plan.model.trainable)} of ${grouped(plan.model.parameters)} `
      + "parameters are trained" }),
    ...(plan.reasons ?? []).map((text) => make("p", { className: "no", textContent: String(text) })),
    table(["what", "where", "bytes", ""], rows, "Memory of one rank"),
    make("h2", { textContent: "Command" }),
    make("pre", { textContent: `tonnage train ${quoted(argv())}` }),
  ];
}

async function serveLine(current) {
  const found = await tell("ask", { command: "plan", argv: [...argv(), "--serve-line"] });
  const place = byId("line");
  if (!current() || !place) return;
  const serve = JSON.parse(window.tonnage.out).fits ? [
    make("h2", { textContent: "Serve it" }), make("pre", { textContent: found.out.trim() || found.err }),
    make("button", { type: "button", className: "noprint", textContent: "Copy",
      onclick: () => navigator.clipboard?.writeText(found.out.trim()) }),
  ] : [];
  place.replaceChildren(...serve, make("p", {}, make("code", { textContent: `tonnage plan ${quoted(argv())}` })));
}

function keep() {
  const query = new URLSearchParams(Object.entries(state).filter(([, value]) => value !== ""));
  kept = [...kept, String(query)].slice(-KEPT);
  changed();
}

async function beside(current) {
  const place = byId("beside");
  if (!place || !kept.length) return place?.replaceChildren();
  const states = [state, ...kept.map((one) => Object.fromEntries(new URLSearchParams(one)))];
  const plans = [];
  for (const one of states) {
    plans.push(await json(argv(one)));
    if (!current()) return;
  }
  const row = (name, read) => [make("th", { scope: "row", textContent: name }),
    ...plans.map((plan) => make("td", {}, plan.refused && name !== "plan" ? "" : String(read(plan))))];
  const rank = (plan) => plan.ranks[plan.worst_rank];
  const rows = [
    row("fits", (plan) => (plan.fits ? "yes" : "no")),
    row("GPUs", (plan) => `${plan.ranks.length} x ${plan.deployment.gpu ?? "CPU"}`),
    row("weights", (plan) => gib(rank(plan).weights_bytes)),
    row("KV pool", (plan) => gib(rank(plan).kv_pool_bytes)),
    row("tokens", (plan) => grouped(plan.kv_cache.tokens)),
    row("sequences", (plan) => plan.kv_cache.max_concurrency.toFixed(2)),
  ];
  const heads = ["", ...states.map((one, at) => (at ? quoted(argv(one)) : "this one"))];
  const drop = kept.map((_, at) => make("button", { type: "button", className: "noprint",
    textContent: `Take away the ${["first", "second", "third"][at]} kept plan`,
    onclick: () => { kept.splice(at, 1); changed(); } }));
  place.replaceChildren(make("h2", { textContent: "Side by side" }), table(heads, rows, "Plans side by side"), ...drop);
}

const refusal = (plan) => (plan.refused ? "refused" : plan.unsupported?.length ? "does not run" : "does not fit");

async function otherGpus(current) {
  const place = byId("gpus");
  if (!place) return;
  const rows = [], { gpu: mine, ...others } = state;
  const costs = await tell("costs", { gpus: JSON.parse(window.tonnage.out).ranks.length });
  for (const gpu of all.gpus) {
    if (gpu.vendor === "apple" && state.engine !== "llama.cpp") continue;
    const plan = await json(argv({ ...others, gpu: gpu.name }));
    if (!current()) return;
    const cost = costs[gpu.name];
    const price = cost === null ? ["no price", Infinity] : [make("span", { title: cost[1], textContent: `${cost[0].toFixed(2)} USD/h` }), cost[0]];
    const name = make("td", {}, make("button", { type: "button", className: "term", textContent: gpu.name,
      onclick: () => { state.gpu = gpu.name; drawForm(); changed(); } }));
    rows.push(plan.refused || !plan.fits
      ? [name, valued(gib(gpu.memory_bytes), gpu.memory_bytes), valued(refusal(plan), -1), valued("", -1), valued(...price)]
      : [name, valued(gib(gpu.memory_bytes), gpu.memory_bytes), valued(grouped(plan.kv_cache.tokens), plan.kv_cache.tokens),
        valued(plan.kv_cache.max_concurrency.toFixed(2), plan.kv_cache.max_concurrency), valued(...price)]);
  }
  place.replaceChildren(make("h2", { textContent: "On other GPUs" }),
    table(["GPU", "memory", "tokens", "sequences", "lowest list price"], rows, "The same on other GPUs", { sorts: true, className: "gpus" }));
}

// -- models of one's own --------------------------------------------------------------------------------------

const HEADER = 128 * 1024 * 1024; // of a GGUF file; planner/headers/gguf.py reads 100 MB at most
const INDEX = "model.safetensors.index.json";

// what is read of a file: JSON whole, of a checkpoint its header
async function beginning(file) {
  const bytes = async (to) => new Uint8Array(await file.slice(0, to).arrayBuffer());
  if (!file.name.endsWith(".safetensors")) return bytes(HEADER);
  const length = new DataView((await bytes(8)).buffer).getBigUint64(0, true);
  return bytes(Math.min(8 + Number(length), HEADER));
}

async function ownFiles(files) {
  const folder = "own/model", names = [...files].map(({ name }) => name);
  const weights = names.filter((name) => name.endsWith(".gguf") || name.endsWith(".safetensors"));
  const gguf = names.find((name) => name.endsWith(".gguf")), config = names.includes("config.json");
  const only = names.filter((name) => name.endsWith(".json"));
  if (names.includes(INDEX) && !weights.length && !config) {
    return fail("An index names files and has no shapes: drop config.json, or the .safetensors files with it (of which the headers are read).");
  }
  let first = config || Boolean(gguf) || only.length === names.length;
  for (const file of files) {
    const kept = file.name.endsWith(".json") || weights.includes(file.name);
    if (!kept || (file.name === INDEX && !weights.length)) continue;
    await tell("put", { path: `${folder}/${file.name}`, content: await beginning(file), size: file.size, first });
    first = false;
  }
  choose(gguf ? `${folder}/${gguf}` : config || !only.length ? folder : `${folder}/${only[0]}`);
}

function choose(model) {
  state.model = model;
  byId("model").value = model;
  changed();
}

async function fromHub() {
  const model = byId("model").value.trim();
  const [name, revision = "main"] = model.split("@");
  byId("status").className = "";
  byId("status").textContent = `Asking the hub for ${name}`;
  let first = true;
  for (const file of ["config.json", "preprocessor_config.json"]) {
    const response = await fetch(`https://huggingface.co/${name}/resolve/${revision}/${file}`).catch(() => null);
    if (response?.ok) {
      const content = new Uint8Array(await response.arrayBuffer());
      await tell("put", { path: `${model}/${file}`, content, size: content.length, first });
      first = false;
    } else if (file === "config.json") {
      return fail(response ? `The hub answers ${response.status} for ${name}: a gated model's config.json can be pasted below.`
        : "The hub cannot be reached: paste config.json below.");
    }
  }
  fetched.add(model);
  byId("hub").hidden = true;
  choose(model);
}

const fetched = new Set();

// whether the hub would have to be asked: by the button alone
function unknown(name) {
  return name.includes("/") && !all.models.includes(name) && !name.startsWith("own/") && !fetched.has(name);
}

function listen() {
  const model = byId("model");
  model.onchange = () => {
    const name = model.value.trim();
    byId("hub").hidden = !unknown(name);
    if (!unknown(name)) choose(name);
  };
  byId("hub").onclick = fromHub;
  byId("form").onsubmit = (event) => event.preventDefault();
  byId("paste").onchange = async () => {
    const text = byId("paste").value.trim();
    if (!text) return;
    await tell("put", { path: "own/model/config.json", content: new TextEncoder().encode(text), first: true });
    choose("own/model");
  };
  byId("file").onchange = () => ownFiles(byId("file").files);
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("drop"); };
  document.ondragleave = () => document.body.classList.remove("drop");
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    ownFiles(event.dataTransfer.files);
  };
  for (const name of ["plan", "train"]) {
    byId(`tab-${name}`).onclick = () => {
      const { model: same, gpu } = state;
      command = name;
      state = { ...FIRST[name], model: same, gpu: gpu || FIRST[name].gpu };
      name === "plan" ? newest(state.engine) : drawForm();
      changed();
    };
  }
  window.onpopstate = () => { readAddress(); drawForm(); changed(); };
}

window.tonnage = { answers: 0, tell, argv: () => [...argv(), ...extra()] };
readAddress();
tell("start").then((found) => {
  all = found;
  byId("version").textContent = `Version ${all.version}.`;
  byId("models").append(...all.models.map((value) => make("option", { value })));
  listen();
  if (command === "plan" && state["engine-version"] === undefined) newest(state.engine ?? "vllm");
  else drawForm();
  window.tonnage.loaded = performance.now();
  changed();
}, (error) => fail(`Python did not start: ${error.message}`));
