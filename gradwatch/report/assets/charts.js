"use strict";
// What all charts share: colours of the theme, elements without innerHTML, numbers, and one zoom over the steps.
const gw = {};

gw.colour = name => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

gw.element = (tag, fields = {}, ...children) => {
  const made = Object.assign(document.createElement(tag), fields);
  made.append(...children);
  return made;
};

gw.shown = value => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  return size >= 1e5 || size < 1e-3 ? value.toExponential(2).replace("e+", "e") : String(+value.toPrecision(4));
};

gw.steps = (axis, at) => {
  const from = axis.first + at * axis.width;
  return axis.width === 1 ? `step ${from.toLocaleString("en")}`
    : `steps ${from.toLocaleString("en")}–${(from + axis.width - 1).toLocaleString("en")}`;
};

gw.starts = axis => Array.from({length: axis.count}, (_, at) => axis.first + at * axis.width);

// Ticks of a logarithmic axis: powers of ten, as many as there is room for.
gw.power = value => {
  const exponent = Math.log10(value);
  if (Math.abs(exponent - Math.round(exponent)) > 1e-9) return "";
  const whole = Math.round(exponent);
  return whole >= -2 && whole <= 4 ? String(+Math.pow(10, whole).toPrecision(1)) : "1e" + whole;
};

// The charts of one optimizer: a range of steps that all show, set by dragging over any of them.
gw.Zoom = class {
  constructor(first, last) {
    this.full = [first, Math.max(last + 1, first + 1)];
    this.range = this.full;
    this.charts = [];
    this.key = "zoom" + (gw.Zoom.made = (gw.Zoom.made || 0) + 1);
  }
  to(range) {
    this.range = range && range[1] - range[0] >= 1 ? range : this.full;
    for (const chart of this.charts) chart.setScale("x", {min: this.range[0], max: this.range[1]});
  }
};

gw.AXIS = 62;  // pixels left of every plot, so that the same step stands above itself

gw.axis = more => Object.assign({
  stroke: gw.colour("muted"), font: "11px system-ui, sans-serif", labelFont: "12px system-ui, sans-serif",
  grid: {stroke: gw.colour("grid"), width: 1}, ticks: {stroke: gw.colour("grid"), width: 1},
}, more);

// Ticks of a logarithmic axis: tens, and between them where there are few tens. uPlot's own want a range of whole decades.
gw.tens = (u, axis, low, high) => {
  const from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high));
  const factors = to - from <= 3 ? [1, 2, 3, 4, 5, 6, 7, 8, 9] : [1], found = [];
  for (let power = from; power <= to; power++) for (const factor of factors) {
    const value = factor * Math.pow(10, power);
    if (value >= low && value <= high) found.push(value);
  }
  return found;
};

gw.logarithmic = label => gw.axis({
  scale: "y", size: gw.AXIS, label, labelSize: 20, splits: gw.tens, filter: (u, splits) => splits,
  values: (u, splits) => {
    const powers = splits.filter(value => gw.power(value) !== "").length;
    const each = Math.max(1, Math.ceil(powers * 20 / (u.bbox.height / devicePixelRatio)));
    const bare = powers < 2;  // then numbers between the tens are written too
    return splits.map(value => {
      const said = gw.power(value);
      if (said === "") return bare && [2, 5].includes(Math.round(value / Math.pow(10, Math.floor(Math.log10(value))))) ? gw.shown(value) : "";
      return Math.round(Math.log10(value)) % each === 0 ? said : "";
    });
  },
});

// Round numbers between two bounds, `pixels` apart. uPlot's own never end where a step is too small to be added.
gw.even = (u, low, high, length, pixels, least) => {
  const rough = Math.max(least, (high - low) / Math.max(1, length / devicePixelRatio / pixels));
  const power = Math.pow(10, Math.floor(Math.log10(rough)));
  const step = [1, 2, 2.5, 5, 10].map(factor => factor * power).find(size => size >= rough * 0.999 && size >= least);
  const first = Math.ceil(low / step), found = [];
  if (!Number.isFinite(first) || !Number.isFinite(step)) return [low, high];
  for (let at = 0; at < 100 && (first + at) * step <= high; at++) found.push((first + at) * step);
  return [...new Set(found)];
};

gw.linear = label => gw.axis({
  scale: "y", size: gw.AXIS, label, labelSize: 20,
  splits: (u, axis, low, high) => gw.even(u, low, high, u.bbox.height, 36, 0),
  values: (u, splits) => splits.map(gw.shown),
});

gw.stepAxis = label => gw.axis({
  label, labelSize: 20, size: 34,
  splits: (u, axis, low, high) => gw.even(u, low, high, u.bbox.width, 75, 1),
  values: (u, splits) => splits.map(value => Number.isInteger(value) ? value.toLocaleString("en") : ""),
});

// A chart as wide as its place; `zoom` null: its x axis is of its own.
gw.chart = (place, options, data, zoom) => {
  const width = () => Math.max(260, place.clientWidth);
  const hooks = options.hooks || {};
  const made = new uPlot(Object.assign({}, options, {
    width: width(),
    padding: [8, 26, 0, 0],
    scales: Object.assign({x: {time: false, range: () => zoom ? zoom.range : options.range}}, options.scales),
    cursor: Object.assign({
      drag: {x: Boolean(zoom), y: false, setScale: false},
      bind: zoom ? {dblclick: () => () => { zoom.to(null); return null; }} : {},
    }, zoom ? {sync: {key: zoom.key, scales: ["x", null]}} : {}, options.cursor),
    hooks: Object.assign({}, hooks, zoom ? {setSelect: [u => {
      if (u.select.width < 4) return;
      const range = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
      u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      zoom.to(range);
    }]} : {}),
  }), data, place);
  if (zoom) zoom.charts.push(made);
  gw.made.push(made);
  new ResizeObserver(() => {
    if (made.width !== width()) made.setSize({width: width(), height: options.height});
  }).observe(place);
  return made;
};
gw.made = [];

gw.FEW = 40;  // points up to which each is drawn: a line of one would not be seen

// The lower bound, drawn with the upper one as a band; both the same where a bucket is one step.
gw.band = (label, colour, more) => {
  const points = {show: u => u.data[0].length <= gw.FEW, size: 5};
  const between = (u, value, series, at) => {
    if (at === null || value === null || value === undefined) return gw.shown(value);
    const low = u.data[series + 1][at];
    return low === null || low === undefined || low === value ? gw.shown(value) : `${gw.shown(low)} … ${gw.shown(value)}`;
  };
  return [
    Object.assign({label, stroke: colour, width: 1.5, points, value: between}, more),
    Object.assign({label: "", stroke: colour, width: 1, points, class: "quiet"}, more),
  ];
};

gw.positive = values => values.map(value => value !== null && value > 0 ? value : null);

// The range of a logarithmic scale: a little more than the data, and never nothing.
gw.around = lists => {
  let low = Infinity, high = 0;
  for (const list of lists) for (const value of list) {
    if (value === null || !(value > 0)) continue;
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  if (!high) return [0.1, 10];
  const more = Math.max(1.3, Math.pow(high / low, 0.05));
  let bounds = [low / more, high * more];
  if (bounds[1] / bounds[0] < 12) bounds = [bounds[0] / 2, bounds[1] * 2];
  return bounds.map(bound => Math.min(Math.max(bound, 1e-300), 1e300));
};
