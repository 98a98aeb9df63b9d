// Helpers for elements, number formats, sortable tables and commands to copy.
export const byId = (id) => document.getElementById(id);

export function make(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    name in node ? (node[name] = value) : node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const grouped = (number) => Number(number).toLocaleString("en-US");

const GIB = 2 ** 30, MIB = 2 ** 20;
export function size(bytes) {
  if (Math.abs(bytes) < MIB) return `${grouped(bytes)} bytes`;
  if (Math.abs(bytes) < GIB) return `${(bytes / MIB).toFixed(1)} MiB`;
  return `${(bytes / GIB).toFixed(2)} GiB`;
}

export const between = (range, words) => (range && range[0] !== range[1]
  ? make("small", { textContent: `${words(range[0])} to ${words(range[1])}` }) : "");

// the most important figures: [name, value, interval, format function]
export function figures(shown) {
  return make("dl", { className: "figures" }, ...shown.map(([name, value, range, words]) =>
    make("div", {}, make("dt", { textContent: name }), make("dd", {}, words(value), between(range, words)))));
}

// Allow line breaks after dots and underscores of a name.
export const breaking = (text) => text.split(/(?<=[._])/).flatMap((piece) => [piece, make("wbr")]);
export const words = (...children) => make("td", { className: "words" }, ...children);
export const valued = (content, value) => { const cell = make("td", {}, content); cell.dataset.value = value; return cell; };
export const term = (text, onclick) => make("button", { type: "button", className: "term", textContent: text, onclick });

export function table(heads, rows, name, { sorts = false, className = "" } = {}) {
  const isWords = (at) => rows[0]?.[at] instanceof HTMLElement && rows[0][at].className === "words";
  const head = make("tr", {}, ...heads.map((content, at) => {
    const cell = make("th", { scope: "col", className: isWords(at) ? "words" : "" });
    if (sorts && content) cell.append(make("button", { type: "button", textContent: content, onclick: () => sort(cell, at) }));
    else cell.append(content);
    return cell;
  }));
  const body = make("tbody", {}, ...rows.map((cells) => make("tr", {}, ...cells.map((cell) =>
    (cell instanceof HTMLTableCellElement ? cell : make("td", {}, cell))))));
  const made = make("table", { className, ariaLabel: name }, make("thead", {}, head), body);
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

// parts: [class, name, bytes, onclick] of `whole` bytes; if they exceed it, a mark shows where the device ends
export function bar(parts, whole, name) {
  const needed = parts.reduce((sum, [, , bytes]) => sum + bytes, 0), total = Math.max(whole, needed);
  const made = make("div", { className: "bar", role: "group", ariaLabel: name }, ...parts.map(([kind, title, bytes, onclick]) => {
    const share = `${title}: ${size(bytes)}, ${((100 * bytes) / total).toFixed(0)} %`;
    const part = make("button", { type: "button", className: kind, title: share, ariaLabel: share, onclick });
    part.style.flexBasis = `${(100 * bytes) / total}%`;
    return part;
  }));
  if (needed <= whole) return made;
  const end = make("div", { className: "end" }, make("span", { textContent: `the GPU ends here: ${size(whole)}` }));
  end.style.left = `${(100 * whole) / total}%`;
  if (whole > total / 2) end.classList.add("before");
  return make("div", { className: "over" }, made, end);
}

// a command line with a copy button
export function line(text, name, id = "") {
  const code = make("code", { textContent: text });
  const button = make("button", { type: "button", className: "noprint", textContent: "Copy", ariaLabel: `Copy ${name}`,
    onclick: async () => {
      button.textContent = (await copied(text, code)) ? "Copied" : "Marked: copy it";
      setTimeout(() => { button.textContent = "Copy"; }, 2000);
    } });
  return make("div", { className: "command", id }, make("pre", {}, code), button);
}

// Over plain HTTP, except from localhost, browsers do not let scripts write to the clipboard.
async function copied(text, node) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    getSelection().selectAllChildren(node);
    return false;
  }
}
