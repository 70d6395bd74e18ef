"use strict";
// Sorts and filters tables, and shows a point's figures where a pointer or finger is. A page without it reads the same.
const number = (text) => { const found = text.replace(/,/g, "").match(/^[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?/i);
  return found ? parseFloat(found[0]) : NaN; };
// By figure; texts without one follow by their letters, in whichever direction.
const compare = (a, b, sign = 1) => { const x = number(a), y = number(b);
  if (Number.isNaN(x) !== Number.isNaN(y)) return Number.isNaN(x) ? 1 : -1;
  return sign * (Number.isNaN(x) || x === y ? a.localeCompare(b) : x - y); };

function sortable(table) {
  const body = table.tBodies[0];
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const isUp = head.getAttribute("aria-sort") === "descending" || !head.hasAttribute("aria-sort") && head.classList.contains("left");
      table.querySelectorAll("th").forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", isUp ? "ascending" : "descending");
      const rows = [...body.rows].map((row) => [row.cells[column].textContent, row]);
      rows.sort((a, b) => compare(a[0], b[0], isUp ? 1 : -1));
      body.append(...rows.map((each) => each[1]));
    });
  });
}

function filterable(table) {
  const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells], filters = document.createElement("div");
  if (rows.length < 8 || heads.length < 3) return;
  filters.className = "filters";
  const controls = [], shown = document.createElement("output");
  const add = (name, control, matches) => {
    const label = document.createElement("label");
    label.append(name, control);
    filters.append(label);
    controls.push(matches);
    control.addEventListener("input", () => {
      rows.forEach((row) => { row.hidden = !controls.every((each) => each(row)); });
      shown.value = `${rows.filter((row) => !row.hidden).length} of ${rows.length}`;
    });
  };
  const search = document.createElement("input");
  search.type = "search";
  add("Search this table", search, (row) => row.textContent.toLowerCase().includes(search.value.toLowerCase()));
  heads.forEach((head, column) => {
    const values = [...new Set(rows.map((row) => row.cells[column].textContent))].sort(compare);
    if (!head.classList.contains("left") || values.length < 2 || values.length > 40 || values.length > rows.length / 2) return;
    const select = document.createElement("select");
    select.add(new Option("all", ""));
    values.forEach((value) => select.add(new Option(value, value)));
    add(head.textContent, select, (row) => select.selectedIndex === 0 || row.cells[column].textContent === select.value);
  });
  shown.value = `${rows.length} rows`;
  filters.append(shown);
  table.parentElement.before(filters);
}

function showHints() {
  const hint = document.createElement("div");
  hint.id = "hint";
  hint.hidden = true;
  hint.setAttribute("aria-hidden", "true");
  document.body.append(hint);
  document.addEventListener("pointerover", (event) => {
    const title = event.target.closest("svg *")?.querySelector(":scope > title");
    hint.hidden = !title;
    if (!title) return;
    hint.textContent = title.textContent;
    hint.style.left = `${Math.min(event.clientX + 12, innerWidth - hint.offsetWidth - 8)}px`;
    hint.style.top = `${Math.max(event.clientY - hint.offsetHeight - 12, 4)}px`;
  });
}

document.querySelectorAll(".table table").forEach((table) => { filterable(table); sortable(table); });
showHints();
let closed = [];
addEventListener("beforeprint", () => {
  closed = [...document.querySelectorAll("details:not([open])")];
  closed.forEach((each) => { each.open = true; });
});
addEventListener("afterprint", () => closed.forEach((each) => { each.open = false; }));
