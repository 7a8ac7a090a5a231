"use strict";
// Three NiiVue panels. Fixed and warped share a space and show the same point; the moving image shows its match, which
// the server computes with the transform itself. Positions are RAS millimetres, as in NiiVue.

const SIDES = ["fixed", "warped", "moving"];
const TITLES = { fixed: "fixed", warped: "moving, warped", moving: "moving" };
const byId = (id) => document.getElementById(id);
const panels = {};  // by side: NiiVue's objects
let scene, latest = 0;

async function request(address) {
  const response = await fetch(address);
  if (!response.ok) throw new Error(await response.text());
  return response.json();
}

function note(text) {
  const line = document.createElement("p");
  line.className = "note";
  line.setAttribute("role", "alert");
  line.textContent = text;
  byId("notes").append(line);
}

/** Colours for the labels 0, 1, 2, …: transparent for 0, then well-separated hues. */
function labelColours(count, hue = 0) {
  const table = { R: [0], G: [0], B: [0], A: [0], I: [0], labels: [""] };
  for (let label = 1; label <= Math.min(count, 4095); label++) {
    const angle = hue + 222.5 * (label - 1);
    const part = (n) => { const k = (n + angle / 30) % 12; return Math.round(255 * (0.55 - 0.42 * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
    table.R.push(part(0)); table.G.push(part(8)); table.B.push(part(4)); table.A.push(255);
    table.I.push(label); table.labels.push(String(label));
  }
  return table;
}

/** The volumes drawn over a side's image for an overlay. */
function overlays(side, choice) {
  if (choice === "labels") return [`${side}_labels`].filter((name) => scene.volumes[name]);
  return choice === "jacobian" && side !== "moving" ? ["jacobian", "folds"] : [];
}

async function show(side, name, opacity) {
  const { window, labels } = scene.volumes[name];
  const options = { url: `${name}.nii`, name: `${name}.nii`, opacity, colormap: "gray" };
  if (window) [options.cal_min, options.cal_max] = window;
  if (name === "jacobian") Object.assign(options, { colormap: "red", colormapNegative: "blue" });
  const volume = await panels[side].addVolumeFromUrl(options);
  if (labels) {
    volume.setColormapLabel(labelColours(labels, name === "folds" ? 305 : 0));
    panels[side].updateGLVolume();
  }
}

async function changeOverlay() {
  const choice = byId("overlay").value;
  byId("opacity").disabled = choice === "none";
  await Promise.all(Object.keys(panels).map(async (side) => {
    for (const old of panels[side].volumes.slice(1)) panels[side].removeVolume(old);
    for (const name of overlays(side, choice)) await show(side, name, byId("opacity").value / 100);
  }));
  byId("sides").textContent = (scene.dim === 3 ? "Radiological: the patient's right (R) is on the left. " : "")
    + "Click, drag or scroll: the other images show the matching point."
    + (choice === "jacobian" ? " Red: the moving image has up to 4 times the volume; blue: down to a quarter; magenta: folds." : "");
}

/** Show a point chosen on one side on all sides. */
async function go(from, mm) {
  const turn = ++latest;
  const start = from === "moving" ? "moving" : "fixed";
  const match = await request(`match.json?frame=ras&from=${start}&point=${mm.slice(0, 3).join(",")}`);
  if (turn !== latest) return;  // the user has moved on
  for (const [side, panel] of Object.entries(panels)) {
    if (side === from) continue;
    const position = panel.mm2frac(match[side === "moving" ? "moving" : "fixed"].ras, 0, true);
    panel.scene.crosshairPos = Array.from(position, (x) => Math.min(Math.max(x, 0), 1));
    panel.drawScene();
  }
  const text = (point) => point.slice(0, scene.dim).map((x) => x.toFixed(1)).join(", ");
  byId("where").textContent = `fixed ${text(match.fixed.ras)} mm → moving ${text(match.moving.ras)} mm`
    + (match.inside === false ? ", outside the moving image" : "");
  document.body.dataset.shown = turn;
}

async function open(side) {
  const figure = document.createElement("figure"), frame = document.createElement("div");
  const caption = document.createElement("figcaption"), canvas = document.createElement("canvas");
  caption.textContent = TITLES[side] + (side === "warped" ? "" : `: ${scene.names[side]}`);
  frame.append(canvas);
  figure.append(caption, frame);
  byId("panels").append(figure);
  const panel = panels[side] = new niivue.Niivue({
    backColor: [0, 0, 0, 1], crosshairColor: [1, 0.89, 0.54, 0.9], crosshairGap: 4, crosshairWidth: 0.4, crosshairWidthUnit: "percent", fontColor: [1, 0.89, 0.54, 1],
    dragAndDropEnabled: false, isRadiologicalConvention: scene.dim === 3, sagittalNoseLeft: true,
    multiplanarLayout: 1, multiplanarShowRender: 0, multiplanarEqualSize: false, tileMargin: 4, logLevel: "error",
    isOrientationTextVisible: scene.dim === 3, showAllOrientationMarkers: true, sliceType: scene.dim === 3 ? 3 : 0,
  });
  await panel.attachToCanvas(canvas);
  await show(side, side, 1);
  panel.onLocationChange = ({ mm }) => go(side, Array.from(mm)).catch((error) => note(error.message));
}

async function start() {
  scene = await request("scene.json");
  byId("report").hidden = !scene.report;
  if (scene.report) byId("report").href = scene.report;
  scene.notes.forEach(note);
  if (!document.createElement("canvas").getContext("webgl2")) {
    note("This browser has no WebGL 2, which the viewer needs. Turn on graphics acceleration or use another browser"
      + (scene.report ? "; the report (link above) works without it." : "."));
    byId("where").textContent = "";
    document.body.dataset.ready = "no";
    return;
  }
  const choices = [["labels", "labels"], ["jacobian", "volume change"]];
  for (const [value, words] of choices)
    if (SIDES.some((side) => overlays(side, value).length)) byId("overlay").add(new Option(words, value));
  await Promise.all(SIDES.filter((side) => scene.volumes[side]).map(open));
  byId("planes").parentElement.hidden = scene.dim !== 3;
  byId("planes").onchange = (event) => Object.values(panels).forEach((panel) => panel.setSliceType(Number(event.target.value)));
  byId("overlay").onchange = () => changeOverlay().catch((error) => note(error.message));
  byId("opacity").oninput = (event) => Object.values(panels).forEach((panel) =>
    panel.volumes.slice(1).forEach((_, n) => panel.setOpacity(n + 1, event.target.value / 100)));
  byId("controls").onsubmit = () => false;
  await changeOverlay();
  const first = panels.fixed ? "fixed" : "warped";
  await go(first, Array.from(panels[first].frac2mm([0.5, 0.5, 0.5], 0, true)));
  document.body.dataset.ready = "yes";
}

start().catch((error) => { note(error.message); document.body.dataset.ready = "no"; });
