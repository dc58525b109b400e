"use strict";
// The norm of each parameter from input to output, at a chosen step, beside what it was over the whole run.
gw.flow = (place, track, incidents, grids) => {
  const parameters = track.parameters, names = gw.rowNames(parameters), grid = grids.norm, axis = grid.axis;
  const own = gw.incidentsOf(track, incidents);
  const recorded = [];
  for (let at = 0; at < axis.count; at++) if (grid.shown[at] === at) recorded.push(at);
  const slider = gw.element("input", {type: "range", min: 0, max: recorded.length - 1, value: recorded.length - 1, ariaLabel: "step"});
  const when = gw.element("output");
  const jumps = gw.element("span", {className: "jumps"});
  const rows = names.map((_, row) => row);
  const of = at => rows.map(row => grid.value(grid.code(at, row))).map(value => value > 0 ? value : null);
  const usual = rows.map(row => grid.usual()[row] ? Math.pow(10, gw.log10(grid.usual()[row])) : null);
  const [low, high] = gw.extremes(grid, rows);
  const said = gw.element("p", {className: "reading"}, " ");
  place.append(gw.element("p", {className: "controls"}, gw.element("label", {}, "step ", slider), when, jumps));
  const few = names.length <= 60, [grey, blue] = [gw.colour("muted"), gw.colour("before")];
  const ticks = gw.rowTicks(names.length, parameters.together);
  const points = {show: few, size: 5};
  let bad = [];
  const chart = gw.chart(place, {
    height: 280, range: [-0.5, names.length - 0.5],
    series: [
      {label: "at", value: (u, value) => value === null ? "–" : names[value]},
      {label: "largest and smallest of the run", stroke: grey + "60", width: 1, points: {show: false},
        value: (u, value, series, at) => at === null ? "–" : `${gw.shown(u.data[2][at])} … ${gw.shown(value)}`},
      {label: "", stroke: grey + "60", width: 1, points: {show: false}, class: "quiet"},
      {label: "usual", stroke: grey, dash: [5, 4], width: 1.5, points: {show: false}, value: (u, value) => gw.shown(value)},
      {label: axis.width > 1 ? "largest at these steps" : "at this step", stroke: blue, width: 2, points, value: (u, value) => gw.shown(value)},
    ],
    bands: [{series: [1, 2], fill: grey + "28"}],
    scales: {y: {distr: 3, range: () => gw.around([low, high])}},
    hooks: {draw: [u => gw.crosses(u, rows, bad)]},
    axes: [gw.axis({
      label: "parameter: input → output", labelSize: 20, size: 34, splits: () => ticks,
      values: (u, splits) => splits.map(at => Math.round(at * parameters.together).toLocaleString("en")),
    }), gw.logarithmic("gradient norm (L2)")],
  }, [rows, high, low, usual, of(recorded[recorded.length - 1])], null);
  place.append(said);
  const show = position => {
    const at = recorded[position];
    slider.value = position;
    when.textContent = gw.steps(axis, at);
    bad = rows.filter(row => grid.code(at, row) === gw.NOT_FINITE);
    said.textContent = bad.length ? `Not finite at this step: ${bad.length} of ${rows.length} (${bad.slice(0, 3).map(row => names[row]).join(", ")}${bad.length > 3 ? ", …" : ""})` : " ";
    chart.setData([rows, high, low, usual, of(at)], true);
  };
  const nearest = at => {
    let best = 0;
    recorded.forEach((each, position) => { if (each <= at) best = position; });
    return best;
  };
  const bucket = step => Math.max(0, Math.min(axis.count - 1, Math.floor((step - axis.first) / axis.width)));
  const jump = (label, position) => {
    const button = gw.element("button", {type: "button"}, label);
    button.addEventListener("click", () => show(position));
    jumps.append(button);
  };
  jump("first", 0);
  const seen = new Set();
  for (const one of own) {
    const label = `${one.rule || one.name} at ${one.step.toLocaleString("en")}`;
    if (seen.size < 6 && !seen.has(one.step)) jump(label, nearest(bucket(one.step)));
    seen.add(one.step);
  }
  jump("last", recorded.length - 1);
  slider.addEventListener("input", () => show(Number(slider.value)));
  show(own.length ? nearest(bucket(own[0].step)) : recorded.length - 1);
  return at => show(nearest(at));
};

gw.extremes = (grid, rows) => {
  const low = rows.map(() => Infinity), high = rows.map(() => 0);
  for (let at = 0; at < grid.axis.count; at++) for (const row of rows) {
    const top = grid.high[at * grid.rows + row], bottom = grid.low[at * grid.rows + row];
    if (bottom > gw.ZERO && bottom !== gw.NOT_FINITE) low[row] = Math.min(low[row], bottom);
    if (top > gw.ZERO && top !== gw.NOT_FINITE) high[row] = Math.max(high[row], top);
  }
  const power = code => Math.pow(10, gw.log10(code));
  return [low.map(code => code === Infinity ? null : power(code)), high.map(code => code ? power(code) : null)];
};

// How large updates are beside the weights: the largest, the middle and the smallest of all parameters over the steps.
gw.ratios = (section, track, incidents, grids, zoom) => {
  const grid = grids && grids.update_ratio;
  if (!grid) return;
  section.hidden = false;
  const starts = [], largest = [], middle = [], smallest = [];
  const latest = new Array(grid.rows).fill(0);  // parameters take turns
  for (let at = 0; at < grid.axis.count; at++) {
    let fresh = false;
    for (let row = 0; row < grid.rows; row++) {
      const value = grid.value(grid.high[at * grid.rows + row]);
      if (value !== null) [latest[row], fresh] = [value, true];
    }
    const known = latest.filter(value => value > 0);
    if (!fresh || !known.length) continue;
    known.sort((one, other) => one - other);
    starts.push(grid.axis.first + at * grid.axis.width);
    largest.push(known[known.length - 1]);
    middle.push(known[known.length >> 1]);
    smallest.push(known[0]);
  }
  const place = section.querySelector("div"), colour = gw.colour("loss"), points = {show: starts.length < 60, size: 4};
  place.append(gw.element("p", {className: "key"},
    "Norm of the update ÷ norm of the weights, where rules had it measured, of each parameter as last measured. About 1e-3 is usual; weights near zero have more."));
  const own = gw.incidentsOf(track, incidents);
  const line = (label, width) => ({label, stroke: colour, width, points, value: (u, value) => gw.shown(value)});
  gw.chart(place, {
    height: 220, bands: [{series: [1, 3], fill: colour + "28"}],
    series: [gw.stepSeries({first: 0, width: 1}), line("largest", 1), line("median", 2), line("smallest", 1)].map(
      (one, at) => at ? one : {label: "at", value: (u, value) => value === null ? "–" : `step ${value.toLocaleString("en")}`}),
    scales: {y: {distr: 3, range: () => gw.around([largest, smallest])}},
    axes: [gw.stepAxis("step"), gw.logarithmic("update ratio")],
    hooks: {drawAxes: [u => gw.incidentLines(u, own)]},
  }, [starts, largest, middle, smallest], zoom);
};
