"""The JavaScript of HTML pages with tables: sorting, searching, and hiding rows of a long table.

A page shows only the first rows of a long table. A sweep has thousands of rows, and a browser needs seconds to
lay them out each time they are sorted.

On a phone, each row of a wide table becomes a card, whose cells show the column titles. A sorted column has
numbers first (by value and unit), then text, then empty cells.
"""

from __future__ import annotations

FIRST = 100  # number of rows of a long table that a page shows at first
SCRIPT = r"""
const FIRST = FIRST_ROWS;
const units = {KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40};
const number = (text) => {
  const found = /^(-?[\d,]*\.?\d+) ?([KMGT]iB)?/.exec(text);
  return found ? Number(found[1].replaceAll(",", "")) * (units[found[2]] ?? 1) : NaN;
};
const make = (name, more) => Object.assign(document.createElement(name), more);
const order = new Intl.Collator().compare;
const named = (rows) => `${rows.toLocaleString("en-US")} rows`;

function live(table) {
  const body = table.tBodies[0], heads = [...table.tHead.rows[0].cells];
  const rows = [...body.rows], long = rows.length > FIRST;
  let matching = rows, most = FIRST, find = () => show();
  const told = make("span", {role: "status"}), more = make("button", {type: "button"});
  const show = () => {
    const shown = matching.slice(0, most);
    for (const row of table.classList.contains("wide") ? shown : []) {
      for (const cell of row.cells) cell.dataset.label = heads[cell.cellIndex].textContent;
    }
    for (const row of shown) row.hidden = false;
    body.replaceChildren(...shown);
    if (!long) return;
    const found = named(matching.length) + (matching.length < rows.length ? " with these words" : "");
    told.textContent = shown.length < matching.length ? `The first ${shown.length} of ${found}` : found;
    more.hidden = matching.length <= FIRST;
    more.textContent = shown.length < matching.length ? "Show all" : `Show the first ${FIRST}`;
  };
  if (long) {
    const field = make("input", {type: "search", id: `find-${document.querySelectorAll(".find").length}`});
    const box = make("p", {className: "find"});
    box.append(make("label", {htmlFor: field.id, textContent: "Rows with the words"}), field, told, more);
    const texts = new Map(rows.map((row) => [row, row.textContent.toLowerCase()]));
    find = () => {
      const words = field.value.toLowerCase().split(/\s+/);
      matching = rows.filter((row) => words.every((word) => texts.get(row).includes(word)));
      show();
    };
    field.oninput = () => find();
    more.onclick = () => { most = most === FIRST ? rows.length : FIRST; show(); };
    table.parentNode.before(box);
  }
  show();
  for (const head of heads) {
    const at = head.cellIndex, texts = rows.map((row) => row.cells[at]?.textContent.trim());
    if (!head.textContent || !texts.some(Boolean)) continue;  // a column of bars
    const values = new Map(rows.map((row, place) => [row, [texts[place], number(texts[place])]]));
    const button = make("button", {type: "button"});
    button.append(...head.childNodes);
    head.append(button);
    button.onclick = () => {
      const turn = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      for (const other of heads) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", turn > 0 ? "ascending" : "descending");
      rows.sort((one, two) => {
        const [[a, x], [b, y]] = [values.get(one), values.get(two)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        if (isNaN(x) !== isNaN(y)) return isNaN(x) - isNaN(y);
        return turn * (x - y || order(a, b));
      });
      find();
    };
  }
}

for (const table of document.querySelectorAll("table")) live(table);
for (const box of document.querySelectorAll(".scroll")) if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
""".replace("FIRST_ROWS", str(FIRST))
