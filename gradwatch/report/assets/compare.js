"use strict";
// Total norm and loss of several runs on the same axes.
gw.compare = (place, runs) => {
  const tracks = runs.map(run => run.tracks[0]).filter(Boolean);
  if (tracks.length < 2) return;
  const first = Math.min(...tracks.map(track => track.axis.first)), last = Math.max(...tracks.map(track => track.last));
  const zoom = new gw.Zoom(first, last);
  for (const [name, label, height] of [["total_norm", "total gradient norm (L2)", 280], ["loss", "loss", 220]]) {
    const found = runs.map((run, at) => ({run, at, track: run.tracks[0]})).filter(one => one.track && one.track.curves[name]);
    if (!found.length) continue;
    const steps = [...new Set(found.flatMap(one => gw.starts(one.track.axis)))].sort((one, other) => one - other);
    const position = new Map(steps.map((step, at) => [step, at]));
    const data = [steps], series = [{label: "at", value: (u, value) => value === null ? "–" : `step ${value.toLocaleString("en")}`}], bands = [];
    for (const {run, at, track} of found) {
      const starts = gw.starts(track.axis), colour = gw.colour(["before", "after", "loss", "info"][at % 4]);
      for (const side of gw.bounds(track.curves[name])) {
        const values = new Array(steps.length).fill(undefined);
        side.forEach((value, each) => { values[position.get(starts[each])] = value; });
        data.push(values);
      }
      bands.push({series: [data.length - 2, data.length - 1], fill: colour + "30"});
      series.push(...gw.band(run.name, colour));
    }
    const known = data.slice(1).flat().filter(value => value !== null && value !== undefined);
    const wide = name === "total_norm" || (known.every(value => value > 0) && Math.max(...known) / Math.min(...known) > 20);
    const drawn = wide ? [steps, ...data.slice(1).map(list => list.map(value => value === undefined || value > 0 ? value : null))] : data;
    gw.chart(place, {
      height, series, bands,
      scales: {y: wide ? {distr: 3, range: () => gw.around(drawn.slice(1).map(list => list.filter(value => value)))} : {range: (u, min, max) => gw.roomy(min, max)}},
      axes: [gw.stepAxis("step"), wide ? gw.logarithmic(label) : gw.linear(label)],
    }, drawn, zoom);
  }
};
