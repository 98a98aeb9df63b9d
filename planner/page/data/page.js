// The page: sends the chosen flags to the planner and shows its answer. All figures come from the commands.
import { address, argv, inAddress, quoted, readAddress, view } from "./address.js";
import { beside, lines, otherGpus, places } from "./beside.js";
import { byId, make } from "./dom.js";
import { ofConfig, ofFiles, ofLink, Refused } from "./files.js";
import { drawForm, newest, otherCommand, showModel, startForm } from "./form.js";
import { noteOf, ofHub } from "./hub.js";
import { drawPlan, inShort as planInShort } from "./plan.js";
import { onFailure, tell } from "./python.js";
import { drawTraining, inShort as trainingInShort } from "./train.js";

let all, turn = 0, settled = 0, running = false;

// -- requests to the planner --

const extra = ["--explain", "--json"];

// step: whether the browser's back button undoes this change; a slider's single values are not undone
function changed(step = false) {
  const now = address(), old = location.search + location.hash;
  if (now !== old) step ? history.pushState(null, "", now) : history.replaceState(null, "", now);
  turn += 1;
  if (!running) answer();
}

async function answer() {
  running = true;
  try {
    for (let mine = -1; mine !== turn; ) { // changes made meanwhile are sent once, in their latest state
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

// Show the slower parts of the page; stop when the flags change.
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
  atGlance(words, kind, byId("status"));
}

// Show the message or verdict in a line at the lower edge while its place is scrolled out of view.
const seen = new IntersectionObserver(([entry]) => { byId("glance").hidden = entry.isIntersecting; });

function atGlance(words, kind, place) {
  seen.disconnect();
  byId("glance").hidden = true;
  byId("glance").textContent = words;
  byId("glance").className = `${kind} noprint`;
  if (words) seen.observe(place);
}

const fail = (words) => say(words, "no");

// The plan in the output of a command, or null for help, a table or a comparison.
function planOf(out) {
  try {
    const found = JSON.parse(out);
    return found.ranks || found.lines ? found : null;
  } catch {
    return null;
  }
}

function draw({ out, err }) {
  window.tonnage.out = out;
  say(underway || objection, objection && "no");
  if (!out) {
    byId("result").replaceChildren();
    const words = /is not in the local hub cache/.test(err) ? elsewhere(view.flags.model) : err.trim().replace(/^tonnage: /, "");
    return underway || objection || fail(words);
  }
  const plan = planOf(out), training = view.command === "train";
  if (!plan) {
    byId("result").replaceChildren();
    return fail(`The page shows single plans only. Run this on a command line: tonnage ${view.command} ${quoted(argv())}`);
  }
  const within = byId("result").contains(document.activeElement);
  const kept = [noteOf(view.flags.model), !inAddress(view.flags.model ?? "") && "The address contains this plan without its files, which stay in this browser."]
    .filter(Boolean).map((textContent) => make("p", { className: "soft noprint", textContent }));
  byId("result").replaceChildren(...(training ? drawTraining(plan) : drawPlan(plan)), ...kept, ...places());
  if (within) byId("answer").focus({ preventScroll: true }); // the pressed button may no longer exist
  if (!underway && !objection) {
    atGlance((training ? trainingInShort : planInShort)(plan), plan.fits ? "yes" : "no", byId("result").querySelector(".verdict"));
  }
  byId("printed").textContent = `${new Date().toISOString().slice(0, 10)}, Tonnage ${all.version}, ${location.href.split("#")[0]}`;
}

// -- the model --

// Files of the hub are fetched only after the button is pressed.
const fetched = new Set();
const ofTheHub = (name) => name.includes("/") && !name.startsWith("own/") && !fetched.has(name);

const elsewhere = (name) => (name.startsWith("own/")
  ? "This link's model is a local file of the link's author. Drop the file here, or choose another model."
  : `${name} is not in the list. Press the button below its name to read it from the hub, or paste its config.`);

let choice = 0, underway = "", objection = ""; // messages about the latest chosen model, kept across redraws

// finding: a model's name or a promise of it; words: a message to show until it resolves
async function choose(finding, words = "") {
  const mine = ++choice;
  [underway, objection] = [words, ""];
  if (words) say(words);
  try {
    const found = await finding;
    if (mine !== choice) return; // another model was chosen meanwhile
    view.flags.model = found;
  } catch (error) {
    if (mine !== choice) return;
    underway = "";
    objection = error instanceof Refused ? error.message : `That file cannot be read: ${error.message}`;
    return fail(objection);
  }
  underway = "";
  showModel();
  byId("hub").hidden = !ofTheHub(view.flags.model);
  changed(true);
}

function askHub(name) {
  const mine = choice + 1;
  const said = (words) => { if (mine === choice) say(underway = words); };
  choose(ofHub(name, said).then((found) => { fetched.add(found); return found; }), `Asking the hub for ${name}`);
}

function listen() {
  const model = byId("model");
  model.onchange = () => choose(model.value.trim());
  byId("known").onchange = () => byId("known").value && choose(byId("known").value);
  byId("hub").onclick = () => askHub(model.value.trim());
  byId("form").onsubmit = (event) => event.preventDefault();
  byId("paste").onchange = () => byId("paste").value.trim() && choose(ofConfig(byId("paste").value.trim()));
  const files = (list) => list.length && choose(ofFiles(list, view.flags.model ?? ""));
  byId("file").onchange = () => {
    files([...byId("file").files]);
    byId("file").value = ""; // otherwise selecting the same files again fires no event
  };
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("drop"); };
  document.ondragleave = () => document.body.classList.remove("drop");
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    files(event.dataTransfer.files);
  };
  for (const name of ["plan", "train"]) byId(`tab-${name}`).onclick = () => { otherCommand(name); changed(true); };
  document.addEventListener("flags", () => { drawForm(); changed(true); }); // sent by buttons in the answer
  for (const link of document.querySelectorAll("a[href='#answer']")) {
    link.onclick = (event) => { // the hash holds configs and must not change
      event.preventDefault();
      byId("answer").scrollIntoView();
      byId("answer").focus();
    };
  }
  window.onpopstate = window.onhashchange = () => location.search + location.hash !== address() && open();
}

// Show the plan in the address.
async function open() {
  choice += 1; // a fetch in progress belongs to another plan
  underway = objection = "";
  for (const [name, config] of await readAddress()) await ofLink(name, config);
  const { command, flags } = view;
  command === "plan" && flags["engine-version"] === undefined ? newest(flags.engine ?? "vllm") : drawForm();
  byId("hub").hidden = !ofTheHub(view.flags.model ?? "");
  changed();
}

window.tonnage = { answers: 0, tell, argv: () => [...argv(), ...extra], settled: () => settled === turn && !running && !underway };
onFailure(fail);
tell("start").then(async (found) => {
  all = found;
  byId("version").textContent = `Version ${all.version}.`;
  startForm(all, changed);
  listen();
  window.tonnage.loaded = performance.now();
  await open();
  const { keeper } = document.documentElement.dataset; // absent if a Tonnage command or server serves the page
  if (keeper) await navigator.serviceWorker?.register(keeper).catch(console.info); // browsers may forbid it
}).catch((error) => fail(`Python did not start: ${error.message}`));
