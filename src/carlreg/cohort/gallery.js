"use strict";
const byId = (id) => document.getElementById(id);
const { rows, sort } = JSON.parse(byId("data").textContent);
rows.forEach((row, order) => { row.order = order; });
const CHUNK = 120; // cards that are added at a time: a cohort may have many thousands
const WORST = ["failed", "doubtful", "unknown", "good"];
const state = { sort, down: false, shown: [], count: 0 };

// What is sorted: the worst first where "worst" has a meaning. Pairs without a value come last.
const KEYS = {
  order: (row) => row.order,
  verdict: (row) => (row.status === "failed" ? -1 : row.verdict ? WORST.indexOf(row.verdict) : undefined),
  dice: (row) => row.dice,
  tre: (row) => row.tre,
  expected: (row) => row.expected,
  folds: (row) => row.folds,
  seconds: (row) => row.seconds,
  name: (row) => row.name,
};
const FILTERS = {
  "good": (row) => row.verdict === "good",
  "doubtful": (row) => row.verdict === "doubtful",
  "judged as failed": (row) => row.verdict === "failed",
  "with an error": (row) => row.status === "failed" || row.status === "skipped",
  "with warnings": (row) => row.warnings,
  "pending": (row) => row.status === "pending",
};

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function facts(row) {
  const parts = [];
  if (row.dice !== undefined) {
    parts.push(`Dice ${row.diceBefore === undefined ? "" : `${row.diceBefore.toFixed(3)} → `}${row.dice.toFixed(3)}`);
  }
  if (row.expected !== undefined) parts.push(`expected error ${row.expected.toFixed(1)} mm`);
  if (row.tre !== undefined) parts.push(`landmarks ${row.tre.toFixed(1)} mm`);
  if (row.folds !== undefined) parts.push(`folds ${row.folds.toFixed(3)} %`);
  if (row.seconds !== undefined) parts.push(`${row.seconds.toFixed(1)} s`);
  return parts.join(" · ");
}

function card(row) {
  const made = element(row.page ? "a" : "div", "pair");
  if (row.page) made.href = row.page;
  if (row.thumbnail) {
    const picture = element("img");
    Object.assign(picture, { src: row.thumbnail, loading: "lazy", alt: `${row.name}: fixed and warped image` });
    made.append(picture);
  } else {
    made.append(element("div", "none", row.status === "failed" ? "not registered" : row.status));
  }
  const text = element("div", "text");
  const done = row.status === "done" || row.status === "was done";
  const mark = done ? row.verdict || "" : row.status === "failed" ? "error" : row.status;
  text.append(element("span", `mark ${done ? row.verdict : row.status}`, mark === "unknown" ? "" : mark));
  text.append(element("b", "", row.name), element("span", "facts", facts(row)));
  if (row.error) text.append(element("div", "error", row.error));
  if (row.warnings) text.append(element("div", "warning", row.warnings.join("; ")));
  made.append(text);
  return made;
}

function compare(first, second) {
  const key = KEYS[state.sort];
  const [a, b] = [key(first), key(second)];
  if (a === undefined || b === undefined) {
    return a === b ? first.order - second.order : a === undefined ? 1 : -1;
  }
  const difference = typeof a === "string" ? a.localeCompare(b, undefined, { numeric: true }) : a - b;
  return (state.down ? -difference : difference) || first.order - second.order;
}

function add() {
  const next = state.shown.slice(state.count, state.count + CHUNK);
  byId("pairs").append(...next.map(card));
  state.count += next.length;
}

function draw() {
  const word = byId("find").value.trim().toLowerCase();
  const filter = FILTERS[byId("show").value] || (() => true);
  state.shown = rows.filter((row) => filter(row) && row.name.toLowerCase().includes(word)).sort(compare);
  state.count = 0;
  byId("pairs").replaceChildren();
  byId("direction").textContent = state.down ? "↓ descending" : "↑ ascending";
  add();
}

function counts() {
  const number = (test) => rows.filter(test).length;
  const done = number((row) => row.status === "done" || row.status === "was done");
  const parts = [`${done} of ${rows.length} pairs registered`];
  for (const [name, test] of Object.entries(FILTERS)) {
    const found = number(test);
    if (found) {
      parts.push(`${found} ${name}`);
      const option = element("option", "", `${name} (${found})`);
      option.value = name;
      byId("show").append(option);
    }
  }
  return parts.join(" · ");
}

byId("counts").textContent = counts();
byId("sort").value = state.sort;
byId("sort").addEventListener("change", (event) => {
  state.sort = event.target.value;
  state.down = ["folds", "seconds", "tre", "expected"].includes(state.sort); // the worst first
  draw();
});
byId("direction").addEventListener("click", () => { state.down = !state.down; draw(); });
byId("show").addEventListener("change", draw);
byId("find").addEventListener("input", draw);
const observer = new IntersectionObserver((entries) => {
  if (!entries.some((entry) => entry.isIntersecting) || state.count >= state.shown.length) return;
  add();
  observer.unobserve(byId("more")); // ask again whether the end is still in sight
  observer.observe(byId("more"));
}, { rootMargin: "800px" });
observer.observe(byId("more"));
draw();
document.body.dataset.ready = "yes";
