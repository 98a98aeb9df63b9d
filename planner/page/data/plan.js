// The view of a plan.
import { view } from "./address.js";
import { bar, between, breaking, figures, grouped, make, size, table, term, words } from "./dom.js";

// [component of a rank, title, prefix of its terms]
const COMPONENTS = [
  ["weights", "Weights", "weights"], ["kv_pool", "KV cache pool", "kv_cache"], ["activation", "Activation peak", "activation"],
  ["cuda_graph", "CUDA graphs", "cuda_graph"], ["framework", "Engine and drivers", "framework"],
  ["lora", "LoRA slots", "lora"], ["draft", "Draft model", "draft"], ["kv_tier", "KV tier", "kv_tier"],
  ["free", "Left over", "free"],
];

export const verdict = (fits, unknown = []) => {
  const sure = unknown.length ? "The memory suffices; it is not known whether it runs." : "Fits.";
  return make("p", { className: `verdict ${fits ? "yes" : "no"}`, textContent: fits ? sure : "Does not fit." });
};

export const notes = (texts, kind = "") => texts.map((textContent) => make("p", { className: kind, textContent }));

// The verdict in one line, shown while the answer is out of view.
export const inShort = (plan) => (plan.fits
  ? `Fits: ${grouped(plan.kv_cache.tokens)} tokens, ${plan.kv_cache.max_concurrency.toFixed(2)} sequences`
  : "Does not fit");

export function drawPlan(plan) {
  const rank = plan.ranks[plan.worst_rank], ranges = plan.intervals, cache = plan.kv_cache;
  const sized = COMPONENTS.map(([name, title, starts]) => [name, title, rank[`${name}_bytes`], starts]);
  const explain = make("div", { id: "terms" });
  const open = (title, starts) => opener(explain, title, plan.terms.filter((one) => one.name.startsWith(starts)));
  const parts = sized.filter(([, , bytes]) => bytes > 0).map(([name, title, bytes, starts]) => [name, title, bytes, open(title, starts)]);
  const rows = sized.filter(([, , bytes]) => bytes !== 0).map(([name, title, bytes, starts]) => [
    words(make("span", { className: `key ${name}` }), term(bytes < 0 ? "Missing" : title, open(title, starts))),
    size(Math.abs(bytes)), between(ranges[`${name}_bytes`], size) || (name === "free" ? "" : "exact"),
    grouped(Math.abs(bytes)),
  ]);
  const { deployment } = plan, count = plan.ranks.length > 1 ? `${plan.ranks.length} x ` : "";
  return [
    verdict(plan.fits, plan.unknown),
    make("p", { textContent: `${plan.model.id}: ${plan.model.architecture}, ${grouped(plan.model.parameters)} parameters, `
      + `${plan.model.attention}; ${deployment.engine} ${deployment.engine_version ?? ""} on `
      + `${count}${deployment.gpu ?? "this machine's CPU"}` }),
    ...notes(plan.unknown ?? []),
    ...notes(plan.reasons, "no"),
    ...(plan.advice.length ? [make("p", { textContent: "Each of these changes makes it fit:" }),
      make("ul", {}, ...plan.advice.map(advised))] : []),
    ...(cache?.tokens === undefined ? [] : [first(plan)]),
    make("h2", { textContent: plan.ranks.length > 1 ? "Memory of each GPU" : "Memory" }),
    bar(parts, rank.total_bytes, `Memory: ${size(rank.total_bytes)}`),
    table(["component", "size", "between", "bytes"], rows, "Memory by component", { className: "memory" }),
    explain,
    ...(plan.host?.memory_bytes ? [make("p", {}, `Host memory: about ${size(plan.host.memory_bytes)}, `
      + `${plan.host.interval.map(size).join(" to ")}`)] : []),
    ...notes(plan.notes.map((text) => `Note: ${text}`)),
  ];
}

function first(plan) {
  const ranges = plan.intervals, cache = plan.kv_cache, { max_model_len: length, max_num_seqs: most } = plan.deployment;
  return figures([
    ["Tokens in the KV cache", cache.tokens, ranges.tokens, grouped],
    [`Sequences of ${grouped(length)} tokens`, cache.max_concurrency, ranges.max_concurrency,
      (value) => value.toFixed(value < 100 ? 2 : 0)],
    ...plan.requests.map((one) => [`Requests of ${grouped(one.prompt_tokens)}+${grouped(one.output_tokens)} at once`,
      one.at_once, one.bounds, grouped]),
    ["Most sequences at once", most, null, grouped],
    ["A token of KV cache", cache.bytes_per_token, null, (value) => `${grouped(value)} bytes`],
  ]);
}

// An advice "--flag value: effect", with a button if it changes one flag of the form.
function advised(text) {
  const found = /^--([\w-]+) (\S+): (.*)$/.exec(text);
  if (!found) return make("li", { textContent: text });
  const [, name, value, gives] = found;
  return make("li", {}, term(`--${name} ${value}`, () => {
    view.flags[name] = value;
    document.dispatchEvent(new Event("flags"));
  }), `: ${gives}`);
}

let opened = ""; // the component whose terms are shown, also after a change

// The click handler of a component: shows its terms and moves the focus to them.
export function opener(place, title, found) {
  if (title === opened) drawTerms(place, title, found);
  return () => {
    opened = title;
    drawTerms(place, title, found);
    place.firstChild.focus();
  };
}

function drawTerms(place, title, found) {
  place.replaceChildren(make("h2", { textContent: `${title}: terms and formulas`, tabIndex: -1 }),
    found.length ? table(["term", "value", "formula", "source"], found.map((one) =>
      [words(...breaking(one.name)), grouped(one.value), words(one.formula), words(one.source)]), "Terms")
      : make("p", { textContent: "The memory that remains after the other components." }));
}
