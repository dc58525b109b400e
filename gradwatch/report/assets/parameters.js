"use strict";
// The table of parameters: searched, sorted, and one of them drawn over the steps.
gw.MOST_ROWS = 200;
// By importance: where there is no room for all, the last ones are to be scrolled to.
gw.COLUMNS = [
  ["place", "#"], ["name", "parameter"], ["bad", "not finite"], ["usual", "usual norm"], ["high", "largest"], ["high_step", "at step"],
  ["rise", "largest ÷ usual"], ["low", "smallest"], ["fall", "usual ÷ smallest"], ["last", "last norm"], ["numel", "elements"], ["group", "group"],
];

gw.parameters = (place, track, grids, zoom) => {
  const table = track.parameters.table, size = (table.name || []).length;
  if (!size) {
    place.append(gw.element("p", {}, "No norms of parameters were recorded."));
    return () => {};
  }
  const columns = Object.assign({}, table, {place: table.name.map((_, at) => at)});
  const shown = gw.COLUMNS.filter(([name]) => name !== "group" || columns.group.some(group => group));
  const search = gw.element("input", {type: "search", placeholder: "search by name or group", ariaLabel: "search parameters"});
  const count = gw.element("span", {className: "count"});
  const body = gw.element("tbody"), heads = gw.element("tr"), drawn = gw.element("div", {className: "one"});
  let by = null, down = true;
  const order = () => {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = [];
    for (let at = 0; at < size; at++) {
      const text = `${columns.name[at]} ${columns.group[at]}`.toLowerCase();
      if (words.every(word => text.includes(word))) found.push(at);
    }
    if (by) found.sort((one, other) => gw.compared(columns[by][one], columns[by][other], down));
    return found;
  };
  const show = () => {
    const found = order();
    body.replaceChildren(...found.slice(0, gw.MOST_ROWS).map(row));
    const more = found.length > gw.MOST_ROWS ? `, the first ${gw.MOST_ROWS} are shown` : "";
    count.textContent = `${found.length.toLocaleString("en")} of ${size.toLocaleString("en")}${more}`;
  };
  const row = at => {
    const cells = shown.map(([name]) => gw.element("td", {className: name === "name" || name === "group" ? name : name === "bad" ? "number bad" : "number"}, gw.cell(name, columns[name][at])));
    const made = gw.element("tr", {tabIndex: 0, className: columns.bad[at] ? "bad" : ""}, ...cells);
    made.addEventListener("click", () => choose(at));
    made.addEventListener("keydown", event => { if (event.key === "Enter") choose(at); });
    return made;
  };
  const choose = at => {
    drawn.replaceChildren();
    gw.oneParameter(drawn, columns.name[at], grids.norm, Math.floor(at / track.parameters.together), track.parameters.together, zoom);
  };
  for (const [name, label] of shown) {
    const button = gw.element("button", {type: "button"}, label);
    button.addEventListener("click", () => {
      [by, down] = by === name ? [name, !down] : [name, !["name", "group", "place"].includes(name)];
      for (const each of heads.children) each.ariaSort = "none";
      button.parentElement.ariaSort = down ? "descending" : "ascending";
      show();
    });
    heads.append(gw.element("th", {className: name === "name" || name === "group" ? "" : "number"}, button));
  }
  search.addEventListener("input", show);
  place.append(gw.element("p", {className: "controls"}, search, count), drawn,
    gw.element("div", {className: "wide tall"}, gw.element("table", {className: "parameters"}, gw.element("thead", {}, heads), body)));
  show();
  return choose;
};

gw.cell = (name, value) => {
  if (name === "name" || name === "group") return value;
  if (name === "bad") return value ? `${value.toLocaleString("en")} ×` : "";
  if (["numel", "high_step", "place"].includes(name)) return value === null ? "" : value.toLocaleString("en");
  return gw.shown(value);
};

gw.compared = (one, other, down) => {
  if (one === other) return 0;
  if (one === null) return 1;
  if (other === null) return -1;
  const order = typeof one === "string" ? (one < other ? -1 : 1) : one - other;
  return down ? -order : order;
};

gw.oneParameter = (place, name, grid, row, together, zoom) => {
  const axis = grid.axis, high = [], low = [], steps = [], bad = [];
  for (let at = 0; at < axis.count; at++) {
    const code = grid.high[at * grid.rows + row];
    if (code === gw.MISSING) continue;
    if (code === gw.NOT_FINITE) bad.push(steps.length);
    steps.push(axis.first + at * axis.width);
    high.push(grid.value(code));
    low.push(grid.value(grid.low[at * grid.rows + row]));
  }
  place.append(gw.element("h3", {}, together > 1 ? `${name} and its ${together - 1} neighbours` : name));
  if (!steps.length) return place.append(gw.element("p", {}, "It never had a gradient."));
  const colour = gw.colour("before"), data = [steps, gw.positive(high), gw.positive(low)];
  gw.chart(place, {
    height: 200, bands: [{series: [1, 2], fill: colour + "40"}],
    series: [{label: "at", value: (u, value) => value === null ? "–" : `step ${value.toLocaleString("en")}`}, ...gw.band("norm", colour)],
    scales: {y: {distr: 3, range: () => gw.around(data.slice(1))}},
    axes: [gw.stepAxis("step"), gw.logarithmic("gradient norm (L2)")],
    hooks: {draw: [u => gw.crosses(u, steps, bad)]},
  }, data, zoom);
};
