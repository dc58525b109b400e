"use strict";
// Parameters by depth and step as colours. A pixel shows the worst of all cells that it covers: no spike falls between two.
gw.MISSING = 0; gw.ZERO = 1; gw.NOT_FINITE = 65535;
gw.log10 = code => (code - 2) / 65532 * 85 - 46;

// Codes of a grid by bucket and row; what a bucket without any record shows is what was recorded last before it.
gw.Grid = class {
  constructor(encoded, axis, rows) {
    this.axis = axis;
    this.rows = rows;
    this.high = gw.Grid.decoded(encoded.high);
    this.low = encoded.low ? gw.Grid.decoded(encoded.low) : this.high;
    this.shown = new Int32Array(axis.count);
    let last = -1;
    for (let at = 0; at < axis.count; at++) {
      const cells = this.high.subarray(at * rows, (at + 1) * rows);
      if (cells.some(code => code !== gw.MISSING)) last = at;
      this.shown[at] = last;
    }
  }
  static decoded(text) {
    const bytes = Uint8Array.from(atob(text), letter => letter.charCodeAt(0));
    return new Uint16Array(bytes.buffer);
  }
  code(at, row) { return this.shown[at] < 0 ? gw.MISSING : this.high[this.shown[at] * this.rows + row]; }
  lowCode(at, row) { return this.shown[at] < 0 ? gw.MISSING : this.low[this.shown[at] * this.rows + row]; }
  value(code) { return code === gw.MISSING || code === gw.NOT_FINITE ? null : code === gw.ZERO ? 0 : Math.pow(10, gw.log10(code)); }
  // Of each row the median code of its buckets, 0 without one.
  usual() {
    if (this.medians) return this.medians;
    this.medians = new Float64Array(this.rows);
    for (let row = 0; row < this.rows; row++) {
      const known = [];
      for (let at = 0; at < this.axis.count; at++) {
        const high = this.high[at * this.rows + row], low = this.low[at * this.rows + row];
        if (high > gw.ZERO && high !== gw.NOT_FINITE && low > gw.ZERO) known.push((high + low) / 2);
      }
      known.sort((one, other) => one - other);
      this.medians[row] = known.length ? known[known.length >> 1] : 0;
    }
    return this.medians;
  }
};

gw.VIRIDIS = [[68, 1, 84], [72, 40, 120], [62, 74, 137], [49, 104, 142], [38, 130, 142], [31, 158, 137],
  [53, 183, 121], [109, 205, 89], [180, 222, 44], [253, 231, 37]];
gw.DIVERGING = [[33, 77, 160], [80, 142, 206], [160, 203, 232], [228, 238, 243], [246, 246, 244], [250, 226, 208],
  [244, 171, 125], [215, 96, 60], [150, 22, 25]];
gw.BAD = [255, 0, 200];
gw.NULL = [128, 128, 128];

gw.between = (stops, part) => {
  const at = Math.max(0, Math.min(1, part)) * (stops.length - 1), from = Math.min(Math.floor(at), stops.length - 2);
  return stops[from].map((value, channel) => Math.round(value + (stops[from + 1][channel] - value) * (at - from)));
};

gw.SPAN = 3;  // decades either side of the usual norm
gw.MODES = {
  norm: "gradient norm", usual: "norm ÷ its usual norm", update_ratio: "update ratio",
};

gw.heatmap = (place, track, zoom, choose) => {
  const parameters = track.parameters, names = gw.rowNames(parameters);
  if (!names.length) {
    place.append(gw.element("p", {}, "No norms of parameters were recorded."));
    return;
  }
  const grids = {};
  for (const [name, encoded] of Object.entries(parameters.grids)) grids[name] = new gw.Grid(encoded, parameters.axis, names.length);
  let mode = "norm";
  const select = gw.element("select", {ariaLabel: "what the colours show"});
  for (const [name, label] of Object.entries(gw.MODES)) {
    if (name === "usual" || grids[name]) select.append(gw.element("option", {value: name}, label));
  }
  const key = gw.element("canvas", {className: "colours", width: 360, height: 12});
  const ends = [gw.element("span"), gw.element("span")];
  const said = gw.element("p", {className: "reading"}, "Point at a cell to read it, click to see its step below.");
  place.append(gw.element("p", {className: "controls"}, gw.element("label", {}, "colour: ", select),
    gw.element("span", {className: "scale"}, ends[0], key, ends[1]),
    ...[["bad", "NaN or Inf"], ["zero", "zero"], ["none", "no gradient"]].map(([name, label]) =>
      gw.element("span", {className: "legend"}, gw.element("span", {className: "swatch " + name}), label))), said);

  const state = () => gw.colouring(mode, grids);
  const rowPixels = Math.max(2, Math.min(20, Math.floor(420 / names.length)));
  const height = Math.max(170, Math.min(560, names.length * rowPixels)) + 54;  // the name of the axis has room beside few rows, too
  const chart = gw.chart(place, {
    height, legend: {show: false}, series: [{}, {show: false}],
    cursor: {points: {show: false}},
    scales: {y: {dir: -1, range: () => [0, names.length]}},
    axes: [gw.stepAxis("step"), gw.axis({
      scale: "y", size: gw.AXIS, label: "parameter: input → output", labelSize: 20, grid: {show: false}, space: 18,
      splits: () => gw.rowTicks(names.length, parameters.together),
      values: (u, splits) => splits.map(at => Math.round(at * parameters.together).toLocaleString("en")),
    })],
    hooks: {
      draw: [u => gw.drawCells(u, state())],
      setCursor: [u => { const cell = gw.cellAt(u, names.length, parameters.axis); if (cell) said.textContent = gw.cellText(cell, mode, grids, names); }],
    },
  }, [gw.starts(parameters.axis), gw.starts(parameters.axis).map(() => null)], zoom);
  chart.over.addEventListener("click", () => {
    const cell = gw.cellAt(chart, names.length, parameters.axis);
    if (cell) choose(cell.at, cell.row * parameters.together);
  });
  const drawKey = () => {
    const {stops, low, high} = state(), ctx = key.getContext("2d");
    for (let x = 0; x < key.width; x++) {
      ctx.fillStyle = `rgb(${gw.between(stops, x / (key.width - 1)).join()})`;
      ctx.fillRect(x, 0, 1, key.height);
    }
    [ends[0].textContent, ends[1].textContent] = mode === "usual" ? [`÷ ${10 ** gw.SPAN}`, `× ${10 ** gw.SPAN}`]
      : [low, high].map(code => gw.shown(Math.pow(10, gw.log10(code))));
  };
  select.addEventListener("change", () => { mode = select.value; drawKey(); chart.redraw(); });
  drawKey();
  return grids;
};

// One name for each row of the grids: several parameters where they share one.
gw.rowNames = parameters => {
  const names = parameters.table.name || [], together = parameters.together;
  if (together === 1) return names;
  const rows = [];
  for (let at = 0; at < names.length; at += together) {
    rows.push(`${names[at]} … ${names[Math.min(at + together, names.length) - 1]}`);
  }
  return rows;
};

// Rows at round numbers of parameters.
gw.rowTicks = (rows, together) => {
  const least = Math.max(1, rows * together / 12), power = Math.pow(10, Math.floor(Math.log10(least)));
  const each = Math.max(together, [1, 2, 5, 10].map(factor => factor * power).find(size => size >= least)), ticks = [];
  for (let at = 0; at < rows * together; at += each) ticks.push(at / together);
  return ticks;
};

// How codes become colours: `part(code, row)` in 0..1 of `stops`.
gw.colouring = (mode, grids) => {
  const grid = grids[mode === "usual" ? "norm" : mode];
  if (mode === "usual") {
    const usual = grid.usual(), decade = 65532 / 85;
    const part = (code, row) => usual[row] ? 0.5 + (code - usual[row]) / decade / gw.SPAN / 2 : 0.5;
    return {grid, stops: gw.DIVERGING, part, both: true};
  }
  let low = gw.NOT_FINITE, high = 2;
  for (const code of grid.high) {
    if (code <= gw.ZERO || code === gw.NOT_FINITE) continue;
    low = Math.min(low, code);
    high = Math.max(high, code);
  }
  if (low > high) [low, high] = [2, 3];
  return {grid, stops: gw.VIRIDIS, low, high, part: code => (code - low) / Math.max(1, high - low), both: false};
};

gw.drawCells = (u, {grid, stops, part, both}) => {
  const left = Math.round(u.bbox.left), top = Math.round(u.bbox.top);
  const wide = Math.round(u.bbox.width), tall = Math.round(u.bbox.height);
  if (wide < 1 || tall < 1) return;
  const canvas = gw.element("canvas", {width: wide, height: tall}), ctx = canvas.getContext("2d");
  const image = ctx.createImageData(wide, tall), pixels = new Uint32Array(image.data.buffer);
  const packed = ([red, green, blue]) => (255 << 24 | blue << 16 | green << 8 | red) >>> 0;
  const table = Array.from({length: 256}, (_, at) => packed(gw.between(stops, at / 255)));
  const [bad, zero] = [packed(gw.BAD), packed(gw.NULL)];
  const {first, width, count} = grid.axis, [from, to] = [u.scales.x.min, u.scales.x.max];
  const bucket = x => Math.floor((from + (to - from) * x / wide - first) / width);
  let previous = null;
  for (let x = 0; x < wide; x++) {
    const begin = Math.max(0, bucket(x)), end = Math.min(count - 1, Math.max(bucket(x), bucket(x + 1) - 1));
    if (begin > end) continue;
    if (previous && previous[0] === begin && previous[1] === end) {
      for (let y = 0; y < tall; y++) pixels[y * wide + x] = pixels[y * wide + x - 1];
      continue;
    }
    previous = [begin, end];
    for (let y = 0; y < tall; y++) {
      const top = Math.floor(y * grid.rows / tall), bottom = Math.max(top, Math.ceil((y + 1) * grid.rows / tall) - 1);
      let colour = 0, furthest = -1;
      for (let at = begin; at <= end; at++) for (let row = top; row <= bottom; row++) {
        const code = grid.code(at, row);
        if (code === gw.MISSING) continue;
        if (code === gw.NOT_FINITE) { colour = bad; furthest = Infinity; continue; }
        const low = grid.lowCode(at, row);
        for (const each of both ? [code, low] : [code]) {
          if (each === gw.ZERO) { if (furthest < 0) colour = zero; continue; }
          const share = part(each, row), far = both ? Math.abs(share - 0.5) : share;
          if (far > furthest) { furthest = far; colour = table[Math.max(0, Math.min(255, Math.round(share * 255)))]; }
        }
      }
      pixels[y * wide + x] = colour;
    }
  }
  gw.enlarge(pixels, wide, tall, bad);
  ctx.putImageData(image, 0, 0);
  u.ctx.drawImage(canvas, left, top);
};

// What is not finite is at least three pixels large, however small its cell is.
gw.enlarge = (pixels, wide, tall, colour) => {
  const found = [];
  for (let at = 0; at < pixels.length; at++) if (pixels[at] === colour) found.push(at);
  if (found.length > pixels.length / 50) return;
  for (const at of found) {
    const x = at % wide, y = (at - x) / wide;
    for (let row = Math.max(0, y - 1); row <= Math.min(tall - 1, y + 1); row++) {
      for (let column = Math.max(0, x - 1); column <= Math.min(wide - 1, x + 1); column++) pixels[row * wide + column] = colour;
    }
  }
};

gw.cellAt = (u, rows, axis) => {
  if (u.cursor.left < 0 || u.cursor.top < 0) return null;
  const at = Math.floor((u.posToVal(u.cursor.left, "x") - axis.first) / axis.width);
  const row = Math.floor(u.posToVal(u.cursor.top, "y"));
  return at >= 0 && at < axis.count && row >= 0 && row < rows ? {at, row} : null;
};

gw.cellText = ({at, row}, mode, grids, names) => {
  const grid = grids[mode === "usual" ? "norm" : mode], code = grid.code(at, row), low = grid.value(grid.lowCode(at, row));
  const shownAt = grid.shown[at], when = shownAt < 0 ? gw.steps(grid.axis, at) : gw.steps(grid.axis, shownAt);
  const label = mode === "update_ratio" ? "update ratio" : "norm", high = grid.value(code);
  let said = code === gw.MISSING ? "no gradient" : code === gw.NOT_FINITE ? "not finite"
    : high === low ? `${label} ${gw.shown(high)}` : `${label} ${gw.shown(low)} … ${gw.shown(high)}`;
  const usual = grids.norm.usual()[row];
  if (mode !== "update_ratio" && high > 0 && usual) said += `, usual ${gw.shown(Math.pow(10, gw.log10(usual)))}`;
  return `${names[row]} · ${when} · ${said}`;
};
