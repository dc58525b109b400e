"use strict";
// Total norm and loss over the steps, with what happened as lines, and what was done in lanes below.
gw.SEVERITIES = {critical: "critical", warning: "warning", info: "info", good: "good"};

// A step number may be that of several processes: each has its own incidents.
gw.incidentsOf = (track, incidents) =>
  incidents.filter(one => one.optimizer === track.optimizer && one.process === track.process);

gw.timeline = (place, track, run, zoom) => {
  const own = gw.incidentsOf(track, run.incidents);
  const healthy = run.last_healthy === null ? [] : [{step: run.last_healthy, severity: "good"}];
  const marks = {drawAxes: [u => gw.incidentLines(u, own.concat(healthy))]};
  const steps = gw.starts(track.axis);
  const legend = gw.element("p", {className: "key"});
  place.append(legend);
  gw.totalNorms(place, track, steps, marks, zoom);
  for (const [name, label] of [["loss", "loss"], ["lr", "learning rate"], ["loss_scale", "loss scale"]]) {
    const curve = track.curves[name];
    if (curve && (name === "loss" || gw.varies(curve))) gw.oneCurve(place, curve, label, steps, marks, zoom);
  }
  gw.lanes(place, track, run.periods.filter(one => one[2] === track.optimizer && one[5] === track.process), zoom);
  legend.append("Drag over a stretch of steps to zoom, double-click for all of them. ",
    track.axis.width > 1 ? `One point is ${track.axis.width.toLocaleString("en")} steps: smallest and largest of them. ` : "",
    "Dashed lines are incidents, crosses at the top values that are NaN or Inf.",
    healthy.length ? ` The green line is the last step after which a checkpoint was healthy (${run.last_healthy.toLocaleString("en")}).` : "");
};

gw.varies = curve => {
  const known = curve.high.concat(curve.low || []).filter(value => value !== null);
  return known.some(value => value !== known[0]);
};

gw.bounds = curve => [curve.high, curve.low || curve.high];

gw.totalNorms = (place, track, steps, marks, zoom) => {
  const [before, applied] = [track.curves.total_norm, track.curves.total_norm_applied];
  if (!before) return;
  const differ = applied && ["high", "low"].some(side => {
    const of = curve => curve[side] || curve.high;
    return of(before).some((value, at) => value !== null && of(applied)[at] !== null
      && Math.abs(of(applied)[at] - value) > 1e-5 * Math.abs(value));
  });
  const [blue, orange] = [gw.colour("before"), gw.colour("after")];
  const data = [steps, ...gw.bounds(before).map(gw.positive)];
  const series = [{}, ...gw.band(differ ? "before clipping" : "total norm", blue)];
  const bands = [{series: [1, 2], fill: blue + "40"}];
  if (differ) {
    data.push(...gw.bounds(applied).map(gw.positive));
    series.push(...gw.band("as applied", orange));
    bands.push({series: [3, 4], fill: orange + "40"});
  }
  series[0] = gw.stepSeries(track.axis);
  gw.chart(place, {
    height: 300, series, bands, scales: {y: {distr: 3, range: () => gw.around(data.slice(1))}},
    axes: [gw.stepAxis("step"), gw.logarithmic("total gradient norm (L2)")],
    hooks: Object.assign({draw: [u => gw.crosses(u, steps, before.bad)]}, marks),
  }, data, zoom);
};

gw.stepSeries = axis => ({
  label: "at", value: (u, value, series, at) => at === null || value === null ? "–" : gw.steps(axis, at),
});

gw.oneCurve = (place, curve, label, steps, marks, zoom) => {
  const [high, low] = gw.bounds(curve);
  const known = high.concat(low).filter(value => value !== null);
  if (!known.length) return;
  const wide = known.every(value => value > 0) && Math.max(...known) / Math.min(...known) > 20;
  const colour = gw.colour("loss");
  const data = [steps, high, low];
  const scale = wide ? {distr: 3, range: () => gw.around(data.slice(1))} : {range: (u, min, max) => gw.roomy(min, max)};
  const axis = {first: steps[0], width: steps.length > 1 ? steps[1] - steps[0] : 1};
  gw.chart(place, {
    height: label === "loss" ? 200 : 150, bands: [{series: [1, 2], fill: colour + "40"}],
    series: [gw.stepSeries(axis), ...gw.band(label, colour)],
    scales: {y: scale}, axes: [gw.stepAxis("step"), wide ? gw.logarithmic(label) : gw.linear(label)],
    hooks: Object.assign({draw: [u => gw.crosses(u, steps, curve.bad)]}, marks),
  }, data, zoom);
};

gw.roomy = (low, high) => {
  const more = (high - low || Math.abs(high) || 1) * 0.08;
  return [low - more, high + more];
};

gw.incidentLines = (u, incidents) => {
  const {left, top, width, height} = u.bbox;
  for (const one of incidents) {
    const x = u.valToPos(one.step, "x", true);
    if (x < left || x > left + width) continue;
    const ctx = u.ctx;
    ctx.save();
    ctx.strokeStyle = ctx.fillStyle = gw.colour(gw.SEVERITIES[one.severity] || "muted");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, top);
    ctx.lineTo(x, top + height);
    ctx.stroke();
    ctx.restore();
  }
};

gw.crosses = (u, steps, bad) => {
  const {left, top, width} = u.bbox, size = 4 * devicePixelRatio, ctx = u.ctx;
  ctx.save();
  ctx.strokeStyle = gw.colour("critical");
  ctx.lineWidth = 2 * devicePixelRatio;
  for (const at of bad) {
    const x = u.valToPos(steps[at], "x", true), y = top + size + 2;
    if (x < left || x > left + width) continue;
    ctx.beginPath();
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size);
    ctx.lineTo(x + size, y - size);
    ctx.stroke();
  }
  ctx.restore();
};

gw.LANES = [
  ["skipped", "steps skipped by a rule", "critical"], ["clipped", "clipped by gradwatch", "after"],
  ["clipped_by_script", "made smaller by the script", "muted"], ["rejected", "rejected by a GradScaler", "warning"],
  ["provisional", "before the loop was known (not judged)", "muted"],
];
gw.LANE = 30;

gw.MOST_RULES = 8;

// A saved state by the shape as well as by the colour: a disc, a ring, a cross.
gw.SAVED = {healthy: "good", "not looked at": "warning", "not healthy": "critical"};
gw.savedLane = saved => {
  if (!saved.length) return [];
  const said = {healthy: "● healthy", "not looked at": "○ not looked at", "not healthy": "✕ not healthy"};
  const kinds = Object.keys(gw.SAVED).filter(kind => saved.some(one => one[1] === kind));
  return [{label: `saved: ${kinds.map(kind => said[kind]).join("  ")}`, saved}];
};

gw.savedMark = (ctx, kind, x, y, size) => {
  ctx.strokeStyle = ctx.fillStyle = gw.colour(gw.SAVED[kind]);
  ctx.lineWidth = size * 0.4;
  ctx.beginPath();
  if (kind === "not healthy") {
    ctx.moveTo(x - size, y - size);
    ctx.lineTo(x + size, y + size);
    ctx.moveTo(x - size, y + size);
    ctx.lineTo(x + size, y - size);
    ctx.stroke();
  } else {
    ctx.arc(x, y, kind === "healthy" ? size : size * 0.8, 0, 2 * Math.PI);
    if (kind === "healthy") ctx.fill(); else ctx.stroke();
  }
};

// One lane for each rule that fired, while it was firing, for each thing that was done at any step, and for saved states.
gw.lanes = (place, track, periods, zoom) => {
  const counts = track.counts, done = gw.LANES.filter(([name]) => counts[name]);
  const lanes = gw.firing(periods).concat(done.map(([name, label, colour]) => ({name, label, colour})), gw.savedLane(track.saved));
  if (!lanes.length) return;
  const {first, width, count} = track.axis;
  const draw = u => {
    const ctx = u.ctx, ratio = devicePixelRatio, {left, top, width: wide} = u.bbox;
    const bar = (from, to, y) => {
      const [begin, end] = [from, to].map(step => u.valToPos(step, "x", true));
      ctx.fillRect(begin, y + 15 * ratio, Math.max(end - begin, 3 * ratio), 11 * ratio);
    };
    ctx.save();
    ctx.beginPath();
    ctx.rect(left, top, wide, u.bbox.height);
    ctx.clip();
    lanes.forEach((lane, row) => {
      const y = top + row * gw.LANE * ratio;
      ctx.fillStyle = gw.colour("lane");
      ctx.fillRect(left, y + 15 * ratio, wide, 11 * ratio);
      ctx.fillStyle = gw.colour("muted");
      [ctx.textAlign, ctx.textBaseline] = ["left", "alphabetic"];
      ctx.font = `${11 * ratio}px system-ui, sans-serif`;
      ctx.fillText(lane.label, left + 2, y + 11 * ratio);
      for (const [, severity, , from, to] of lane.periods || []) {
        ctx.fillStyle = gw.colour(gw.SEVERITIES[severity] || "muted");
        bar(from, to === null ? track.last + 1 : to, y);
      }
      for (const [step, kind] of lane.saved || []) {
        const x = u.valToPos(step, "x", true), size = 4 * ratio;
        if (x < left - 1 || x > left + wide + 1) continue;
        gw.savedMark(ctx, kind, Math.min(Math.max(x, left + size), left + wide - size), y + 20.5 * ratio, size);
      }
      if (lane.periods || lane.saved) return;
      ctx.fillStyle = gw.colour(lane.colour);
      for (let at = 0; at < count; at++) {
        if (!counts[lane.name][at]) continue;
        ctx.globalAlpha = 0.35 + 0.65 * counts[lane.name][at] / Math.max(1, counts.steps[at]);
        bar(first + at * width, first + (at + 1) * width, y);
      }
      ctx.globalAlpha = 1;
    });
    ctx.restore();
  };
  const steps = gw.starts(track.axis);
  gw.chart(place, {
    height: lanes.length * gw.LANE + 44, legend: {show: false}, series: [{}, {show: false}],
    scales: {y: {range: [0, 1]}},
    axes: [gw.stepAxis(null), gw.axis({scale: "y", size: gw.AXIS + 20, grid: {show: false}, ticks: {show: false}, values: () => []})],
    hooks: {draw: [draw]},
  }, [steps, steps.map(() => null)], zoom);
};

// Lanes of rules, the critical ones first, then by their first step; those beyond the most are one lane.
gw.firing = periods => {
  const rank = severity => ["critical", "warning", "info"].indexOf(severity);
  const byRule = new Map();
  for (const one of periods) byRule.set(one[0], (byRule.get(one[0]) || []).concat([one]));
  const rules = [...byRule].sort(([, one], [, other]) => rank(one[0][1]) - rank(other[0][1]) || one[0][3] - other[0][3]);
  const most = rules.length > gw.MOST_RULES ? gw.MOST_RULES - 1 : gw.MOST_RULES;
  const lanes = rules.slice(0, most).map(([rule, found]) => ({label: `firing: ${rule.length > 60 ? rule.slice(0, 60) + "…" : rule}`, periods: found}));
  const rest = rules.slice(most);
  if (rest.length) lanes.push({label: `firing: ${rest.length} other rules`, periods: rest.flatMap(([, found]) => found)});
  return lanes;
};
