"use strict";
// NiiVue panels. Fixed and warped share a space and show the same point; the moving image shows its match, which the
// server computes with the transform itself. Positions are RAS millimetres, as in NiiVue, and LPS where the server
// takes them.

const SIDES = ["fixed", "warped", "moving"];
const TITLES = { fixed: "fixed", warped: "moving, warped", moving: "moving" };
const SIGNS = { RAS: [1, 1, 1], LPS: [-1, -1, 1] };
const byId = (id) => document.getElementById(id);
const panels = {};  // by side: NiiVue's objects
const at = {};  // "fixed" and "moving": the points that are shown
const pairs = [];  // {fixed, moving, offset}
let scene, latest = 0, frame = "RAS", flick = false, pointed = null;
const level = { shift: 0, stretch: 1 };  // of every image's usual window

async function request(address, value) {
  const options = value === undefined ? {} : { method: "POST", body: JSON.stringify(value), headers: { "X-Carl-Token": scene.token } };
  const response = await fetch(address, options).catch(() => { throw new Error("The program does not answer. Is carl still running?"); });
  if (!response.ok) throw new Error((await response.text()).trim());
  return response.json();
}

function note(text) {
  if (Array.from(byId("notes").children).some((line) => line.textContent === text)) return;
  const line = document.createElement("p");
  line.className = "note";
  line.setAttribute("role", "alert");
  line.textContent = text;
  byId("notes").append(line);
}

const careful = (action) => (...values) => Promise.resolve(action(...values)).catch((error) => note(error.message));

/** Colours of labels, the same as in the report: red, green and blue from 0 to 255. */
function labelColour(number) {
  const hue = (number * 137.508) % 360, [s, l] = [[0.95, 0.62], [0.75, 0.72], [0.9, 0.52]][number % 3];
  const part = (n) => { const k = (n + hue / 30) % 12; return Math.round(255 * (l - s * Math.min(l, 1 - l) * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
  return [part(0), part(8), part(4)];
}

/** NiiVue's table of colours for labels. It raises whatever is above the table's lower end to 1/128 of its width at
 * least, which in a long table is the colour of a label: so transparent entries precede the background. */
function labelTable(labels, most) {
  const known = labels.filter((label) => label <= most), last = Math.max(...known, 1), before = Math.ceil(last / 100) + 1;
  const table = { R: [], G: [], B: [], A: [], I: [], labels: [] };
  const add = (index, [r, g, b], alpha, name) => { table.R.push(r); table.G.push(g); table.B.push(b); table.A.push(alpha); table.I.push(index); table.labels.push(name); };
  for (let index = -before; index <= 0; index++) add(index, [0, 0, 0], 0, "");
  for (const label of known) add(label, labelColour(label), 255, scene.label_names[label] || String(label));
  return table;
}

/** The volumes drawn over a side's image for an overlay. */
function overlays(side, choice) {
  if (choice === "labels") return [`${side}_labels`].filter((name) => scene.volumes[name]);
  if (side === "moving") return [];
  return { jacobian: ["jacobian", "folds"], error: ["expected_error"] }[choice] || [];
}

async function show(side, name, opacity) {
  const { window, labels } = scene.volumes[name];
  const options = { url: `${name}.nii`, name: `${name}.nii`, opacity, colormap: "gray" };
  if (window) [options.cal_min, options.cal_max] = window;
  if (name === "expected_error") options.colormap = "inferno";
  if (name === "jacobian") Object.assign(options, { colormap: "red", colormapNegative: "blue" });
  const panel = panels[side], volume = await panel.addVolumeFromUrl(options);
  if (labels) {
    const table = name === "folds" ? { R: [0, 255], G: [0, 0], B: [0, 220], A: [0, 255], I: [0, 1] }
      : labelTable(labels, panel.gl.getParameter(panel.gl.MAX_TEXTURE_SIZE) - 200);
    volume.setColormapLabel(table);
    panel.updateGLVolume();
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
    + "Click, drag or scroll: the other images show the matching point. Right-drag: window and level. Escape: reset them."
    + (choice === "jacobian" ? " Red: the moving image has up to 4 times the volume; blue: down to a quarter; magenta: folds." : "")
    + (choice === "error" ? ` Expected error: dark 0 mm, yellow ≥ ${scene.volumes.expected_error.window[1]} mm.` : "");
}

// ---- positions ------------------------------------------------------------------------------------------------------

const text = (point) => point.slice(0, scene.dim).map((x, a) => (scene.dim === 3 ? x * SIGNS[frame][a] : x).toFixed(1)).join(", ");
const lps = (point) => point.map((x, a) => x * SIGNS.LPS[a]);

function place(side, ras) {
  const panel = panels[side];
  if (!panel) return;
  panel.scene.crosshairPos = Array.from(panel.mm2frac(ras, 0, true), (x) => Math.min(Math.max(x, 0), 1));
  panel.drawScene();
}

function describe(inside = true) {
  byId("where").textContent = `fixed ${text(at.fixed)} mm → moving ${text(at.moving)} mm` + (inside ? "" : ", outside the moving image");
  byId("frame").textContent = frame;
  document.body.dataset.shown = latest;
}

const match = (start, ras) => request(`match.json?frame=ras&from=${start}&point=${ras.slice(0, 3).join(",")}`);

/** Show a point chosen on one side on all sides; while the user corrects the match, the fixed side stays. */
async function go(from, mm) {
  const turn = ++latest, ras = mm.slice(0, 3);
  if (from === "moving" && !byId("guide").hidden) {
    at.moving = ras;
    describe();
    return measure();
  }
  const found = await match(from === "moving" ? "moving" : "fixed", ras);
  if (turn !== latest) return;  // the user has moved on
  [at.fixed, at.moving] = [found.fixed.ras, found.moving.ras];
  for (const side of Object.keys(panels)) if (side !== from) place(side, at[side === "moving" ? "moving" : "fixed"]);
  describe(found.inside !== false);
  if (!byId("guide").hidden) await measure();
}

/** The value and the label under the mouse. */
let asking = false;
async function hover(side, event) {
  const panel = panels[side], scale = panel.uiData.dpr || 1, box = panel.canvas.getBoundingClientRect();
  const fraction = panel.canvasPos2frac([(event.clientX - box.left) * scale, (event.clientY - box.top) * scale]);
  pointed = { side, x: (event.clientX - box.left) * scale, y: (event.clientY - box.top) * scale };
  if (fraction[0] < 0) { byId("under").textContent = ""; return; }
  if (asking) return;
  asking = true;
  try {
    const mm = Array.from(panel.frac2mm(fraction, 0, true)).slice(0, 3);
    const found = await request(`at.json?side=${side}&frame=ras&point=${mm.join(",")}`);
    const value = found.value === null ? "" : `: ${Number(found.value.toPrecision(4))}`;
    const error = Number.isFinite(found.expected_error_mm) ? `, expected error ${found.expected_error_mm.toFixed(1)} mm` : "";
    byId("under").textContent = `${TITLES[side]}${value}${found.label ? `, ${found.label}` : ""}${error}`;
  } finally { asking = false; }
}

// ---- what is seen ---------------------------------------------------------------------------------------------------

/** Millimetres of a panel's image along x, y and z. */
const sizeOf = (panel) => { const { dimsRAS, pixDimsRAS } = panel.volumes[0]; return [1, 2, 3].map((n) => dimsRAS[n] * pixDimsRAS[n]); };

/** How NiiVue fills a panel: millimetres across and down, and the pixels between planes. Layouts are its own for three
 * planes, and 0 for a single one. */
function fitted(panel, layout, plane) {
  const [x, y, z] = sizeOf(panel), gap = panel.opts.tileMargin;
  const planes = [[[x, y], [x, z], [y, z]][plane], [Math.max(x, y), y + 2 * z], [x + y, y + z], [2 * x + y, Math.max(y, z)]];
  return { mm: planes[layout], gaps: [[0, 0], [gap, 3 * gap], [2 * gap, 2 * gap], [3 * gap, gap]][layout] };
}

/** Pixels of a millimetre in a panel of this size. */
function scaleOf(panel, size, layout, plane) {
  const { mm, gaps } = fitted(panel, layout, plane);
  return Math.min(...size.map((pixels, n) => (pixels - gaps[n]) / mm[n]));
}

/** Arrange the panels, and the planes in them, so that the images are as large as possible, all at the same scale. */
function arrange() {
  const chosen = byId("shown").value.split(" ");
  for (const [side, panel] of Object.entries(panels)) panel.figure.hidden = !chosen.includes(side);
  const shown = Object.keys(panels).filter((side) => chosen.includes(side)).map((side) => panels[side]);
  const { clientWidth: width, clientHeight: height } = byId("panels"), all = byId("planes").value === "3" && scene.dim === 3;
  const plane = all || scene.dim === 2 ? 0 : Number(byId("planes").value);
  /** The arrangement of the planes that suits all panels best, the same in each, and the smallest scale it gives. */
  const fit = (...size) => (all ? [1, 2, 3] : [0])
    .map((layout) => [Math.min(...shown.map((panel) => scaleOf(panel, size, layout, plane))), layout])
    .reduce((best, one) => (one[0] > best[0] ? one : best));
  const narrow = innerWidth <= 640, count = shown.length || 1;
  const rows = !narrow && fit(width, height / count)[0] > fit(width / count, height)[0];
  byId("panels").classList.toggle("rows", rows);
  if (!shown.length) return;
  const sizes = shown.map(({ figure }) => [figure.clientWidth, figure.clientHeight]);
  const room = [0, 1].map((n) => Math.min(...sizes.map((size) => size[n])));
  const [scale, layout] = fit(...room);
  shown.forEach((panel, k) => {
    // NiiVue fills its canvas: one that is as much smaller as its image would be larger gives the common scale.
    const { gaps } = fitted(panel, layout, plane), part = scale / scaleOf(panel, room, layout, plane);
    const free = room.map((pixels, n) => sizes[k][n] - gaps[n] - (pixels - gaps[n]) * part);
    panel.box.style.inset = `${free[1] / 2}px ${free[0] / 2}px`;
    panel.opts.multiplanarLayout = layout;
    panel.opts.crosshairWidth = 1.5 / scale;  // pixels
    if (panel.crosshairs3D) panel.crosshairs3D.mm = [];  // NiiVue keeps its lines until the crosshair moves
    panel.resizeListener();
    panel.drawScene();
  });
}

/** What lies over NiiVue's picture: the mixture of two images, and the points of pairs. */
function paintOver(side) {
  const panel = panels[side], mode = byId("middle").value;
  if (!panel || !panel.over) return;
  const { over, canvas } = panel, context = over.getContext("2d");
  [over.width, over.height] = [canvas.width, canvas.height];
  if (side === "warped" && mode !== "warped" && panels.fixed) mix(context, mode);
  pairs.forEach((pair, n) => mark(panel, context, pair[side === "moving" ? "moving" : "fixed"], n + 1));
}

/** Mix the pictures of the fixed and the warped panel, which show the same place at the same size. */
function mix(context, mode) {
  const { width, height } = context.canvas;
  const picture = (side) => { panels[side].drawPlain(); return panels[side].canvas; };
  const tinted = (side, colour) => {
    const sheet = document.createElement("canvas");
    [sheet.width, sheet.height] = [width, height];
    const brush = sheet.getContext("2d");
    brush.drawImage(picture(side), 0, 0, width, height);
    brush.globalCompositeOperation = "multiply";
    brush.fillStyle = colour;
    brush.fillRect(0, 0, width, height);
    return sheet;
  };
  if (mode === "flicker") return flick && context.drawImage(picture("fixed"), 0, 0, width, height);
  if (mode === "blend") {
    context.drawImage(tinted("fixed", "#00ff00"), 0, 0);
    context.globalCompositeOperation = "lighter";
    context.drawImage(tinted("warped", "#ff00ff"), 0, 0);
  } else if (mode === "difference") {
    context.drawImage(picture("fixed"), 0, 0, width, height);
    context.globalCompositeOperation = "difference";
    const { opts } = panels.warped, { crosshairWidth, isOrientationTextVisible } = opts;
    Object.assign(opts, { crosshairWidth: 0, isOrientationTextVisible: false });  // those of the fixed image stay
    context.drawImage(picture("warped"), 0, 0, width, height);
    Object.assign(opts, { crosshairWidth, isOrientationTextVisible });
  } else {
    const square = Math.max(Math.round(height / 24), 16);
    context.drawImage(tinted("warped", "#ffebbf"), 0, 0);
    context.save();
    context.beginPath();
    for (let y = 0, row = 0; y < height; y += square, row++)
      for (let x = (row % 2) * square; x < width; x += 2 * square) context.rect(x, y, square, square);
    context.clip();
    context.drawImage(picture("fixed"), 0, 0, width, height);
    context.restore();
  }
  context.globalCompositeOperation = "source-over";
}

/** A numbered ring at a point, in the planes that pass near it. */
function mark(panel, context, ras, number) {
  const plane = [[0, 1, 2], [0, 2, 1], [1, 2, 0]], here = Array.from(panel.frac2mm(panel.scene.crosshairPos, 0, true));
  for (const slice of panel.screenSlices) {
    if (slice.axCorSag > 2) continue;
    const [h, v, through] = plane[slice.axCorSag], [left, top, width, height] = slice.leftTopWidthHeight;
    if (Math.abs(ras[through] - here[through]) > 4 && scene.dim === 3) continue;
    const across = (ras[h] - slice.leftTopMM[0]) / slice.fovMM[0], down = 1 - (ras[v] - slice.leftTopMM[1]) / slice.fovMM[1];
    const x = left + across * width, y = top + down * height;
    context.strokeStyle = context.fillStyle = "#4dff88";
    context.lineWidth = 2;
    context.beginPath();
    context.arc(x, y, 6, 0, 2 * Math.PI);
    context.stroke();
    context.font = "14px system-ui, sans-serif";
    context.fillText(number, x + 8, y - 6);
  }
}

/** Draw a panel, then what lies over it, and what depends on it. */
function watchDrawing(side) {
  const panel = panels[side];
  panel.drawPlain = panel.drawScene.bind(panel);
  panel.drawScene = () => {
    const drawn = panel.drawPlain();
    paintOver(side);
    if (side === "fixed" && panels.warped && byId("middle").value !== "warped") paintOver("warped");
    return drawn;
  };
}

// Every image has a usual window; the user shifts and stretches all of them alike.
function applyLevel() {
  for (const panel of Object.values(panels)) {
    const volume = panel.volumes[0], { usual } = panel;
    const middle = (usual[0] + usual[1]) / 2 + level.shift * (usual[1] - usual[0]), half = (level.stretch * (usual[1] - usual[0])) / 2;
    [volume.cal_min, volume.cal_max] = [middle - half, middle + half];
    panel.updateGLVolume();
  }
  showLevel();
}
function showLevel() {
  const { cal_min: low, cal_max: high } = panels[Object.keys(panels)[0]].volumes[0];
  byId("level").value = Number(((low + high) / 2).toPrecision(4));
  byId("width").value = Number((high - low).toPrecision(4));
}
/** A drag with the right button changes the window and level of all images, as a plain one does in the report. */
function listenForLevel(canvas) {
  let drag = null, waiting = false;
  canvas.addEventListener("contextmenu", (event) => event.preventDefault());
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 2) return;
    drag = { x: event.clientX, y: event.clientY, ...level };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!drag) return;
    level.shift = drag.shift + (event.clientY - drag.y) / 300;
    level.stretch = Math.max(drag.stretch * Math.exp((event.clientX - drag.x) / 200), 1e-2);
    if (!waiting) requestAnimationFrame(() => { waiting = false; applyLevel(); });
    waiting = true;
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => { drag = null; });
}
function setLevel(low, high, usual) {
  level.shift = ((low + high) / 2 - (usual[0] + usual[1]) / 2) / (usual[1] - usual[0] || 1);
  level.stretch = Math.max((high - low) / (usual[1] - usual[0] || 1), 1e-3);
  applyLevel();
}

// ---- corrections by hand --------------------------------------------------------------------------------------------

async function measure() {
  const found = await match("fixed", at.fixed);
  const offset = Math.hypot(...found.moving.ras.map((x, a) => x - at.moving[a]));
  byId("offset").textContent = `${offset.toFixed(1)} mm from the present match`;
  return offset;
}

function listPairs() {
  byId("pairs").replaceChildren(...pairs.map((pair, n) => {
    const item = document.createElement("li"), words = document.createElement("span"), remove = document.createElement("button");
    words.textContent = `${text(pair.fixed)} → ${text(pair.moving)} mm${scene.dim === 3 ? ` ${frame}` : ""}, ${pair.offset.toFixed(1)} mm from the match`;
    words.onclick = () => { Object.assign(at, { fixed: pair.fixed, moving: pair.moving }); ["fixed", "warped", "moving"].forEach((side) => place(side, at[side === "moving" ? "moving" : "fixed"])); latest++; describe(); };
    remove.type = "button";
    remove.textContent = "delete";
    remove.onclick = () => { pairs.splice(n, 1); listPairs(); };
    item.append(words, remove);
    return item;
  }));
  byId("save").disabled = byId("again").disabled = !pairs.length;
  Object.values(panels).forEach((panel) => panel.drawScene());
}

const sent = () => ({ pairs: pairs.map((pair) => [...lps(pair.fixed), ...lps(pair.moving)]) });

async function follow() {
  const job = await request("job.json");
  if (job.state === "none") return location.reload();  // another tab has shown the result
  byId("job").hidden = job.state !== "running";
  byId("again").disabled = job.state === "running" || !pairs.length;
  byId("progress").value = job.percent;
  byId("phase").textContent = `${job.phase}, ${job.percent} %, ${job.seconds} s`;
  if (job.state === "running") return setTimeout(careful(follow), 500);
  if (job.state === "failed") throw new Error(job.message);
  if (job.state === "cancelled") { byId("saved").textContent = "cancelled"; return; }
  await request("show", {});
  location.reload();
}

/** List the pairs that guided this result, so that a further correction keeps them. */
async function recall() {
  for (const row of scene.guide) {
    const [fixed, moving] = [lps(row.slice(0, 3)), lps(row.slice(3))], found = await match("fixed", fixed);
    pairs.push({ fixed, moving, offset: Math.hypot(...found.moving.ras.map((x, a) => x - moving[a])) });
  }
  if (pairs.length) listPairs();
}

function buildGuide() {
  byId("correct").onclick = () => {
    const hidden = byId("guide").hidden = !byId("guide").hidden;
    byId("correct").setAttribute("aria-expanded", String(!hidden));
    arrange();
    if (!hidden) return measure();
    return go("fixed", at.fixed);
  };
  byId("add").onclick = careful(async () => { pairs.push({ fixed: at.fixed, moving: at.moving, offset: await measure() }); listPairs(); });
  byId("save").onclick = careful(async () => { byId("saved").textContent = `saved as ${(await request("points", sent())).path}`; });
  byId("again").onclick = careful(async () => { byId("notes").replaceChildren(); await request("guide", sent()); await follow(); });
  byId("cancel").onclick = careful(() => request("cancel", {}));
  byId("correct").hidden = !(panels.fixed && panels.moving);
}

// ---- the page -------------------------------------------------------------------------------------------------------

async function open(side) {
  const figure = document.createElement("figure"), box = document.createElement("div");
  const caption = document.createElement("figcaption"), canvas = document.createElement("canvas"), over = document.createElement("canvas");
  caption.textContent = TITLES[side] + (side === "warped" ? "" : `: ${scene.names[side]}`);
  over.className = "over";
  box.append(canvas, over);
  figure.append(caption, box);
  byId("panels").append(figure);
  const panel = panels[side] = new niivue.Niivue({
    backColor: [0, 0, 0, 1], crosshairColor: [1, 0.89, 0.54, 0.9], crosshairGap: 4, crosshairWidth: 1, crosshairWidthUnit: "mm", fontColor: [1, 0.89, 0.54, 1],
    dragAndDropEnabled: false, isRadiologicalConvention: scene.dim === 3, sagittalNoseLeft: true, dragMode: 0,
    multiplanarLayout: 1, multiplanarShowRender: 0, multiplanarEqualSize: false, tileMargin: 2, logLevel: "error",
    isOrientationTextVisible: scene.dim === 3, showAllOrientationMarkers: true, sliceType: scene.dim === 3 ? 3 : 0,
  });
  Object.assign(panel, { figure, box, caption, over });
  // NiiVue takes this opaque context: mixtures copied from a transparent one would have crosshairs of other colours.
  canvas.getContext("webgl2", { alpha: false, antialias: navigator.hardwareConcurrency > 6 });
  await panel.attachToCanvas(canvas);
  await show(side, side, 1);
  panel.usual = [panel.volumes[0].cal_min, panel.volumes[0].cal_max];
  watchDrawing(side);
  panel.onLocationChange = careful(({ mm }) => go(side, Array.from(mm)));
  panel.onIntensityChange = (volume) => { if (volume === panel.volumes[0]) setLevel(volume.cal_min, volume.cal_max, panel.usual); };
  canvas.addEventListener("mousemove", careful((event) => hover(side, event)));
  listenForLevel(canvas);
}

/** Arrow keys move the slice of the plane under the mouse; Escape restores the usual windows. */
function press(event) {
  if (event.key === "Escape") {
    Object.assign(level, { shift: 0, stretch: 1 });
    return applyLevel();
  }
  const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1 }[event.key];
  if (!by || !pointed || event.target.matches("input, select")) return;
  const panel = panels[pointed.side], slice = panel.screenSlices.find(({ leftTopWidthHeight: [x, y, w, h] }) =>
    pointed.x >= Math.min(x, x + w) && pointed.x <= Math.max(x, x + w) && pointed.y >= y && pointed.y <= y + h);
  if (!slice || slice.axCorSag > 2) return;
  const step = [0, 0, 0];
  step[[2, 1, 0][slice.axCorSag]] = by;
  panel.moveCrosshairInVox(...step);
  event.preventDefault();
}

function buildControls() {
  for (const [value, words] of [["labels", "labels"], ["jacobian", "volume change"], ["error", "expected error"]])
    if (SIDES.some((side) => overlays(side, value).some((name) => scene.volumes[name]))) byId("overlay").add(new Option(words, value));
  byId("planes").parentElement.hidden = byId("frame").hidden = scene.dim !== 3;
  byId("planes").onchange = (event) => { Object.values(panels).forEach((panel) => panel.setSliceType(Number(event.target.value))); arrange(); };
  byId("shown").onchange = arrange;
  byId("middle").disabled = !panels.fixed;
  byId("middle").onchange = () => {
    const words = byId("middle").selectedOptions[0].textContent;
    panels.warped.caption.textContent = { warped: TITLES.warped, blend: "blend: fixed green, warped magenta", checkerboard: "checkerboard: fixed grey, warped tinted", difference: "difference of fixed and warped" }[byId("middle").value] || words;
    panels.warped.drawScene();
  };
  setInterval(() => {
    if (byId("middle").value !== "flicker") return;
    flick = !flick;
    panels.warped.caption.textContent = `flicker: ${flick ? "fixed" : "warped"}`;
    paintOver("warped");
  }, 600);
  byId("overlay").onchange = careful(changeOverlay);
  byId("opacity").oninput = (event) => Object.values(panels).forEach((panel) =>
    panel.volumes.slice(1).forEach((_, n) => panel.setOpacity(n + 1, event.target.value / 100)));
  byId("level").onchange = byId("width").onchange = () => {
    const [middle, width] = [Number(byId("level").value), Number(byId("width").value)];
    if (width > 0) setLevel(middle - width / 2, middle + width / 2, panels[Object.keys(panels)[0]].usual);
  };
  byId("frame").onclick = () => { frame = frame === "RAS" ? "LPS" : "RAS"; describe(); listPairs(); };
  byId("frame").title = "Millimetres along right, anterior, superior (RAS, as in NIfTI) or left, posterior, superior (LPS, as in ITK and DICOM). Click to switch.";
  byId("controls").onsubmit = () => false;
  byId("versions").hidden = scene.results.length < 2;
  scene.results.forEach((name, n) => byId("result").add(new Option(name, n, false, n === scene.results.length - 1)));
  byId("result").onchange = careful(async (event) => { await request("show", { result: Number(event.target.value) }); location.reload(); });
  byId("files").replaceChildren(...scene.files.map((name) => {
    const item = document.createElement("li"), link = document.createElement("a");
    [link.href, link.textContent, link.download] = [`files/${name}`, name, name];
    item.append(link);
    return item;
  }));
  byId("download").hidden = !scene.files.length;
  document.addEventListener("keydown", press);
  new ResizeObserver(arrange).observe(byId("panels"));
}

function describeConfidence() {
  const { confidence } = scene;
  if (!confidence) return;
  const words = { good: "Good", doubtful: "Doubtful: look before you use it", failed: "Failed: do not use it", unknown: "Not judged" };
  const parts = [words[confidence.verdict] || "Not judged"];
  if (Number.isFinite(confidence.expected_error_mm)) parts.push(`expected error ${confidence.expected_error_mm.toFixed(1)} mm`);
  byId("confidence").hidden = false;
  byId("confidence").className = words[confidence.verdict] ? confidence.verdict : "unknown";
  byId("confidence").textContent = parts.concat(confidence.reasons || []).join(" · ");
}

async function start() {
  scene = await request("scene.json");
  document.title = `${scene.folder} · carl view`;
  byId("home").hidden = !scene.home;
  byId("report").hidden = !scene.report;
  if (scene.report) byId("report").href = scene.report;
  scene.notes.forEach(note);
  describeConfidence();
  if (!document.createElement("canvas").getContext("webgl2")) {
    note("This browser has no WebGL 2, which the viewer needs. Turn on graphics acceleration or use another browser"
      + (scene.report ? "; the report (link above) works without it." : "."));
    byId("where").textContent = "";
    document.body.dataset.ready = "no";
    return;
  }
  const sides = SIDES.filter((side) => scene.volumes[side]);
  await Promise.all(sides.map(open));
  byId("panels").append(...sides.map((side) => panels[side].figure));
  buildControls();
  buildGuide();
  showLevel();
  await changeOverlay();
  arrange();
  const first = panels.fixed ? "fixed" : "warped";
  await go(first, Array.from(panels[first].frac2mm([0.5, 0.5, 0.5], 0, true)));
  await recall();
  if (scene.correcting) {
    await byId("correct").onclick();
    await careful(follow)();
  }
  document.body.dataset.ready = "yes";
}

start().catch((error) => { note(error.message); document.body.dataset.ready = "no"; });
