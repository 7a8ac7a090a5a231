// node render_report.js PAGE.js REPORT.html POINT: draws the panels through a unit point, a JSON list, with the page's
// own functions and prints them as JSON.
"use strict";
const fs = require("fs"), zlib = require("zlib");
const page = require(process.argv[2]);
const text = fs.readFileSync(process.argv[3], "utf8");
const data = JSON.parse(text.split('<script id="data" type="application/json">')[1].split("</script>")[0]);

function decode(uri) {
  const bytes = Buffer.from(uri.split(",")[1], "base64");
  const width = bytes.readUInt32BE(16), height = bytes.readUInt32BE(20);
  let at = 8;
  const parts = [];
  while (at < bytes.length) {
    const length = bytes.readUInt32BE(at), kind = bytes.toString("latin1", at + 4, at + 8);
    if (kind === "IDAT") parts.push(bytes.subarray(at + 8, at + 8 + length));
    at += 12 + length;
  }
  const rows = zlib.inflateSync(Buffer.concat(parts));
  const rgba = new Uint8ClampedArray(4 * width * height);
  const level = (x, y) => (x < 0 || y < 0 ? 0 : rgba[4 * (y * width + x)]);
  const paeth = (a, b, c) => [a, b, c].reduce((best, v) => (Math.abs(a + b - c - v) < Math.abs(a + b - c - best) ? v : best));
  for (let y = 0; y < height; y++)
    for (let x = 0; x < width; x++) {
      const [left, up, corner] = [level(x - 1, y), level(x, y - 1), level(x - 1, y - 1)];
      const guess = [0, left, up, (left + up) >> 1, paeth(left, up, corner)][rows[y * (width + 1)]];
      rgba[4 * (y * width + x)] = (rows[y * (width + 1) + 1 + x] + guess) & 255;
    }
  return { rgba, width };
}

for (const name of ["fixed", "warped", "moving", "jacobian", "certainty", "fixed_labels"]) {
  if (!data[name]) continue;
  const picture = decode(data[name].png);
  data[name].levels = page.unpack(picture.rgba, picture.width, data[name]);
}
data.map.lattice = page.unpackMap(data.map, zlib.inflateSync(Buffer.from(data.map.values, "base64")));
const state = { point: JSON.parse(process.argv[4]), window: Object.keys(data.fixed.windows)[0], mix: 50, level: { shift: 0, stretch: 1 } };
const views = ["fixed", "moving", "warped", "blend", "edges", "checkerboard", "difference", "grid", "jacobian"];
if (data.certainty) views.push("certainty");
const panels = [];
const planes = page.PLANES[data.dim];
for (const plane of planes)
  for (const which of views) {
    const { width, height, rgba } = page.render(data, plane, which, state);
    panels.push({ plane: plane.name, which, width, height, rgba: Buffer.from(rgba).toString("base64") });
  }
const moved = page.transform(data, state.point);
const [x, y] = page.onScreen(data.fixed, planes[0], state.point);
process.stdout.write(JSON.stringify({
  point: state.point, moved, fixedWorld: page.world(data.fixed, state.point), movingWorld: page.world(data.moving, moved),
  clicked: page.fromScreen(data.fixed, planes[0], state.point, x, y), inverted: page.invert(data, moved), panels,
  grid: planes.map((plane) => page.gridLines(data, plane, state.point)),
  outlines: data.fixed_labels ? [...page.outlines(data.fixed_labels, planes[0], state.point)] : [],
}));
