"use strict";
// Takes two scans, by drop, choice or path, and starts a registration; the viewer shows its result.

const byId = (id) => document.getElementById(id);
let app, busy = 0;  // uploads under way

function note(text) {
  const line = document.createElement("p");
  line.className = "note";
  line.setAttribute("role", "alert");
  line.textContent = text;
  byId("notes").append(line);
  line.scrollIntoView({ block: "nearest" });  // the button to register may be far below
}
const clear = () => byId("notes").replaceChildren();
const careful = (action) => (...values) => Promise.resolve().then(() => action(...values)).catch((error) => note(error.message));

async function request(address, value) {
  const options = value === undefined ? {} : { method: "POST", body: JSON.stringify(value), headers: { "X-Carl-Token": app.token } };
  const response = await fetch(address, options).catch(() => { throw new Error("The program does not answer. Is carl app still running?"); });
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

/** Send a file, and report the share that has arrived. */
function send(side, file, first, report) {
  return new Promise((done, fail) => {
    const upload = new XMLHttpRequest();
    upload.open("POST", `upload?side=${side}&first=${first ? 1 : 0}&name=${encodeURIComponent(file.name)}`);
    upload.setRequestHeader("X-Carl-Token", app.token);
    upload.upload.onprogress = (event) => report(event.loaded / (event.total || 1));
    upload.onload = () => (upload.status === 200 ? done(JSON.parse(upload.responseText)) : fail(new Error(upload.responseText.trim() || "the upload failed")));
    upload.onerror = () => fail(new Error(`${file.name} could not be sent. Is carl app still running, and is there room on the disk?`));
    upload.send(file);
  });
}

async function take(side, zone, files) {
  if (!files.length) return;
  clear();
  const total = files.reduce((sum, file) => sum + file.size, 0);
  if (total > app.limit) throw new Error(`${files[0].name} has ${(total / 1e6).toFixed(0)} MB, but the disk has room for ${(app.limit / 1e6).toFixed(0)} MB; type its path instead`);
  busy++;
  refresh();
  try {
    let sent = 0;
    for (const [n, file] of files.entries()) {
      const kept = await send(side, file, n === 0, (share) => { zone.chosen.textContent = `sending, ${Math.round((100 * (sent + share * file.size)) / (total || 1))} %`; });
      if (n === 0) zone.changes = kept.changes;
      sent += file.size;
    }
    zone.path.value = "";
    fill(zone, files.map((file) => file.name));
  } catch (error) {
    fill(zone, []);
    await remove(side).catch(() => {});  // what has arrived
    throw error;
  } finally { busy--; refresh(); }
}

async function remove(side) {
  zones[side].changes = (await request(`remove?side=${side}`, {})).changes;
}

function fill(zone, names) {
  zone.names = names;
  zone.chosen.textContent = names.length > 1 ? `${names.length} files, ${names[0]} …` : names[0] || "";
  refresh();
}

/** All files of a drop, those in folders included. */
async function dropped(transfer) {
  const entries = Array.from(transfer.items, (item) => item.webkitGetAsEntry && item.webkitGetAsEntry()).filter(Boolean);
  if (!entries.some((entry) => entry.isDirectory)) return Array.from(transfer.files);
  const walk = async (entry) => {
    if (entry.isFile) return [await new Promise((done, fail) => entry.file(done, fail))];
    const reader = entry.createReader(), found = [];
    for (let part; (part = await new Promise((done, fail) => reader.readEntries(done, fail))).length;) found.push(...part);
    return (await Promise.all(found.map(walk))).flat();
  };
  return (await Promise.all(entries.map(walk))).flat();
}

const zones = {};
function build(section) {
  const { side } = section.dataset, zone = zones[side] = { section, names: [] };
  const add = (kind, values) => { const element = Object.assign(document.createElement(kind), values); section.append(element); return element; };
  const line = add("p", {}), pick = document.createElement("button"), input = document.createElement("input");
  Object.assign(pick, { type: "button", textContent: "Choose a file", onclick: () => input.click() });
  Object.assign(input, { type: "file", multiple: true, hidden: true });
  line.append(pick, " or drop one here", input);
  const held = add("div", { className: "held" });
  zone.chosen = Object.assign(document.createElement("span"), { className: "chosen" });
  zone.remove = Object.assign(document.createElement("button"), { type: "button", textContent: "remove", ariaLabel: `remove ${section.querySelector("h2").textContent.toLowerCase()}` });
  zone.remove.onclick = careful(async () => { clear(); await remove(side); fill(zone, []); pick.focus(); });
  held.append(zone.chosen, zone.remove);
  zone.path = add("input", { type: "text", placeholder: "or type a path on this machine", ariaLabel: `${side} path` });
  input.onchange = careful(() => take(side, zone, Array.from(input.files)));
  zone.path.oninput = refresh;
  section.ondragover = (event) => { event.preventDefault(); section.classList.add("over"); };
  section.ondragleave = () => section.classList.remove("over");
  section.ondrop = careful(async (event) => {
    event.preventDefault();
    section.classList.remove("over");
    const files = await dropped(event.dataTransfer);
    if (files.length) return take(side, zone, files);
    clear();
    throw new Error("There was no file in what you dropped. Drop a file, a folder that holds files, or both files of an image.");
  });
}

function refresh() {
  const ready = (side) => zones[side].names.length || zones[side].path.value.trim();
  const running = !byId("job").hidden;
  for (const [side, zone] of Object.entries(zones)) {
    zone.section.classList.toggle("full", Boolean(ready(side)));
    zone.remove.hidden = !zone.names.length;
    zone.remove.disabled = busy || running;
  }
  byId("start").disabled = busy || running || !ready("fixed") || !ready("moving");
  byId("wait").textContent = running ? "" : busy ? "sending files" : !ready("fixed") ? "Choose the fixed image." : !ready("moving") ? "Choose the moving image." : "";
  byId("refine").disabled = byId("transform").value !== "deformable" || byId("model").value === "none";
}

function chosen() {
  const paths = Object.fromEntries(Object.keys(zones).map((side) => [side, zones[side].path.value]));
  const network = byId("refine").disabled || byId("refine").checked;
  const typed = (id) => byId(id).value.trim() || null;
  const changes = Object.fromEntries(Object.entries(zones).map(([side, zone]) => [side, zone.changes]));
  return { paths, changes, transform: byId("transform").value, model: byId("model").value, io_iterations: network ? null : 0,
    fixed_series: typed("fixed_series"), moving_series: typed("moving_series"),
    frame: typed("time_point"), channel: typed("channel"), nan: typed("nan"),
    label_names: typed("names"), out: typed("out"), overwrite: byId("overwrite").checked };
}

async function follow() {
  const job = await request("job.json");
  byId("job").hidden = job.state !== "running";
  if (job.state === "none") return location.assign("view");  // another tab has shown the result
  byId("progress").value = job.percent;
  byId("phase").textContent = `${job.phase}, ${job.percent} %, ${job.seconds} s`;
  document.title = job.state === "running" ? `${job.percent} % · carl app` : "carl app";
  refresh();
  if (job.state === "running") return setTimeout(careful(follow), 500);
  if (job.state === "failed") throw new Error(job.message);
  if (job.state === "cancelled") throw new Error("The registration was cancelled; nothing was written.");
  await request("show", {});
  location.assign("view");
}

/** Start a registration, or follow the one that another tab has started. */
async function begin() {
  try {
    await request("start", chosen());
  } catch (error) {
    if ((await request("job.json")).state !== "running") throw error;
    note(error.message);
  }
  byId("job").hidden = false;
  refresh();
  await follow();
}

async function start() {
  document.querySelectorAll(".drop").forEach(build);
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();  // do not open the file instead
    if (event.target.closest(".drop")) return;
    clear();
    note("That was dropped beside the zones. Drop it on the one for the fixed or for the moving image.");
  });
  app = await request("app.json");
  for (const name of app.models) byId("model").add(new Option(name, name));
  if (app.model) byId("model").add(new Option(app.model.split(/[/\\]/).pop(), app.model, true, true));
  for (const name of app.tables) byId("tables").append(new Option(name, name));
  byId("out").placeholder = app.out ? `a new folder in ${app.out}` : "none: download what you want to keep before you stop carl app";
  byId("last").hidden = !app.has_result;
  for (const [side, names] of Object.entries(app.uploads)) {
    zones[side].changes = app.changes[side];
    fill(zones[side], names);
  }
  byId("more").open = zones.fixed_seg.names.length + zones.moving_seg.names.length > 0;
  byId("transform").onchange = byId("model").onchange = refresh;
  byId("form").onsubmit = (event) => {
    event.preventDefault();
    clear();
    careful(begin)();
  };
  byId("cancel").onclick = careful(() => request("cancel", {}));
  refresh();
  if (app.job) await careful(follow)();
  document.body.dataset.ready = "yes";
}

start().catch((error) => { note(error.message); document.body.dataset.ready = "no"; });
