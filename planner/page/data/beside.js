// The slower parts of the page: serving commands, kept plans side by side, and other GPUs with prices.
import { argv, given, KEPT, keptHere, quoted, view } from "./address.js";
import { byId, grouped, line, make, size, table, term, valued, words } from "./dom.js";
import { json, tell } from "./python.js";

// empty elements that the functions below fill
export const places = () => ["line", "beside", "gpus"].map((id) => make("div", { id }));

const shown = () => JSON.parse(window.tonnage.out);
const own = () => make("p", { textContent: "Replace own/... by the folder or file of your model." });

export async function lines(current) {
  const found = view.command === "plan" && shown().fits ? await tell("ask", { command: "plan", argv: [...argv(), "--serve-line"] }) : null;
  if (!current()) return;
  const serve = (found?.out ?? "").trim().split("\n").filter(Boolean);
  byId("line").replaceChildren(
    ...(serve.length ? [make("h2", { textContent: "Serve it" }), ...serve.map((text) => line(text, text.split(" ", 2).join(" ")))] : []),
    make("h2", { textContent: "This plan on a command line" }),
    line(`tonnage ${view.command} ${quoted(argv())}`, "the command", "asked"),
    ...(view.flags.model?.startsWith("own/") ? [own()] : []),
  );
}

// only the flags that differ between plans
function differences(all, one) {
  const names = new Set(all.flatMap((flags) => Object.keys(given(flags))));
  names.delete("do");
  return [...names].filter((name) => new Set(all.map((flags) => flags[name] ?? "")).size > 1)
    .map((name) => (name === "model" ? one.model : one[name] ? `${name} ${one[name]}` : `${name}: default`));
}

const SHOWN = {
  plan: [
    ["fits", (plan) => (plan.fits ? "yes" : "no")],
    ["GPUs", (plan) => `${plan.ranks.length} x ${plan.deployment.gpu ?? "CPU"}`],
    ["weights", (plan) => size(plan.ranks[plan.worst_rank].weights_bytes)],
    ["KV cache pool", (plan) => size(plan.ranks[plan.worst_rank].kv_pool_bytes)],
    ["tokens", (plan) => grouped(plan.kv_cache.tokens)],
    ["context", (plan) => grouped(plan.deployment.max_model_len)],
    ["sequences of it", (plan) => plan.kv_cache.max_concurrency.toFixed(2)],
  ],
  train: [
    ["fits", (plan) => (plan.fits ? "yes" : "no")],
    ["GPUs", (plan) => grouped(plan.setup.gpus * plan.setup.nodes)],
    ["GPU, per rank", (plan) => size(plan.gpu_bytes)],
    ["CPU, per node", (plan) => size(plan.cpu_bytes)],
    ["trained", (plan) => grouped(plan.model.trainable)],
    ["sequences a step", (plan) => grouped(plan.effective_batch)],
  ],
};

export async function beside(current) {
  const kept = keptHere(), all = [view.flags, ...kept], plans = [];
  const keep = make("button", { type: "button", id: "keep", className: "noprint", textContent: "Keep this plan beside the next",
    disabled: kept.length >= KEPT, onclick: () => {
      view.kept.push(view.command === "plan" ? given(view.flags) : { ...given(view.flags), do: "train" });
      document.dispatchEvent(new Event("flags"));
    } });
  for (const one of kept.length ? all : []) {
    plans.push(await json(view.command, argv(one)));
    if (!current()) return;
  }
  if (!kept.length) return byId("beside").replaceChildren(keep);
  const heads = all.map((one, at) => make("div", {}, make("strong", { textContent: at ? `Plan ${at + 1}` : "This one" }),
    ...differences(all, one).map((textContent) => make("small", { textContent })),
    ...(at ? [make("button", { type: "button", className: "noprint", textContent: "Take away", ariaLabel: `Take plan ${at + 1} away`,
      onclick: () => { view.kept.splice(view.kept.indexOf(one), 1); document.dispatchEvent(new Event("flags")); } })] : [])));
  const rows = SHOWN[view.command].map(([name, read]) => [make("th", { scope: "row", textContent: name }),
    ...plans.map((plan) => make("td", {}, plan.refused ? (name === "fits" ? `refused: ${plan.refused}` : "") : read(plan)))]);
  byId("beside").replaceChildren(keep, make("h2", { textContent: "Side by side" }),
    table(["", ...heads], rows, "Plans side by side", { className: "even" }));
}

const why = (plan) => (plan.refused ? "refused" : plan.unsupported?.length ? "does not run" : "too small");

// GPUs on which it fits come first, ordered by price
export async function otherGpus(current, all) {
  const { gpu: mine, ...others } = view.flags, plan = shown(), training = view.command === "train";
  const count = training ? plan.setup.gpus * plan.setup.nodes : plan.ranks.length;
  const costs = await tell("costs", { gpus: count }), found = [];
  for (const gpu of all.gpus) {
    if (gpu.vendor === "apple" && others.engine !== "llama.cpp") continue;
    const other = await json(view.command, argv({ ...others, gpu: gpu.name }));
    if (!current()) return;
    found.push([gpu, other, costs[gpu.name]]);
  }
  const fits = ([, other]) => Boolean(!other.refused && other.fits), price = ([, , cost]) => cost?.[0] ?? Infinity;
  found.sort((a, b) => fits(b) - fits(a) || price(a) - price(b));
  const rows = found.map((one) => {
    const [gpu, other, cost] = one, ok = fits(one);
    const figures = training
      ? [other.refused ? valued("refused", -1) : valued(size(other.gpu_bytes), other.gpu_bytes), valued(ok ? "yes" : "no", ok ? 1 : 0)]
      : [ok ? valued(grouped(other.kv_cache.tokens), other.kv_cache.tokens) : valued(why(other), -1),
        ok ? valued(other.kv_cache.max_concurrency.toFixed(2), other.kv_cache.max_concurrency) : valued("", -1)];
    const dollars = cost === null ? make("span", { title: "no list has a price", textContent: "?" }) : make("span", { title: cost[1], textContent: cost[0].toFixed(2) });
    const name = words(gpu.name === mine ? make("strong", { textContent: gpu.name }) : term(gpu.name, () => {
      view.flags.gpu = gpu.name;
      document.dispatchEvent(new Event("flags"));
    }));
    if (other.refused) figures[0].title = other.refused;
    return [name, valued(size(gpu.memory_bytes), gpu.memory_bytes), ...figures, valued(dollars, price(one))];
  });
  const heads = ["GPU", "memory", ...(training ? ["needed", "fits"] : ["tokens", "sequences"]), count > 1 ? `USD/h for ${count}` : "USD/h"];
  const sources = [...new Set(found.flatMap(([, , cost]) => (cost ? [cost[1]] : [])))];
  byId("gpus").replaceChildren(make("h2", { textContent: "On other GPUs" }), table(heads, rows, "The same on other GPUs", { sorts: true, className: "gpus" }),
    make("p", { className: "soft", textContent: `Lowest list prices: ${sources.join("; ")}.` }));
}
