"use strict";
// Draws every run of the page, again where the theme changes.
gw.drawTrack = (article, run, track) => {
  const place = name => {
    const found = article.querySelector("." + name);
    found.replaceChildren();
    return found;
  };
  const zoom = new gw.Zoom(track.axis.first, track.last);
  let choose = () => {}, show = () => {};
  gw.timeline(place("timeline"), track, run, zoom);
  const grids = gw.heatmap(place("heatmap"), track, zoom, (at, row) => { show(at); choose(row); });
  const flow = place("flow");
  if (grids && grids.norm) show = gw.flow(flow, track, run.incidents, grids);
  else flow.append(gw.element("p", {}, "No norms of parameters were recorded."));
  const ratios = article.querySelector(".ratios");
  ratios.hidden = true;
  ratios.querySelector("div").replaceChildren();
  gw.ratios(ratios, track, run.incidents, grids, zoom);
  choose = gw.parameters(place("parameters"), track, grids, zoom);
};

gw.drawRun = (article, run) => {
  if (!run.tracks.length) return;
  const nav = article.querySelector(".tracks");
  nav.hidden = run.tracks.length < 2;
  const chosen = gw.chosen.get(article) ?? gw.gravest(run);
  nav.replaceChildren(...run.tracks.map((track, at) => {
    const button = gw.element("button", {type: "button", ariaPressed: String(at === chosen)}, track.title);
    button.addEventListener("click", () => { gw.chosen.set(article, at); gw.drawRun(article, run); });
    return button;
  }));
  gw.drawTrack(article, run, run.tracks[chosen]);
};
gw.chosen = new Map();

// The track that is shown first: the one of the gravest incidents, of equals the first.
gw.gravest = run => {
  const gravity = {critical: 3, warning: 2};
  const found = run.tracks.map(track =>
    Math.max(0, ...gw.incidentsOf(track, run.incidents).map(one => gravity[one.severity] || 1)));
  return found.indexOf(Math.max(...found));
};

gw.draw = () => {
  for (const chart of gw.made.splice(0)) chart.destroy();
  const runs = JSON.parse(document.getElementById("data").textContent);
  for (const article of document.querySelectorAll("article.run")) gw.drawRun(article, runs[Number(article.dataset.run)]);
  const compare = document.querySelector(".compare");
  if (compare) {
    compare.replaceChildren();
    gw.compare(compare, runs);
  }
};

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", gw.draw);
gw.draw();
document.documentElement.dataset.drawn = "yes";
