// The view of a training plan.
import { bar, between, figures, grouped, make, size, table, term, words } from "./dom.js";
import { notes, opener, verdict } from "./plan.js";

const COLOURS = {
  "weights": "weights", "frozen weights": "weights", "gradients": "kv_pool", "optimizer states": "cuda_graph",
  "activations": "activation", "logits and loss": "lora",
};

export const inShort = (plan) => `${plan.fits ? "Fits" : "Does not fit"}: ${size(plan.gpu_bytes)} of each GPU`;

export function drawTraining(plan) {
  const explain = make("div", { id: "terms" });
  const open = (one) => opener(explain, one.name, [{ ...one, value: one.bytes }]);
  const colour = (one) => COLOURS[one.name] ?? "framework";
  const onGpu = plan.lines.filter((one) => one.place === "gpu" && one.bytes > 0);
  const memory = plan.setup.device_memory ?? plan.gpu_bytes;
  const parts = onGpu.map((one) => [colour(one), one.name, one.bytes, open(one)]);
  if (memory > plan.gpu_bytes) parts.push(["free", "left over", memory - plan.gpu_bytes, opener(explain, "left over", [])]);
  const rows = plan.lines.map((one) => [
    words(make("span", { className: `key ${one.place === "gpu" ? colour(one) : "free"}` }), term(one.name, open(one))),
    words(one.place), size(one.bytes), between([one.low, one.high], size) || "exact", grouped(one.bytes),
  ]);
  const ranks = plan.setup.gpus * plan.setup.nodes;
  return [
    verdict(plan.fits),
    make("p", { textContent: `${plan.model.id}: ${plan.model.architecture}, ${grouped(plan.model.trainable)} of `
      + `${grouped(plan.model.parameters)} parameters are trained: ${plan.setup.method}, ${plan.setup.precision}, `
      + `${plan.setup.optimizer}, ${ranks > 1 ? `${plan.setup.strategy} on ${ranks} GPUs` : "one GPU"}` }),
    ...notes(plan.reasons ?? [], "no"),
    figures([
      ["GPU, per rank", plan.gpu_bytes, plan.gpu_bounds, size],
      ...(plan.cpu_bytes >= 2 ** 20 ? [["CPU, per node", plan.cpu_bytes, null, size]] : []),
      ...(plan.nvme_bytes ? [["NVMe, per node", plan.nvme_bytes, null, size]] : []),
      ["Sequences a step", plan.effective_batch, null, grouped],
      ...(plan.communication?.bytes ? [["Sent a step, per rank", plan.communication.bytes, null, size]] : []),
    ]),
    make("h2", { textContent: "Memory of each GPU" }),
    bar(parts, memory, `Memory: ${size(memory)}`),
    table(["what", "where", "size", "between", "bytes"], rows, "Memory by component", { className: "memory" }),
    explain,
    ...notes([`Peak moment: ${plan.peak_moment}`, ...plan.notes.map((text) => `Note: ${text}`)]),
  ];
}
