// The page: what is chosen is asked of the planner, and what it answers is drawn. Every figure is the commands'.
import { address, argv, inAddress, readAddress, view } from "./address.js";
import { beside, lines, otherGpus, places } from "./beside.js";
import { byId, make } from "./dom.js";
import { ofConfig, ofFiles, ofHub, ofLink, Refused } from "./files.js";
import { drawForm, newest, otherCommand, showModel, startForm } from "./form.js";
import { drawPlan, inShort as planInShort } from "./plan.js";
import { onFailure, tell } from "./python.js";
import { drawTraining, inShort as trainingInShort } from "./train.js";

let all, turn = 0, settled = 0, running = false;

// -- asking --

const extra = ["--explain", "--json"];

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
      const found = await tell("ask", { command: view.command, argv: [...argv(), ...extra] });
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

// what takes longer than an answer may, until something else is asked
async function later(mine) {
  const current = () => mine === turn;
  for (const step of byId("line") ? [lines, beside, otherGpus] : []) {
    if (!current()) return;
    try {
      await step(current, all);
    } catch (error) {
      return fail(error.message);
    }
  }
  if (current()) settled = mine;
}

// -- the answer --

function say(words, kind = "") {
  byId("status").textContent = words;
  byId("status").className = kind;
  byId("answer").setAttribute("aria-busy", "false");
}

const fail = (words) => say(words, "no");

function draw({ out, err }) {
  window.tonnage.out = out;
  say("");
  byId("glance").hidden = true;
  if (!out) {
    byId("result").replaceChildren();
    return fail(/is not in the local hub cache/.test(err) ? elsewhere(view.flags.model) : err.trim().replace(/^tonnage: /, ""));
  }
  const plan = JSON.parse(out), training = view.command === "train";
  const within = byId("result").contains(document.activeElement);
  const kept = inAddress(view.flags.model ?? "") ? [] : [make("p", { className: "soft noprint",
    textContent: "The address has all of this plan but the files, which stay in this browser." })];
  byId("result").replaceChildren(...(training ? drawTraining(plan) : drawPlan(plan)), ...kept, ...places());
  if (within) byId("answer").focus({ preventScroll: true }); // what was pressed may be gone
  byId("glance").textContent = (training ? trainingInShort : planInShort)(plan);
  byId("glance").className = plan.fits ? "yes noprint" : "no noprint";
  seen.disconnect();
  seen.observe(byId("result").querySelector(".verdict"));
  byId("printed").textContent = `${new Date().toISOString().slice(0, 10)}, Tonnage ${all.version}, ${location.href.split("#")[0]}`;
}

// the verdict in a line at the lower edge, where it is out of sight
const seen = new IntersectionObserver(([entry]) => { byId("glance").hidden = entry.isIntersecting; });

// -- the model --

// whether the hub would have to be asked: by the button alone
const fetched = new Set();
const unknown = (name) => name.includes("/") && !all.models.includes(name) && !name.startsWith("own/") && !fetched.has(name);

const elsewhere = (name) => (name.startsWith("own/")
  ? "This link's model is a file of whoever made it: drop it here, or choose another model."
  : `${name} is not in the list: its config can come from the hub (the button below its name), or be pasted.`);

function offerHub(name) {
  byId("hub").hidden = !unknown(name);
  if (unknown(name)) say(elsewhere(name));
}

async function choose(finding) {
  try {
    view.flags.model = await finding;
  } catch (error) {
    if (error instanceof Refused) return fail(error.message);
    return fail(`That file cannot be read: ${error.message}`);
  }
  showModel();
  offerHub(view.flags.model);
  changed();
}

function listen() {
  const model = byId("model");
  model.onchange = () => {
    const name = model.value.trim();
    unknown(name) ? offerHub(name) : choose(name);
  };
  byId("known").onchange = () => byId("known").value && choose(byId("known").value);
  byId("hub").onclick = () => {
    const name = model.value.trim();
    say(`Asking the hub for ${name}`);
    choose(ofHub(name).then(() => { fetched.add(name); return name; }));
  };
  byId("form").onsubmit = (event) => event.preventDefault();
  byId("paste").onchange = () => byId("paste").value.trim() && choose(ofConfig(byId("paste").value.trim()));
  const files = (list) => list.length && choose(ofFiles(list, view.flags.model ?? ""));
  byId("file").onchange = () => {
    files([...byId("file").files]);
    byId("file").value = ""; // or the same files, mended, would be no change
  };
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("drop"); };
  document.ondragleave = () => document.body.classList.remove("drop");
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    files(event.dataTransfer.files);
  };
  for (const name of ["plan", "train"]) byId(`tab-${name}`).onclick = () => { otherCommand(name); changed(); };
  document.addEventListener("flags", () => { drawForm(); changed(); }); // a button of the answer
  for (const link of document.querySelectorAll("a[href='#answer']")) {
    link.onclick = (event) => { // the hash is a plan's
      event.preventDefault();
      byId("answer").scrollIntoView();
      byId("answer").focus();
    };
  }
  window.onpopstate = window.onhashchange = () => location.search + location.hash !== address() && open();
}

// the plan of the address
async function open() {
  for (const [name, config] of await readAddress()) await ofLink(name, config);
  const { command, flags } = view;
  command === "plan" && flags["engine-version"] === undefined ? newest(flags.engine ?? "vllm") : drawForm();
  byId("hub").hidden = !unknown(view.flags.model ?? "");
  changed();
}

window.tonnage = { answers: 0, tell, argv: () => [...argv(), ...extra], settled: () => settled === turn && !running };
onFailure(fail);
tell("start").then(async (found) => {
  all = found;
  byId("version").textContent = `Version ${all.version}.`;
  startForm(all, changed);
  listen();
  window.tonnage.loaded = performance.now();
  await open();
  const { keeper } = document.documentElement.dataset; // absent where a command or a server is the host
  if (keeper) await navigator.serviceWorker?.register(keeper).catch(console.info); // it may be forbidden
}).catch((error) => fail(`Python did not start: ${error.message}`));
