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

/** The transform's lattice from its bytes: sums of the differences along x, y and z, modulo 2¹⁶. */
function unpackMap(map, bytes) {
  const [nx, ny, nz] = map.shape, count = nx * ny * nz, all = 3 * count, steps = new Int16Array(all);
  for (let i = 0; i < all; i++) steps[i] = bytes[i] | (bytes[all + i] << 8);
  for (const [stride, length] of [[1, nx], [nx, ny], [nx * ny, nz]])
    for (let i = stride; i < all; i++) if (Math.floor(i / stride) % length) steps[i] += steps[i - stride];
  return Float32Array.from(steps, (step, i) => step / map.units[Math.floor(i / count)]);
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

/** The moving image's unit point that the map takes nearest to, as a unit point of the fixed image, and how many mm are
 * between the two: the nearest point of the lattice, then Newton's method. */
function invert(data, target) {
  const { shape, lattice } = data.map;
  const count = shape[0] * shape[1] * shape[2];
  const axes = [0, 1, 2].slice(0, data.dim);
  const size = axes.map((a) => (data.moving.shape[a] - 1) * data.moving.spacing[a]);
  const miss = (values) => Math.hypot(...axes.map((a) => (values[a] - target[a]) * size[a]));
  let nearest = 0, least = Infinity;
  for (let n = 0; n < count; n++) {
    let distance = 0;
    for (let a = 0; a < data.dim; a++) distance += ((lattice[n + a * count] - target[a]) * size[a]) ** 2;
    if (distance < least) [nearest, least] = [n, distance];
  }
  const place = [nearest % shape[0], Math.floor(nearest / shape[0]) % shape[1], Math.floor(nearest / shape[0] / shape[1])];
  let point = place.map((n, a) => n / Math.max(shape[a] - 1, 1));
  let here = transform(data, point), error = miss(here);
  for (let turn = 0; turn < 30 && error > 0.01; turn++) {
    const rows = axes.map((a) => [...axes.map(() => 0), target[a] - here[a]]);
    axes.forEach((b) => {
      const step = 0.3 / Math.max(shape[b] - 1, 1), high = point.slice(), low = point.slice();
      high[b] = Math.min(point[b] + step, 1);
      low[b] = Math.max(point[b] - step, 0);
      const [up, down] = [transform(data, high), transform(data, low)];
      axes.forEach((a) => { rows[a][b] = (up[a] - down[a]) / (high[b] - low[b]); });
    });
    const move = solve(rows);
    if (!move) break;
    let better = null;
    for (let part = 1; part > 0.05 && !better; part /= 2) {
      const next = point.map((x, a) => (a < data.dim ? Math.min(Math.max(x + part * move[a], 0), 1) : x));
      const there = transform(data, next), off = miss(there);
      if (off < error) better = [next, there, off];
    }
    if (!better) break;
    [point, here, error] = better;
  }
  return { point, error };
}

/** The solution of a small linear system, rows of coefficients and right-hand side; null if there is none. */
function solve(rows) {
  const n = rows.length;
  for (let k = 0; k < n; k++) {
    const best = rows.slice(k).reduce((at, row, i) => (Math.abs(row[k]) > Math.abs(rows[at][k]) ? k + i : at), k);
    [rows[k], rows[best]] = [rows[best], rows[k]];
    if (Math.abs(rows[k][k]) < 1e-9) return null;
    for (let i = 0; i < n; i++) {
      if (i === k) continue;
      const factor = rows[i][k] / rows[k][k];
      for (let j = k; j <= n; j++) rows[i][j] -= factor * rows[k][j];
    }
  }
  return rows.map((row, k) => row[n] / row[k]);
}

/** The window of a volume: its lowest and highest value, after the user's changes of level and width. */
function range(volume, state) {
  const [low, high] = volume.windows[state.window] || Object.values(volume.windows)[0];
  const { shift, stretch } = state.level;
  const middle = (low + high) / 2 + shift * (high - low), half = (stretch * (high - low)) / 2;
  return [middle - half, middle + half];
}

/** Grey from 0 to 1 for each of the 256 levels. */
function greys(volume, state) {
  const [low, high] = range(volume, state);
  const table = new Float32Array(256);
  for (let level = 0, k = 1; level < 256; level++) {
    while (k < volume.knots.length - 1 && level > volume.knots[k][1]) k++;
    const [v0, l0] = volume.knots[k - 1], [v1, l1] = volume.knots[k];
    const value = v0 + ((level - l0) / (l1 - l0)) * (v1 - v0);
    table[level] = Math.min(Math.max((value - low) / (high - low || 1), 0), 1);
  }
  return table;
}

function sliceNumber(volume, plane, point) {
  const through = plane.axes[2];
  return Math.round(Math.min(Math.max(point[through], 0), 1) * (volume.shape[through] - 1));
}

/** The levels of the voxels of a plane through `point`, row by row as on the screen. */
function cut(volume, plane, point) {
  const [h, v, through] = plane.axes, { shape, levels } = volume;
  const strides = [1, shape[0], shape[0] * shape[1]];
  const width = shape[h], height = shape[v], values = new Uint8Array(width * height);
  const start = sliceNumber(volume, plane, point) * strides[through];
  for (let y = 0, pixel = 0; y < height; y++) {
    const row = start + (plane.flip[1] ? height - 1 - y : y) * strides[v];
    for (let x = 0; x < width; x++) values[pixel++] = levels[row + (plane.flip[0] ? width - 1 - x : x) * strides[h]];
  }
  return { width, height, values };
}

/** Calls visit(pixel, unit point) for every pixel of a plane through `point`. */
function eachPixel(shape, plane, point, visit) {
  const [h, v, through] = plane.axes;
  const at = [0, 0, 0];
  at[through] = point[through];
  for (let y = 0, pixel = 0; y < shape[v]; y++) {
    at[v] = (plane.flip[1] ? shape[v] - 1 - y : y) / Math.max(shape[v] - 1, 1);
    for (let x = 0; x < shape[h]; x++, pixel++) {
      at[h] = (plane.flip[0] ? shape[h] - 1 - x : x) / Math.max(shape[h] - 1, 1);
      visit(pixel, at);
    }
  }
}

/** Where the map takes every pixel of a plane through `point`: one array for each axis of the moving image. */
function mapped(data, plane, point) {
  const { shape, lattice } = data.map, axes = plane.axes;
  const strides = [1, shape[0], shape[0] * shape[1]], count = shape[0] * shape[1] * shape[2];
  const [width, height] = [data.fixed.shape[axes[0]], data.fixed.shape[axes[1]]];
  // For a unit coordinate along an axis: the offsets of the two lattice points beside it, and the part of the second.
  const beside = (a, u) => {
    const x = Math.min(Math.max(u, 0), 1) * (shape[a] - 1), low = Math.min(Math.floor(x), Math.max(shape[a] - 2, 0));
    return [low * strides[a], Math.min(low + 1, shape[a] - 1) * strides[a], x - low];
  };
  const along = (n, length) => Array.from({ length }, (_, i) =>
    beside(axes[n], (plane.flip[n] ? length - 1 - i : i) / Math.max(length - 1, 1)));
  const columns = along(0, width), rows = along(1, height), [t0, t1, tp] = beside(axes[2], point[axes[2]]);
  return Array.from({ length: data.dim }, (_, a) => {
    const values = new Float32Array(width * height), base = a * count;
    for (let y = 0, pixel = 0; y < height; y++) {
      const [r0, r1, rp] = rows[y];
      for (let x = 0; x < width; x++) {
        const [c0, c1, cp] = columns[x];
        const near = (r, t) => { const at = base + r + t; return lattice[at + c0] * (1 - cp) + lattice[at + c1] * cp; };
        values[pixel++] = (near(r0, t0) * (1 - rp) + near(r1, t0) * rp) * (1 - tp) + (near(r0, t1) * (1 - rp) + near(r1, t1) * rp) * tp;
      }
    }
    return values;
  });
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

/** Edges of a picture of greys, from 0 to 1: ridges of its gradient. */
function edges(grey, width, height) {
  const gx = new Float32Array(grey.length), gy = new Float32Array(grey.length), size = new Float32Array(grey.length);
  for (let y = 1; y < height - 1; y++)
    for (let x = 1; x < width - 1; x++) {
      const p = y * width + x;
      gx[p] = grey[p + 1] - grey[p - 1] + 0.5 * (grey[p + 1 - width] - grey[p - 1 - width] + grey[p + 1 + width] - grey[p - 1 + width]);
      gy[p] = grey[p + width] - grey[p - width] + 0.5 * (grey[p + width - 1] - grey[p - width - 1] + grey[p + width + 1] - grey[p - width + 1]);
      size[p] = Math.hypot(gx[p], gy[p]);
    }
  const found = new Float32Array(grey.length);
  for (let y = 1; y < height - 1; y++)
    for (let x = 1; x < width - 1; x++) {
      const p = y * width + x, m = size[p];
      if (m < 0.15) continue;
      const dx = Math.round(gx[p] / m), dy = Math.round(gy[p] / m), step = dy * width + dx;
      if (m >= size[p + step] && m > size[p - step]) found[p] = Math.min((m - 0.15) / 0.3, 1);
    }
  return found;
}

/** One panel as RGBA: `which` is "fixed", "moving", or the view in the middle. */
function render(data, plane, which, state) {
  const volume = which === "moving" ? data.moving : data.fixed;
  const point = which === "moving" ? transform(data, state.point) : state.point;
  const { width, height, values } = cut(volume, plane, point);
  const rgba = new Uint8ClampedArray(4 * width * height).fill(255);
  const put = (pixel, r, g, b) => { rgba[4 * pixel] = r; rgba[4 * pixel + 1] = g; rgba[4 * pixel + 2] = b; };
  const table = greys(volume, state), f = Float32Array.from(values, (level) => table[level]);
  if (which === "fixed" || which === "moving") {
    const outside = which === "moving" && plane.axes.some((a) => point[a] < 0 || point[a] > 1);
    f.forEach((grey, pixel) => { const v = 255 * grey * (outside ? 0.45 : 1); put(pixel, v, v, v); });
    return { width, height, rgba };
  }
  const other = greys(data.warped, state), w = Float32Array.from(cut(data.warped, plane, point).values, (level) => other[level]);
  const map = mapped(data, plane, point).filter((_, a) => data.moving.shape[a] > 1);
  const square = Math.max(4, Math.round(Math.max(width, height) / 9));
  const mix = state.mix / 100, ridge = which === "edges" ? edges(f, width, height) : null;
  const colour = {
    warped: (p) => [w[p], w[p], w[p]],
    grid: (p) => [w[p], w[p], w[p]],
    flicker: (p) => (state.flick ? [f[p], f[p], f[p]] : [w[p], w[p], w[p]]),
    blend: (p) => [w[p] * Math.min(2 * mix, 1), f[p] * Math.min(2 - 2 * mix, 1), w[p] * Math.min(2 * mix, 1)],
    edges: (p) => { const g = 0.85 * w[p] * (1 - ridge[p]); return [g + ridge[p], g + 0.55 * ridge[p], g]; },
    checkerboard: (p) => ((Math.floor((p % width) / square) + Math.floor(p / width / square)) % 2 === 0 ? [f[p], f[p], f[p]] : [w[p], 0.92 * w[p], 0.75 * w[p]]),
    difference: (p) => diverging(w[p] - f[p]).map((c) => c / 255),
  }[which];
  eachPixel(volume.shape, plane, point, (pixel, at) => {
    const beyond = map.some((unit) => unit[pixel] < 0 || unit[pixel] > 1);
    if (colour) {
      const [r, g, b] = beyond && !(which === "flicker" && state.flick) ? [0.28 * f[pixel], 0.28 * f[pixel], 0.28 * f[pixel] + 0.24] : colour(pixel);
      return put(pixel, 255 * r, 255 * g, 255 * b);
    }
    const overlay = data[which], level = sample(overlay.levels, overlay.shape, at);
    if (which === "jacobian" && nearest(overlay, at) === 0) return put(pixel, 255, 0, 220);
    const [r, g, b] = which === "jacobian" ? diverging((level - 128) / 127) : sequential(level / 255);
    const shade = which === "jacobian" ? 0.35 + 0.65 * (beyond ? 0 : w[pixel]) : 0.4 + 0.6 * f[pixel];
    put(pixel, shade * r, shade * g, shade * b);
  });
  return { width, height, rgba };
}

function nearest(map, at) {
  const [i, j, k] = at.map((x, a) => Math.round(Math.min(Math.max(x, 0), 1) * (map.shape[a] - 1)));
  return map.levels[i + map.shape[0] * (j + map.shape[1] * k)];
}

/** Lines at which a picture of numbers passes through whole multiples of 1 / count, as segments [x, y, x, y] between
 * pixel centres. */
function isolines(values, width, height, count) {
  const segments = [];
  for (let y = 0; y + 1 < height; y++)
    for (let x = 0; x + 1 < width; x++) {
      const p = y * width + x;
      const corners = [[x, y, values[p]], [x + 1, y, values[p + 1]], [x + 1, y + 1, values[p + width + 1]], [x, y + 1, values[p + width]]];
      const ends = corners.map((corner) => corner[2] * count);
      const last = Math.floor(Math.max(...ends));
      for (let line = Math.ceil(Math.min(...ends)); line <= last; line++) {
        if (line < 0 || line > count) continue;  // beyond the moving image
        const crossings = [];
        for (let c = 0; c < 4; c++) {
          const [x0, y0] = corners[c], [x1, y1] = corners[(c + 1) % 4], a = ends[c] - line, b = ends[(c + 1) % 4] - line;
          if (a < 0 !== b < 0) crossings.push([x0 + (a / (a - b)) * (x1 - x0) + 0.5, y0 + (a / (a - b)) * (y1 - y0) + 0.5]);
        }
        for (let c = 0; c + 1 < crossings.length; c += 2) segments.push([...crossings[c], ...crossings[c + 1]]);
      }
    }
  return segments;
}

/** A regular grid of the moving image, deformed by the transform: segments in pixels of the fixed image's plane. */
function gridLines(data, plane, point, lines = 16) {
  const axes = plane.axes.slice(0, 2), map = mapped(data, plane, point);
  const [width, height] = axes.map((a) => data.fixed.shape[a]);
  const sizes = axes.map((a) => data.moving.shape[a] * data.moving.spacing[a]), longest = Math.max(...sizes);
  return axes.flatMap((a, n) => isolines(map[a], width, height, Math.max(Math.round((lines * sizes[n]) / longest), 1)));
}

/** The borders of the labels in a plane through `point`, by label: segments in pixels. */
function outlines(labels, plane, point) {
  const { width, height, values } = cut(labels, plane, point), found = new Map();
  const label = (x, y) => (x < 0 || y < 0 || x >= width || y >= height ? 0 : values[y * width + x]);
  const trace = (rows, length, between, segment) => {
    for (let row = 0; row <= rows; row++) {
      let start = 0, last = 0;
      for (let at = 0; at <= length; at++) {
        const [a, b] = at < length ? between(row, at) : [0, 0], now = a === b ? 0 : Math.max(a, b);
        if (now === last) continue;
        if (last) { if (!found.has(last)) found.set(last, []); found.get(last).push(segment(row, start, at)); }
        [start, last] = [at, now];
      }
    }
  };
  trace(height, width, (y, x) => [label(x, y - 1), label(x, y)], (y, from, to) => [from, y, to, y]);
  trace(width, height, (x, y) => [label(x - 1, y), label(x, y)], (x, from, to) => [x, from, x, to]);
  return found;
}

/** Well-separated colours for labels, always the same for a number. */
function labelColour(number) {
  return `hsl(${(number * 137.508) % 360} ${[95, 75, 90][number % 3]}% ${[62, 72, 52][number % 3]}%)`;
}

/** Where a unit point is in a picture of a whole plane, as fractions of its width and height; and back. Voxels are
 * pixels: their centres lie half a pixel inside. */
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

/** Millimetres from side to side and from top to bottom of a volume in a plane. */
function extent(volume, plane) {
  return [0, 1].map((n) => volume.shape[plane.axes[n]] * volume.spacing[plane.axes[n]]);
}

/** Left, top, width and height in a panel of the picture of a whole plane, at `scale` pixels for a millimetre, the unit
 * point `centre` in the middle. A picture that is larger than the panel fills it. */
function placed(volume, plane, centre, scale, size) {
  const at = onScreen(volume, plane, centre), sides = extent(volume, plane).map((mm) => mm * scale);
  const corner = sides.map((side, n) => (side <= size[n] ? (size[n] - side) / 2 : Math.min(Math.max(size[n] / 2 - at[n] * side, size[n] - side), 0)));
  return [...corner, ...sides];
}

/** A round number of millimetres that is at most `most` long, and its name. */
function barLength(most) {
  const power = 10 ** Math.floor(Math.log10(most)), mm = power * [5, 2, 1].find((digit) => digit * power <= most);
  return [mm, mm >= 10 && mm % 10 === 0 ? `${mm / 10} cm` : `${mm} mm`];
}

// ---- the page -------------------------------------------------------------------------------------------------------

const VIEWS = {
  warped: "moving, warped", blend: "blend", edges: "edges", flicker: "flicker", checkerboard: "checkerboard",
  difference: "difference", grid: "deformation grid", jacobian: "volume change", certainty: "certainty", error: "expected error",
};
const ZOOM = 3, MOST_ZOOM = 12;
const HINT = "Wheel or arrow keys: slices. Click: go there, in any image. Drag: window and level. Double-click, or Ctrl and wheel: zoom; Shift and drag: pan. Escape: reset. ";

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
  if (view === "error") return `expected error 0 mm ${gradient(sequential)} ≥ ${data.error.high} mm`;
  return {
    checkerboard: "fixed in grey, warped tinted", blend: "fixed green, warped magenta: grey where they agree",
    edges: "edges of the fixed image over the warped one", grid: "a regular grid of the moving image, deformed by the transform",
  }[view] || "";
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

/** The bytes of a compressed text. */
async function inflate(text) {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const byId = (id) => document.getElementById(id);
const VOLUMES = ["fixed", "warped", "moving", "jacobian", "certainty", "error", "fixed_labels", "warped_labels", "moving_labels"];
let data, state;  // for the console, too

async function start() {
  if (typeof DecompressionStream === "undefined") {
    byId("where").textContent = "This browser is too old to show the images. Use one from 2023 or later.";
    return;
  }
  data = JSON.parse(byId("data").textContent);
  await Promise.all(VOLUMES.filter((name) => data[name]).map((name) => load(data[name])));
  data.map.lattice = unpackMap(data.map, await inflate(data.map.values));
  state = { ...rest(), point: [0.5, 0.5, 0.5], view: "warped", window: Object.keys(data.fixed.windows)[0], mix: 50,
    plane: PLANES[data.dim][0], only: "all", contours: true, chosen: 0, frame: "RAS", flick: false };
  const planes = PLANES[data.dim].map(buildPlane), panels = planes.flatMap((one) => one.panels);
  buildControls();
  buildTable();

  // -- drawing --

  /** The size of each panel, and the scale of the images in it. */
  function layout() {
    const shown = planes.filter(({ plane }) => state.only === "all" || state.only === plane.name);
    planes.forEach((one) => { one.section.hidden = !shown.includes(one); });
    const wide = innerWidth > 640;
    const sides = shown.map(({ plane }) => [0, 1].map((n) => Math.max(extent(data.fixed, plane)[n], extent(data.moving, plane)[n])));
    const top = byId("planes").getBoundingClientRect().top + scrollY;
    const bars = shown.reduce((total, { label }) => total + label.offsetHeight + 4, 0);
    const room = Math.max(innerHeight - (top > innerHeight / 2 ? byId("bar").offsetHeight : top) - bars - byId("sides").offsetHeight - 4, 330);
    const tall = sides.reduce((total, [, height]) => total + height, 0);
    shown.forEach(({ panels: row }, n) => row.forEach(({ figure }) => {
      const height = wide ? (room * sides[n][1]) / tall : Math.min((figure.clientWidth * sides[n][1]) / sides[n][0], 0.8 * innerHeight);
      figure.style.height = `${Math.max(Math.floor(height), 60)}px`;
    }));
    for (const which of ["fixed", "middle", "moving"]) {
      const column = shown.map(({ panels: row }) => row.find((panel) => panel.which === which));
      const scale = Math.min(...column.map(({ figure }, n) => Math.min(figure.clientWidth / sides[n][0], figure.clientHeight / sides[n][1])));
      column.forEach((panel) => { panel.fit = scale; panel.size = [panel.figure.clientWidth, panel.figure.clientHeight]; });
    }
    draw();
  }

  const volumeOf = (panel) => (panel.which === "moving" ? data.moving : data.fixed);
  const pointIn = (panel, point) => (panel.which === "moving" ? transform(data, point) : point);
  const boxOf = (panel) => placed(volumeOf(panel), panel.plane, pointIn(panel, state.centre), panel.fit * state.zoom, panel.size);

  /** The picture of a panel's plane, drawn again only if it has changed. */
  function pictureOf(panel) {
    const which = panel.which === "middle" ? state.view : panel.which;
    const slice = sliceNumber(volumeOf(panel), panel.plane, pointIn(panel, state.point));
    const outside = panel.which === "moving" && transform(data, state.point).some((u) => u < 0 || u > 1);
    const key = JSON.stringify([which, slice, outside, state.window, state.level, state.mix, state.flick && which === "flicker"]);
    if (panel.key !== key) {
      const picture = render(data, panel.plane, which, state);
      [panel.picture.width, panel.picture.height] = [picture.width, picture.height];
      panel.picture.getContext("2d").putImageData(new ImageData(picture.rgba, picture.width, picture.height), 0, 0);
      panel.key = key;
    }
    return panel.picture;
  }

  function stroke(context, segments, [left, top, width, height], picture, style, line = 1.2) {
    const [sx, sy] = [width / picture.width, height / picture.height];
    context.beginPath();
    for (const [x0, y0, x1, y1] of segments) {
      context.moveTo(left + x0 * sx, top + y0 * sy);
      context.lineTo(left + x1 * sx, top + y1 * sy);
    }
    [context.strokeStyle, context.lineWidth] = [style, line];
    context.stroke();
  }

  function strokeLabels(context, panel, box, picture, side, dash) {
    const labels = data[`${side}_labels`];
    if (!labels) return;
    context.setLineDash(dash);
    for (const [index, segments] of outlines(labels, panel.plane, pointIn(panel, state.point))) {
      const { number } = data.labels[index - 1];
      stroke(context, segments, box, picture, labelColour(number), state.chosen === number ? 3 : 1.2);
    }
    context.setLineDash([]);
  }

  function paint(panel) {
    const { canvas, plane, which, caption, size } = panel;
    const ratio = window.devicePixelRatio || 1, context = canvas.getContext("2d");
    [canvas.width, canvas.height] = size.map((n) => Math.round(n * ratio));
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    const picture = pictureOf(panel), box = boxOf(panel);
    context.imageSmoothingEnabled = box[2] / picture.width < 6;
    context.imageSmoothingQuality = "high";
    context.drawImage(picture, ...box);
    if (which === "middle" && state.view === "grid") stroke(context, gridLines(data, plane, state.point), box, picture, "#6fe0ff", 1);
    if (state.contours && data.labels && !(which === "middle" && state.view === "flicker")) {
      if (which === "middle") strokeLabels(context, panel, box, picture, "fixed", [2, 3]);
      strokeLabels(context, panel, box, picture, which === "middle" ? "warped" : which, []);
    }
    const [x, y] = crossOf(panel).map(Math.round);
    context.lineWidth = 1;
    context.strokeStyle = "rgba(255, 226, 138, .75)";
    context.beginPath();
    for (const [x0, y0, x1, y1] of [[0, y, x - 7, y], [x + 7, y, size[0], y], [x, 0, x, y - 7], [x, y + 7, x, size[1]]]) {
      context.moveTo(x0 + 0.5, y0 + 0.5);
      context.lineTo(x1 + 0.5, y1 + 0.5);
    }
    context.stroke();
    if (which !== "middle" || innerWidth <= 640) drawBar(context, panel);
    caption.textContent = panel.hover || titleOf(panel);
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${plane.name}: ${titleOf(panel)}`);
  }

  function titleOf({ which }) {
    if (which !== "middle") return which;
    return state.view === "flicker" ? `flicker: ${state.flick ? "fixed" : "warped"}` : VIEWS[state.view];
  }

  function crossOf(panel) {
    const [left, top, width, height] = boxOf(panel);
    const [x, y] = onScreen(volumeOf(panel), panel.plane, pointIn(panel, state.point));
    return [left + x * width, top + y * height];
  }

  function drawBar(context, { fit, size }) {
    const scale = fit * state.zoom, [mm, text] = barLength((0.3 * size[0]) / scale), length = mm * scale;
    const [x, y] = [8.5, size[1] - 8.5];
    context.strokeStyle = context.fillStyle = "#fff";
    context.shadowColor = "#000";
    context.shadowBlur = 3;
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(x, y - 4); context.lineTo(x, y); context.lineTo(x + length, y); context.lineTo(x + length, y - 4);
    context.stroke();
    context.font = "11px system-ui, sans-serif";
    context.fillText(text, x + 4, y - 4);
    context.shadowBlur = 0;
  }

  let waiting = false;
  function draw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      panels.filter(({ size, plane }) => size && (state.only === "all" || state.only === plane.name)).forEach(paint);
      planes.forEach(({ plane, section, slider, position }) => {
        section.classList.toggle("active", data.dim === 3 && plane === state.plane);
        slider.value = Math.round(state.point[plane.axes[2]] * slider.max);
        position.textContent = `${Number(slider.value) + 1} of ${Number(slider.max) + 1}`;
      });
      describe();
    });
  }

  function describe() {
    const moved = transform(data, state.point), signs = state.frame === "LPS" ? [-1, -1, 1] : [1, 1, 1];
    const show = (numbers) => numbers.slice(0, data.dim).map((n, a) => (n * signs[a]).toFixed(1)).join(", ");
    byId("where").textContent = `fixed ${show(world(data.fixed, state.point))} mm → moving ${show(world(data.moving, moved))}${data.map.off ? ` ± ${data.map.off}` : ""} mm`
      + (moved.some((u) => u < 0 || u > 1) ? ", outside the moving image" : "");
    byId("frame").textContent = state.frame;
    byId("structure").textContent = [["fixed", state.point], ["moving", moved]]
      .map(([side, point]) => [side, nameAt(side, point)]).filter(([, name]) => name).map((words) => words.join(": ")).join(", ");
    byId("structure").title = byId("structure").textContent;  // of which a narrow screen shows only a part
    byId("legend").innerHTML = legend(data, state.view);
    byId("mixing").hidden = state.view !== "blend";
    const [low, high] = range(data.fixed, state), changed = state.level.shift || state.level.stretch !== 1;
    const [option] = byId("window").querySelectorAll("option[value='']");
    option.hidden = !changed;
    option.textContent = `width ${(high - low).toPrecision(3)}, level ${((low + high) / 2).toPrecision(3)}`;
    byId("window").value = changed ? "" : state.window;
  }

  function nameAt(side, point) {
    const labels = data[`${side}_labels`];
    if (!labels || point.some((u, a) => labels.shape[a] > 1 && (u < 0 || u > 1))) return "";
    const index = nearest(labels, point);
    return index ? data.labels[index - 1].name : "";
  }

  // -- what the user does --

  function rest() {
    return { level: { shift: 0, stretch: 1 }, zoom: 1, centre: [0.5, 0.5, 0.5] };
  }

  /** Show a unit point of the fixed image, and keep it in view. */
  function go(point) {
    state.point = point.map((u) => Math.min(Math.max(u, 0), 1));
    if (state.zoom > 1 && panels.some((panel) => panel.size && crossOf(panel).some((x, n) => x < 0 || x > panel.size[n]))) state.centre = state.point;
    draw();
  }

  function step(plane, by) {
    const axis = plane.axes[2], most = data.fixed.shape[axis] - 1, point = state.point.slice();
    if (most < 1) return;
    point[axis] = Math.min(Math.max(Math.round(point[axis] * most) + by, 0), most) / most;
    go(point);
  }

  /** The unit point of a panel's own image at a position of the mouse. */
  function under(panel, event) {
    const frame = panel.canvas.getBoundingClientRect(), [left, top, width, height] = boxOf(panel);
    return fromScreen(volumeOf(panel), panel.plane, pointIn(panel, state.point),
      (event.clientX - frame.left - left) / width, (event.clientY - frame.top - top) / height);
  }

  const fixedPoint = (panel, point) => (panel.which === "moving" ? invert(data, point).point : point);

  function zoomTo(zoom, panel, event) {
    if (event) state.centre = fixedPoint(panel, under(panel, event));
    state.zoom = Math.min(Math.max(zoom, 1), MOST_ZOOM);
    draw();
  }

  function listen(panel) {
    const { canvas } = panel;
    let drag = null, turned = 0;
    canvas.onpointerenter = () => { state.plane = panel.plane; draw(); };
    canvas.onpointerleave = () => { panel.hover = ""; draw(); };
    canvas.onpointerdown = (event) => {
      if (event.pointerType === "touch") return;
      drag = { x: event.clientX, y: event.clientY, level: state.level, far: false, centre: crossOf(panel), pan: event.shiftKey || event.button === 1, last: event };
      canvas.setPointerCapture(event.pointerId);
    };
    canvas.onpointermove = (event) => {
      if (!drag) {
        const side = panel.which === "middle" ? "fixed" : panel.which, name = nameAt(side, under(panel, event));
        const hover = name ? `${titleOf(panel)}: ${name}` : "";
        if (hover !== panel.hover) { panel.hover = hover; draw(); }
        return;
      }
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      drag.far ||= Math.hypot(dx, dy) > 4;
      if (!drag.far) return;
      if (drag.pan) {
        const scale = panel.fit * state.zoom, centre = pointIn(panel, state.centre).slice();
        [event.clientX - drag.last.clientX, event.clientY - drag.last.clientY].forEach((moved, n) => {
          const a = panel.plane.axes[n], size = Math.max((volumeOf(panel).shape[a] - 1) * volumeOf(panel).spacing[a], 1e-6);
          centre[a] += ((panel.plane.flip[n] ? 1 : -1) * moved) / scale / size;
        });
        state.centre = fixedPoint(panel, centre).map((u) => Math.min(Math.max(u, 0), 1));
        drag.last = event;
      } else state.level = { shift: drag.level.shift + dy / 300, stretch: Math.max(drag.level.stretch * Math.exp(dx / 200), 0.01) };
      draw();
    };
    canvas.onpointerup = (event) => {
      const clicked = drag && !drag.far;
      drag = null;
      if (clicked && event.button === 0) go(fixedPoint(panel, under(panel, event)));
    };
    canvas.onpointercancel = () => { drag = null; };
    canvas.onclick = (event) => { if (event.pointerType === "touch") go(fixedPoint(panel, under(panel, event))); };
    canvas.ondblclick = (event) => (state.zoom > 1 ? zoomTo(1) : zoomTo(ZOOM, panel, event));
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      if (event.ctrlKey || event.metaKey) return zoomTo(state.zoom * Math.exp(-event.deltaY / 300), panel, state.zoom > 1 ? null : event);
      turned += event.deltaMode ? 50 * event.deltaY : event.deltaY;
      if (Math.abs(turned) < 30) return;
      state.plane = panel.plane;
      step(panel.plane, turned < 0 ? 1 : -1);
      turned = 0;
    }, { passive: false });
  }

  function press(event) {
    if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
    const by = { ArrowUp: 1, ArrowRight: 1, ArrowDown: -1, ArrowLeft: -1, PageUp: 10, PageDown: -10 }[event.key];
    const views = Array.from(byId("view").options, (option) => option.value);
    if (by) step(state.plane, by);
    else if (event.key === "Escape") { Object.assign(state, rest()); draw(); }
    else if (event.key === "+" || event.key === "=") zoomTo(state.zoom * 1.4);
    else if (event.key === "-") zoomTo(state.zoom / 1.4);
    else if (event.key === "f") choose("flicker");
    else if (views[Number(event.key) - 1]) choose(views[Number(event.key) - 1]);
    else return;
    event.preventDefault();
  }

  function choose(view) {
    byId("view").value = state.view = view;
    draw();
  }

  // -- the elements --

  function buildPlane(plane) {
    const section = document.createElement("div");
    section.className = "plane";
    const label = document.createElement("label"), slider = document.createElement("input");
    Object.assign(slider, { type: "range", min: 0, max: data.fixed.shape[plane.axes[2]] - 1, step: 1 });
    const name = document.createElement("span"), position = document.createElement("output");
    [name.className, name.textContent] = ["name", plane.name];
    label.append(name, slider, position);
    label.hidden = data.fixed.shape[plane.axes[2]] < 2;
    slider.oninput = () => { const point = state.point.slice(); point[plane.axes[2]] = slider.value / Math.max(slider.max, 1); state.plane = plane; go(point); };
    const row = document.createElement("div");
    row.className = "panels";
    const panels = ["fixed", "middle", "moving"].map((which) => {
      const figure = document.createElement("figure"), canvas = document.createElement("canvas");
      const caption = document.createElement("figcaption");
      figure.append(canvas, caption);
      plane.edges.forEach((letter, n) => {
        const mark = document.createElement("span");
        mark.className = `edge e${n}`;
        mark.textContent = letter;
        figure.append(mark);
      });
      row.append(figure);
      return { plane, which, figure, canvas, caption, picture: document.createElement("canvas"), hover: "" };
    });
    section.append(row, label);
    byId("planes").append(section);
    return { plane, section, label, slider, position, panels };
  }

  function buildControls() {
    const options = (select, entries) => { for (const [value, words] of entries) select.add(new Option(words, value)); };
    options(byId("view"), Object.entries(VIEWS).filter(([name]) => !["certainty", "error"].includes(name) || data[name]));
    options(byId("window"), [...Object.keys(data.fixed.windows), ""].map((name) => [name, name]));
    options(byId("shown"), ["all", ...PLANES[data.dim].map(({ name }) => name)].map((name) => [name, name]));
    byId("plane").hidden = byId("frame").hidden = data.dim !== 3;
    byId("outlines").hidden = !data.labels;
    byId("view").onchange = (event) => choose(event.target.value);
    byId("window").onchange = (event) => { state.window = event.target.value || state.window; state.level = rest().level; draw(); };
    byId("shown").onchange = (event) => { state.only = event.target.value; state.plane = PLANES[data.dim].find(({ name }) => name === state.only) || state.plane; layout(); };
    byId("mix").oninput = (event) => { state.mix = Number(event.target.value); draw(); };
    byId("contours").onchange = (event) => { state.contours = event.target.checked; draw(); };
    byId("where").title = data.map.off ? "This file knows the transform on a lattice. In 99 % of the anatomy, the position in the moving image is that close to the exact one, which carl view and carl warp-points compute." : "";
    byId("frame").onclick = () => { state.frame = state.frame === "RAS" ? "LPS" : "RAS"; draw(); };
    byId("frame").title = "Millimetres along right, anterior, superior (RAS, as in NIfTI) or left, posterior, superior (LPS, as in ITK and DICOM). Click to switch.";
    byId("sides").textContent = HINT + "Blue: outside the moving image." + (data.labels ? " Outlines in the middle: warped labels solid, fixed ones dotted." : "")
      + (data.dim === 3 ? " Radiological: the patient's right (R) is on the left." : " The header of a 2-D image does not define left and right.");
    setInterval(() => { if (state.view === "flicker") { state.flick = !state.flick; draw(); } }, 600);
  }

  /** The middle voxel, in the order of the array, of a label in the fixed image. */
  function somewhereIn(number) {
    const labels = data.fixed_labels || data.warped_labels, index = data.labels.findIndex((one) => one.number === number) + 1;
    let count = 0, at = -1;
    for (const level of labels.levels) count += level === index;
    for (let seen = 0, n = 0; n < labels.levels.length && at < 0; n++) if (labels.levels[n] === index && ++seen > count / 2) at = n;
    const [nx, ny] = labels.shape;
    return at < 0 ? null : [at % nx, Math.floor(at / nx) % ny, Math.floor(at / nx / ny)].map((n, a) => n / Math.max(labels.shape[a] - 1, 1));
  }

  function buildTable() {
    const table = document.querySelector("table.sorted");
    if (!table) return;
    const heads = Array.from(table.tHead.rows[0].cells), body = table.tBodies[0];
    heads.forEach((head, column) => {
      head.firstChild.onclick = () => {
        const falling = head.ariaSort ? head.ariaSort === "ascending" : column > 0;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.ariaSort = falling ? "descending" : "ascending";
        const value = (row) => (column ? Number(row.cells[column].dataset.value) : row.cells[0].textContent.trim());
        const order = (a, b) => (column ? (Number.isNaN(a) ? -1 : a) - (Number.isNaN(b) ? -1 : b) : a.localeCompare(b, undefined, { numeric: true }));
        body.append(...Array.from(body.rows).sort((a, b) => (falling ? -1 : 1) * order(value(a), value(b))));
      };
    });
    for (const row of body.rows) {
      const number = Number(row.dataset.label);
      if (!data.labels || !data.labels.some((one) => one.number === number)) continue;
      const swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = labelColour(number);
      row.cells[0].prepend(swatch);
      row.onclick = () => {
        state.chosen = state.chosen === number ? 0 : number;
        for (const other of body.rows) other.classList.toggle("chosen", state.chosen && other === row);
        const point = somewhereIn(number);
        if (state.chosen && point) { go(point); byId("viewer").scrollIntoView(); } else draw();
      };
    }
  }

  panels.forEach(listen);
  document.addEventListener("keydown", press);
  new ResizeObserver(layout).observe(byId("bar"));
  addEventListener("resize", layout);
  layout();
  document.body.dataset.ready = "yes";
}

if (typeof document !== "undefined") start();
else module.exports = { PLANES, unpack, unpackMap, sample, transform, invert, world, greys, render, outlines, gridLines, onScreen, fromScreen, placed, barLength };
