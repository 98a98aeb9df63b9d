// The page: what is chosen is asked of the planner, and what it answers is drawn. Every figure is the commands'.
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

// -- asking --

const extra = ["--explain", "--json"];

// step: a choice that "back" takes back, which a slider's every value is not
function changed(step = false) {
  const now = address(), old = location.search + location.hash;
  if (now !== old) step ? history.pushState(null, "", now) : history.replaceState(null, "", now);
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
  atGlance(words, kind, byId("status"));
}

// what is said, or the verdict, in a line at the lower edge while place, which says it, is out of sight
const seen = new IntersectionObserver(([entry]) => { byId("glance").hidden = entry.isIntersecting; });

function atGlance(words, kind, place) {
  seen.disconnect();
  byId("glance").hidden = true;
  byId("glance").textContent = words;
  byId("glance").className = `${kind} noprint`;
  if (words) seen.observe(place);
}

const fail = (words) => say(words, "no");

// null: the help, a table, a comparison
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
    return fail(`That is no single plan, which a page shows; on a command line: tonnage ${view.command} ${quoted(argv())}`);
  }
  const within = byId("result").contains(document.activeElement);
  const kept = [noteOf(view.flags.model), !inAddress(view.flags.model ?? "") && "The address has all of this plan but the files, which stay in this browser."]
    .filter(Boolean).map((textContent) => make("p", { className: "soft noprint", textContent }));
  byId("result").replaceChildren(...(training ? drawTraining(plan) : drawPlan(plan)), ...kept, ...places());
  if (within) byId("answer").focus({ preventScroll: true }); // what was pressed may be gone
  if (!underway && !objection) {
    atGlance((training ? trainingInShort : planInShort)(plan), plan.fits ? "yes" : "no", byId("result").querySelector(".verdict"));
  }
  byId("printed").textContent = `${new Date().toISOString().slice(0, 10)}, Tonnage ${all.version}, ${location.href.split("#")[0]}`;
}

// -- the model --

// files of the hub are read when the button is pressed, and not before
const fetched = new Set();
const ofTheHub = (name) => name.includes("/") && !name.startsWith("own/") && !fetched.has(name);

const elsewhere = (name) => (name.startsWith("own/")
  ? "This link's model is a file of whoever made it: drop it here, or choose another model."
  : `${name} is not in the list: its files can be read on the hub (the button below its name), or its config pasted.`);

let choice = 0, underway = "", objection = ""; // what is said of the last choice, whatever is drawn meanwhile

// finding: a name, or what will be one; words: what takes a while
async function choose(finding, words = "") {
  const mine = ++choice;
  [underway, objection] = [words, ""];
  if (words) say(words);
  try {
    const found = await finding;
    if (mine !== choice) return; // another was chosen meanwhile
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
    byId("file").value = ""; // or the same files, mended, would be no change
  };
  document.ondragover = (event) => { event.preventDefault(); document.body.classList.add("drop"); };
  document.ondragleave = () => document.body.classList.remove("drop");
  document.ondrop = (event) => {
    event.preventDefault();
    document.body.classList.remove("drop");
    files(event.dataTransfer.files);
  };
  for (const name of ["plan", "train"]) byId(`tab-${name}`).onclick = () => { otherCommand(name); changed(true); };
  document.addEventListener("flags", () => { drawForm(); changed(true); }); // a button of the answer
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
  choice += 1; // what was underway is of another plan
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
  const { keeper } = document.documentElement.dataset; // absent where a command or a server is the host
  if (keeper) await navigator.serviceWorker?.register(keeper).catch(console.info); // it may be forbidden
}).catch((error) => fail(`Python did not start: ${error.message}`));
