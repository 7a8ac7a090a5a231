"use strict";
// Volumes are {shape, levels}: voxel (i, j, k) at i + nx (j + ny k). Points are unit coordinates: 0 and 1 are the first
// and last voxel centres. `data` is what the page contains; `state` is what the user has chosen.

/** By dimension, the layout of each plane: volume axes to the right, downwards and through it, which of the first two run
 * backwards, and the names of the edges. Axes run to the patient's right, front and head; radiological, the patient's
 * right is on the left. */
const PLANES = {
  2: [{ name: "image", axes: [0, 1, 2], flip: [false, false], edges: ["", "", "", ""] }],
  3: [
    { name: "axial", axes: [0, 1, 2], flip: [true, true], edges: ["R", "L", "A", "P"] },
    { name: "coronal", axes: [0, 2, 1], flip: [true, true], edges: ["R", "L", "S", "I"] },
    { name: "sagittal", axes: [1, 2, 0], flip: [true, true], edges: ["A", "P", "S", "I"] },
  ],
};

/** The levels of a volume from the RGBA pixels of its mosaic, `width` pixels wide. */
function unpack(pixels, width, volume) {
  const [nx, ny, nz] = volume.shape;
  const levels = new Uint8Array(nx * ny * nz);
  for (let k = 0, at = 0; k < nz; k++) {
    const left = (k % volume.columns) * nx, top = Math.floor(k / volume.columns) * ny;
    for (let j = 0; j < ny; j++)
      for (let i = 0; i < nx; i++) levels[at++] = pixels[4 * ((top + j) * width + left + i)];
  }
  return levels;
}

/** The transform's lattice from its text. */
function unpackMap(map, decode) {
  const bytes = Uint8Array.from(decode(map.values), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const values = new Float32Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) values[i] = view.getInt16(2 * i, true) / map.units;
  return values;
}

/** Linear interpolation at a unit point, clamped to the cube. */
function sample(values, shape, point, offset = 0) {
  const low = [0, 0, 0], part = [0, 0, 0];
  for (let a = 0; a < 3; a++) {
    const x = Math.min(Math.max(point[a], 0), 1) * (shape[a] - 1);
    low[a] = Math.min(Math.floor(x), Math.max(shape[a] - 2, 0));
    part[a] = x - low[a];
  }
  const strides = [1, shape[0], shape[0] * shape[1]];
  let total = 0;
  for (let corner = 0; corner < 8; corner++) {
    let weight = 1, at = offset;
    for (let a = 0; a < 3; a++) {
      const up = (corner >> a) & 1;
      weight *= up ? part[a] : 1 - part[a];
      at += strides[a] * Math.min(low[a] + up, shape[a] - 1);
    }
    if (weight) total += weight * values[at];
  }
  return total;
}

/** Where the transform takes a unit point of the fixed image: a unit point of the moving one. */
function transform(data, point) {
  const { shape, lattice } = data.map;
  const count = shape[0] * shape[1] * shape[2];
  return [0, 1, 2].map((a) => sample(lattice, shape, point, a * count));
}

function world(volume, point) {
  return volume.world.map((row) => row[0] * point[0] + row[1] * point[1] + row[2] * point[2] + row[3]);
}

/** Grey from 0 to 1 for each of the 256 levels. */
function greys(volume, windowName) {
  const [low, high] = volume.windows[windowName] || Object.values(volume.windows)[0];
  const table = new Float32Array(256);
  for (let level = 0, k = 1; level < 256; level++) {
    while (k < volume.knots.length - 1 && level > volume.knots[k][1]) k++;
    const [v0, l0] = volume.knots[k - 1], [v1, l1] = volume.knots[k];
    const value = v0 + ((level - l0) / (l1 - l0)) * (v1 - v0);
    table[level] = Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
  }
  return table;
}

/** Calls visit(pixel, index into the volume, unit point) for every pixel of a plane through `point`. */
function eachPixel(shape, plane, point, visit) {
  const [h, v, through] = plane.axes;
  const strides = [1, shape[0], shape[0] * shape[1]];
  const slice = Math.round(Math.min(Math.max(point[through], 0), 1) * (shape[through] - 1));
  const at = [0, 0, 0];
  at[through] = point[through];
  for (let y = 0, pixel = 0; y < shape[v]; y++) {
    const j = plane.flip[1] ? shape[v] - 1 - y : y;
    at[v] = j / Math.max(shape[v] - 1, 1);
    for (let x = 0; x < shape[h]; x++, pixel++) {
      const i = plane.flip[0] ? shape[h] - 1 - x : x;
      at[h] = i / Math.max(shape[h] - 1, 1);
      visit(pixel, slice * strides[through] + j * strides[v] + i * strides[h], at);
    }
  }
}

/** Blue where the first is darker, red where it is brighter, from −1 to 1. */
function diverging(t) {
  const s = Math.min(Math.abs(t), 1);
  return t > 0 ? [255, 255 * (1 - s), 255 * (1 - s)] : [255 * (1 - s), 255 * (1 - s) + 60 * s, 255];
}

/** Dark violet to yellow, from 0 to 1. */
function sequential(t) {
  const stops = [[48, 18, 90], [60, 80, 160], [30, 150, 140], [120, 200, 80], [250, 230, 40]];
  const x = Math.min(Math.max(t, 0), 1) * (stops.length - 1), k = Math.min(Math.floor(x), stops.length - 2);
  return [0, 1, 2].map((c) => stops[k][c] + (x - k) * (stops[k + 1][c] - stops[k][c]));
}

/** One panel as RGBA: `which` is "fixed", "moving", or the view in the middle. */
function render(data, plane, which, state) {
  const volume = which === "moving" ? data.moving : data.fixed;
  const point = which === "moving" ? transform(data, state.point) : state.point;
  const width = volume.shape[plane.axes[0]], height = volume.shape[plane.axes[1]];
  const rgba = new Uint8ClampedArray(4 * width * height).fill(255);
  const put = (pixel, r, g, b) => { rgba[4 * pixel] = r; rgba[4 * pixel + 1] = g; rgba[4 * pixel + 2] = b; };
  const grey = greys(volume, state.window), other = greys(data.warped, state.window);
  const outside = which === "moving" && plane.axes.some((a) => point[a] < 0 || point[a] > 1);
  const square = Math.max(4, Math.round(Math.max(width, height) / 9));
  const mix = state.mix / 100;
  const line = gridLines(data, plane);
  eachPixel(volume.shape, plane, point, (pixel, index, at) => {
    const f = grey[volume.levels[index]];
    if (which === "fixed" || which === "moving") {
      const dim = outside ? 0.45 : 1;
      return put(pixel, 255 * f * dim, 255 * f * dim, 255 * f * dim);
    }
    const beyond = transform(data, at).some((u, a) => data.moving.shape[a] > 1 && (u < 0 || u > 1));
    if (beyond && which !== "jacobian" && which !== "certainty") return put(pixel, 70 * f, 70 * f, 70 * f + 60);
    const w = beyond ? 0 : other[data.warped.levels[index]];
    if (which === "warped") return put(pixel, 255 * w, 255 * w, 255 * w);
    if (which === "blend") return put(pixel, 255 * (1 - mix) * f + 255 * mix * w, 255 * ((1 - mix) * 0.55 * f + mix * w), 255 * ((1 - mix) * 0.1 * f + mix * w));
    if (which === "checkerboard") {
      const even = (Math.floor((pixel % width) / square) + Math.floor(Math.floor(pixel / width) / square)) % 2 === 0;
      return even ? put(pixel, 255 * f, 255 * f, 255 * f) : put(pixel, 255 * w, 235 * w, 190 * w);
    }
    if (which === "difference") return put(pixel, ...diverging(w - f));
    if (which === "grid") {
      const on = line(at);
      return put(pixel, 255 * w * (1 - on) + 90 * on, 255 * w * (1 - on) + 220 * on, 255 * w * (1 - on) + 255 * on);
    }
    const map = data[which];
    const level = sample(map.levels, map.shape, at);
    if (which === "jacobian") {
      if (nearest(map, at) === 0) return put(pixel, 255, 0, 220);
      const [r, g, b] = diverging((level - 128) / 127);
      return put(pixel, (0.35 + 0.65 * w) * r, (0.35 + 0.65 * w) * g, (0.35 + 0.65 * w) * b);
    }
    const [r, g, b] = sequential(level / 255);
    put(pixel, (0.4 + 0.6 * f) * r, (0.4 + 0.6 * f) * g, (0.4 + 0.6 * f) * b);
  });
  return { width, height, rgba };
}

function nearest(map, at) {
  const [i, j, k] = at.map((x, a) => Math.round(Math.min(Math.max(x, 0), 1) * (map.shape[a] - 1)));
  return map.levels[i + map.shape[0] * (j + map.shape[1] * k)];
}

/** How close a point is to a line of the moving image's grid, deformed by the transform: 0 (off) to 1 (on). */
function gridLines(data, plane, lines = 16) {
  const axes = plane.axes.slice(0, 2);
  const step = axes.map((a) => 0.5 / Math.max(data.fixed.shape[a] - 1, 1));
  const longest = Math.max(...axes.map((a) => data.moving.shape[a] * data.moving.spacing[a]));
  const count = axes.map((a) => (lines * data.moving.shape[a] * data.moving.spacing[a]) / longest);
  return (at) => {
    const ends = axes.map((a, n) => [-1, 1].map((sign) => { const p = at.slice(); p[a] += sign * step[n]; return transform(data, p); }));
    const here = transform(data, at);
    let on = 0;
    axes.forEach((a, n) => {
      const phase = here[a] * count[n];
      const off = Math.abs(phase - Math.round(phase));
      const slope = Math.hypot(...ends.map(([low, high]) => (high[a] - low[a]) * count[n]));
      on = Math.max(on, Math.min(Math.max(1 - off / Math.max(slope, 1e-6) + 0.2, 0), 1));
    });
    return on;
  };
}

/** Where a unit point is in a panel, as fractions of its width and height; and back. Voxels are pixels: their centres
 * lie half a pixel inside. */
function onScreen(volume, plane, point) {
  return [0, 1].map((n) => {
    const a = plane.axes[n], along = plane.flip[n] ? 1 - point[a] : point[a];
    return (along * (volume.shape[a] - 1) + 0.5) / volume.shape[a];
  });
}
function fromScreen(volume, plane, point, x, y) {
  const moved = point.slice();
  [x, y].forEach((value, n) => {
    const a = plane.axes[n];
    const along = Math.min(Math.max((value * volume.shape[a] - 0.5) / Math.max(volume.shape[a] - 1, 1), 0), 1);
    moved[a] = plane.flip[n] ? 1 - along : along;
  });
  return moved;
}

// ---- the page -------------------------------------------------------------------------------------------------------

const VIEWS = {
  warped: "moving, warped", blend: "blend", checkerboard: "checkerboard", difference: "difference",
  grid: "deformation grid", jacobian: "volume change", certainty: "certainty",
};

function gradient(colour) {
  const stops = Array.from({ length: 9 }, (_, k) => `rgb(${colour(k / 8).map(Math.round)})`);
  return `<span class="scale" style="background:linear-gradient(90deg,${stops})"></span>`;
}

function legend(data, view) {
  if (view === "difference") return `warped darker ${gradient((t) => diverging(2 * t - 1))} warped brighter`;
  if (view === "jacobian") {
    const most = 2 ** data.jacobian.doublings;
    return `volume × ${1 / most} ${gradient((t) => diverging(2 * t - 1))} × ${most}; folds are magenta`;
  }
  if (view === "certainty") return `attention spread over ${data.certainty.low.toPrecision(3)} mm ${gradient(sequential)} ${data.certainty.high.toPrecision(3)} mm`;
  if (view === "checkerboard") return "fixed in grey, warped tinted";
  if (view === "blend") return "fixed in orange, warped in grey";
  if (view === "grid") return "a regular grid of the moving image, deformed by the transform";
  return "";
}

async function load(volume) {
  const picture = new Image();
  picture.src = volume.png;
  await picture.decode();
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [picture.naturalWidth, picture.naturalHeight];
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(picture, 0, 0);
  volume.levels = unpack(context.getImageData(0, 0, canvas.width, canvas.height).data, canvas.width, volume);
  delete volume.png;
}

async function start() {
  const data = JSON.parse(document.getElementById("data").textContent);
  await Promise.all(["fixed", "warped", "moving", "jacobian", "certainty"].filter((n) => data[n]).map((n) => load(data[n])));
  data.map.lattice = unpackMap(data.map, atob);
  const state = { point: [0.5, 0.5, 0.5], view: "warped", window: Object.keys(data.fixed.windows)[0], mix: 50 };
  const byId = (id) => document.getElementById(id);
  const options = (select, entries) => { for (const [value, words] of entries) select.add(new Option(words, value)); };
  options(byId("view"), Object.entries(VIEWS).filter(([name]) => !(name === "certainty" && !data.certainty)));
  options(byId("window"), Object.keys(data.fixed.windows).map((name) => [name, name]));

  const panels = [];
  for (const plane of PLANES[data.dim]) {
    const section = document.createElement("div");
    section.className = "plane";
    const label = document.createElement("label"), slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: data.fixed.shape[plane.axes[2]] - 1, step: 1 });
    const name = document.createElement("span"), position = document.createElement("output");
    [name.className, name.textContent] = ["name", plane.name];
    label.append(name, slider, position);
    label.hidden = data.fixed.shape[plane.axes[2]] < 2;
    slider.oninput = () => { state.point[plane.axes[2]] = slider.value / Math.max(slider.max, 1); draw(); };
    const row = document.createElement("div");
    row.className = "panels";
    for (const which of ["fixed", "middle", "moving"]) {
      const figure = document.createElement("figure"), canvas = document.createElement("canvas");
      const caption = document.createElement("figcaption"), cross = document.createElement("span");
      cross.className = "cross";
      figure.append(canvas, cross, caption);
      plane.edges.forEach((letter, n) => {
        const mark = document.createElement("span");
        mark.className = `edge e${n}`;
        mark.textContent = letter;
        figure.append(mark);
      });
      if (which !== "moving") canvas.onclick = (event) => {
        const box = canvas.getBoundingClientRect();
        state.point = fromScreen(data.fixed, plane, state.point, (event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height);
        draw();
      };
      row.append(figure);
      panels.push({ plane, which, canvas, cross, caption, slider, position });
    }
    section.append(row, label);
    byId("planes").append(section);
  }

  function paint({ plane, which, canvas, cross, caption, slider, position }) {
    const picture = render(data, plane, which === "middle" ? state.view : which, state);
    const volume = which === "moving" ? data.moving : data.fixed;
    const [sx, sy] = [volume.spacing[plane.axes[0]], volume.spacing[plane.axes[1]]];
    [canvas.width, canvas.height] = [picture.width, picture.height];
    const ratio = (picture.width * sx) / (picture.height * sy);
    canvas.style.aspectRatio = ratio;
    canvas.parentElement.style.maxWidth = `${85 * ratio}vh`;  // a whole body still fits the window
    canvas.getContext("2d").putImageData(new ImageData(picture.rgba, picture.width, picture.height), 0, 0);
    const point = which === "moving" ? transform(data, state.point) : state.point;
    const [x, y] = onScreen(volume, plane, point);
    [cross.style.left, cross.style.top] = [`${100 * x}%`, `${100 * y}%`];
    caption.textContent = which === "middle" ? VIEWS[state.view] : which;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${plane.name}: ${caption.textContent}`);
    slider.value = Math.round(state.point[plane.axes[2]] * slider.max);
    position.textContent = `${Number(slider.value) + 1} of ${Number(slider.max) + 1}`;
  }

  let waiting = false;
  function draw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      panels.forEach(paint);
      const moved = transform(data, state.point);
      const show = (numbers) => numbers.slice(0, data.dim).map((n) => n.toFixed(1)).join(", ");
      byId("where").textContent = `fixed ${show(world(data.fixed, state.point))} mm → moving ${show(world(data.moving, moved))} mm`
        + (moved.some((u) => u < 0 || u > 1) ? ", outside the moving image" : "");
      byId("legend").innerHTML = legend(data, state.view);
      byId("mixing").hidden = state.view !== "blend";
    });
  }
  byId("view").onchange = (event) => { state.view = event.target.value; draw(); };
  byId("window").onchange = (event) => { state.window = event.target.value; draw(); };
  byId("mix").oninput = (event) => { state.mix = Number(event.target.value); draw(); };
  byId("sides").textContent = data.dim === 3
    ? "Radiological: the patient's right (R) is on the left. Blue: outside the moving image. Click a point to go there; the moving image follows. Positions are in millimetres, RAS."
    : "The header of a 2-D image does not define left and right. Blue: outside the moving image. Click a point to go there; the moving image follows.";
  draw();
  document.body.dataset.ready = "yes";
}

if (typeof document !== "undefined") start();
else module.exports = { PLANES, unpack, unpackMap, sample, transform, world, greys, render, onScreen, fromScreen };
