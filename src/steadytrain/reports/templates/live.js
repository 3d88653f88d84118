"use strict";
(() => {
  const told = JSON.parse(document.getElementById("told").textContent);
  const themes = {
    light: { text: "#1b1d21", muted: "#5f6671", line: "#c9cdd3", grid: "#eceef1", page: "#ffffff", idle: "#e2e4e8" },
    dark: { text: "#e4e6e9", muted: "#98a0ab", line: "#454b53", grid: "#24282d", page: "#1b1e22", idle: "#2b2f35" },
  };
  const colours = { a: "#3d7dd6", b: "#d4691e", c: "#2f9169", grey: "#8b929c", own: "#3d7dd6", ranks: "#8fb8ec", others: "#d4691e", iowait: "#b5431c", steal: "#8a77d8", d: "#8a77d8", e: "#94800f" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 720px)");
  const here = (id) => document.getElementById(id);
  const column = (series, name) => told.columns[series.startsWith("device") ? "device" : series].indexOf(name);

  let series = {};
  let timeline = null;
  let state = null;
  let axis = "seconds";
  let last = "";
  const stale = new Set();

  // Points: everything once, then what is new; a long series is thinned to the least and the greatest of each stretch.
  const thinnedBy = { train: "loss", val: "loss", rate: "steady" };
  function thinned(name, rows) {
    if (rows.length <= told.limit * 1.25) return rows;
    const at = column(name, thinnedBy[name] ?? told.columns[name.startsWith("device") ? "device" : name][1]);
    const stretches = told.limit / 2 - 1;
    const kept = new Set([0, rows.length - 1]);
    for (let k = 0; k < stretches; k += 1) {
      const [from, to] = [1 + Math.floor((k * (rows.length - 2)) / stretches), 1 + Math.floor(((k + 1) * (rows.length - 2)) / stretches)];
      let [least, most] = [from, from];
      for (let i = from; i < to; i += 1) {
        if (rows[i][at] < rows[least][at]) least = i;
        if (rows[i][at] > rows[most][at]) most = i;
      }
      kept.add(least).add(most);
    }
    return [...kept].sort((one, other) => one - other).map((i) => rows[i]);
  }
  function add(rows) {
    for (const [name, fresh] of Object.entries(rows)) {
      series[name] = thinned(name, [...(series[name] ?? []), ...fresh]);
      for (const chart of charts[name.startsWith("device") ? "device" : name] ?? []) stale.add(chart === "device" ? name : chart);
    }
  }
  const charts = { train: ["loss", "top1"], val: ["loss", "top1"], rate: ["rate"], feed: ["feed", "starved"], machine: ["cores", "pressure", "memory"], device: ["device"] };
  const all = ["loss", "top1", "ledger", "rate", "feed", "starved", "cores", "pressure", "memory"];

  // Time runs in the unit that suits the whole run.
  function unit() {
    const seconds = state ? state.seconds : 0;
    return seconds < 180 ? ["seconds", 1, "s"] : seconds < 10800 ? ["minutes", 60, "min"] : ["hours", 3600, "h"];
  }
  const rows = (name) => series[name] ?? [];
  const values = (name, what) => rows(name).map((row) => row[column(name, what)]);
  const times = (name) => values(name, "seconds").map((seconds) => seconds / unit()[1]);
  const along = (name) => (axis === "epoch" ? values(name, "epoch") : times(name));
  const where = () => (axis === "epoch" ? "epoch %{x:.2f}" : `%{x:.2f} ${unit()[2]}`);

  function line(name, what, colour, { x, hover, label = "", ...more } = {}) {
    const y = values(name, what);
    return {
      type: "scatter", x: x ?? times(name), y, mode: y.length === 1 ? "lines+markers" : "lines",
      line: { color: colours[colour] ?? colour, width: 1.75, ...more.line }, marker: { color: colours[colour] ?? colour, size: 6 },
      hovertemplate: `${label}<b>%{y:${hover ?? ".4~r"}}</b><br>%{x:.2f} ${unit()[2]}<extra></extra>`, ...Object.fromEntries(Object.entries(more).filter(([key]) => key !== "line")),
    };
  }
  function area(name, what, colour, label) {
    const trace = line(name, what, colour, { hover: ".2f", label: `${label}: ` });
    return { ...trace, mode: "lines", stackgroup: "one", line: { color: colour, width: 0 }, fillcolor: colour, hovertemplate: `${label}: <b>%{y:.2f}</b> cores<extra></extra>` };
  }
  function learning(what, form) {
    const step = (name) => values(name, "step");
    const train = line("train", what, "a", { x: along("train"), line: { width: 1.4 }, opacity: 0.85, customdata: step("train") });
    const val = line("val", what, "b", { x: along("val"), line: { width: 2.25 }, cliponaxis: false, customdata: step("val") });
    train.hovertemplate = `training <b>%{y:${form}}</b><br>${where()}, step %{customdata:,}<extra></extra>`;
    val.hovertemplate = `validation <b>%{y:${form}}</b><br>${where()}, step %{customdata:,}<extra></extra>`;
    if (val.y.length <= 60) val.mode = "lines+markers";
    const bars = values("val", "low");
    const high = values("val", "high");
    if (what === "top1" && val.y.length <= 60 && high.some((h) => h !== null)) {
      val.error_y = { type: "data", symmetric: false, array: high.map((h, i) => h - val.y[i]), arrayminus: bars.map((l, i) => val.y[i] - l), thickness: 1, width: 2, color: colours.b };
    }
    return [train, val];
  }
  // Slices are stretches of time: each is drawn from where it began to where it ended.
  function steps(bucket) {
    const [x, y] = [[], []];
    bucket.shares.forEach((share, i) => {
      x.push(timeline.edges[i] / unit()[1], timeline.edges[i + 1] / unit()[1]);
      y.push(share, share);
    });
    return { x, y };
  }
  function stacked() {
    if (!timeline) return [];
    return timeline.buckets.map((bucket) => ({
      type: "scatter", mode: "lines", ...steps(bucket), stackgroup: "one", fillcolor: told.buckets[bucket.name].colour,
      line: { color: told.buckets[bucket.name].colour, width: 0.4 }, name: told.buckets[bucket.name].label,
      hovertemplate: `%{y:.1%} ${told.buckets[bucket.name].label}<extra></extra>`,
    }));
  }
  const seen = (name, what) => values(name, what).some((value) => value > 0.005);
  const present = (name, what) => values(name, what).some((value) => value !== null);

  const plans = {
    loss: () => [learning("loss", ".4f"), { epochs: true, title: true }],
    top1: () => [learning("top1", ".2%"), { epochs: true, tickformat: ".0%", title: true }],
    ledger: () => [stacked(), { tickformat: ".0%", range: [0, 1], hovermode: "x unified", title: true }],
    rate: () => [[
      line("rate", "overall", "grey", { x: along("rate"), label: "overall: " }), line("rate", "steady", "a", { x: along("rate"), label: "log line: " }),
    ].map((trace) => ({ ...trace, hovertemplate: trace.hovertemplate.replace(/<br>.*<extra>/, `<br>${where()}<extra>`) })), { epochs: true, zero: true }],
    feed: () => [[line("feed", "depth", "grey", { line: { dash: "dash", width: 1.25 }, hoverinfo: "skip", hovertemplate: undefined }), line("feed", "ready", "a", { fill: "tozeroy", fillcolor: "rgba(61,125,214,0.16)", hover: ".1f" })], { zero: true }],
    starved: () => [[line("feed", "starved", "b", { fill: "tozeroy", fillcolor: "rgba(212,105,30,0.16)", hover: ".0%" })], { tickformat: ".0%", range: [0, 1.04] }],
    cores: () => [[["cpu", colours.own, "this run"], ["ranks", colours.ranks, "other ranks"], ["others", colours.others, "others"], ["iowait", colours.iowait, "disk wait"], ["steal", colours.steal, "stolen"], ["idle", theme().idle, "idle"]]
      .filter(([what]) => seen("machine", what)).map(([what, colour, label]) => area("machine", what, colour, label)), { zero: true, hovermode: "x unified" }],
    pressure: () => [[["cpu", "a", "processors"], ["memory", "b", "memory"], ["io", "c", "disks"]]
      .filter(([what]) => present("machine", `pressure_${what}`)).map(([what, colour, label]) => line("machine", `pressure_${what}`, colour, { hover: ".1%", label: `${label}: ` })), { tickformat: ".0%", zero: true }],
    memory: () => [present("machine", "memory") ? [line("machine", "memory", "a", { hover: ".3s", fill: "tozeroy", fillcolor: "rgba(61,125,214,0.16)" })] : [], { zero: true, tickformat: ".2s", suffix: "B" }],
  };
  const gpu = { utilisation: ["a", "busy"], sm_active: ["c", "multiprocessors"], tensor_active: ["b", "tensor cores"], memory: ["d", "memory"], power: ["e", "power"] };
  function device(name) {
    const shown = Object.entries(gpu).filter(([what]) => present(name, what));
    return [shown.map(([what, [colour, label]]) => line(name, what, colour, { hover: ".0%", label: `${label}: ` })), { tickformat: ".0%", range: [0, 1.04] }];
  }

  const theme = () => themes[dark.matches ? "dark" : "light"];
  function layout(plan) {
    const family = getComputedStyle(document.body).fontFamily;
    const [now, lines] = [theme(), { zeroline: false, color: theme().muted, tickfont: { color: theme().muted }, fixedrange: narrow.matches }];
    const onEpochs = plan.epochs && axis === "epoch";
    const title = onEpochs ? "epoch" : `wall time, ${unit()[0]}`;
    return {
      margin: { l: 46, r: 10, t: 6, b: 8 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
      font: { family, size: 12, color: now.muted }, hovermode: plan.hovermode ?? "closest", hoverdistance: 40, uirevision: axis,
      hoverlabel: { bgcolor: now.page, bordercolor: now.line, align: "left", font: { color: now.text, family, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: now.line, activecolor: now.muted },
      xaxis: {
        ...lines, automargin: true, showgrid: false, showline: true, linecolor: now.line, ticks: "outside", ticklen: 4, tickcolor: now.line, nticks: 8,
        ...(onEpochs ? { rangemode: "tozero" } : { range: [0, Math.max(state ? state.seconds / unit()[1] : 0, 1e-3)] }),
        title: plan.title ? { text: title, standoff: 8, font: { size: 12 } } : undefined, hoverformat: ".2f", unifiedhovertitle: { text: `%{x:.2f} ${unit()[2]}` },
      },
      yaxis: { ...lines, gridcolor: now.grid, nticks: 6, tickformat: plan.tickformat ?? "", ticksuffix: plan.suffix ?? "", rangemode: plan.zero ? "tozero" : "nonnegative", ...(plan.range ? { range: plan.range } : {}) },
    };
  }
  function draw(name) {
    const box = here(`chart-${name}`);
    if (!box) return;
    const [traces, plan] = name.startsWith("device") ? device(name) : plans[name]();
    const drawn = traces.filter((trace) => trace.y.length);
    box.classList.toggle("empty", !drawn.length);
    box.dataset.empty = "no data yet";
    if (!drawn.length) return;
    const made = layout(plan);
    made.width = box.clientWidth;
    made.height = box.clientHeight;
    Plotly.react(box, drawn, made, { displaylogo: false, showSendToCloud: false, displayModeBar: false });
  }
  let waiting = 0;
  function later() {
    if (!waiting) waiting = requestAnimationFrame(() => { waiting = 0; const now = [...stale]; stale.clear(); now.forEach(draw); });
  }
  const redraw = () => { [...all, ...Object.keys(series).filter((name) => name.startsWith("device"))].forEach((name) => stale.add(name)); later(); };

  // Words: always as text, never as markup.
  function element(tag, text, more = {}) {
    return Object.assign(document.createElement(tag), { textContent: text, ...more });
  }
  const say = (id, text) => { if (here(id).textContent !== text) here(id).textContent = text; };
  function heroes(given) {
    const same = here("heroes").children.length === given.length;
    if (!same) here("heroes").replaceChildren(...given.map(() => { const box = element("div", ""); box.append(element("dt", ""), element("dd", "")); return box; }));
    given.forEach((hero, i) => {
      const [name, value] = here("heroes").children[i].children;
      name.textContent = hero.label;
      value.replaceChildren(hero.value, element("small", hero.more));
    });
  }
  function devices(given) {
    here("no-devices").hidden = given.length > 0;
    for (const one of given) {
      if (!here(`chart-device-${one.index}`)) here("devices").append(gpuFigure(one));
      say(`device-${one.index}-now`, one.now || one.missing);
    }
  }
  function gpuFigure(one) {
    const [figure, caption, keys] = [element("figure", ""), element("figcaption", `GPU ${one.index}, ${one.name} `), element("span", "", { className: "keys" })];
    for (const [what, [colour, label]] of Object.entries(gpu)) {
      if (!present(`device-${one.index}`, what)) continue;
      const key = element("span", "", { className: "key" });
      key.append(element("span", "", { className: `line ${colour}` }), label);
      keys.append(key);
    }
    caption.append(element("small", "", { id: `device-${one.index}-now` }), keys);
    const chart = element("div", "", { className: "chart", id: `chart-device-${one.index}`, role: "img", ariaLabel: `What GPU ${one.index} did` });
    figure.append(caption, chart);
    stale.add(`device-${one.index}`);
    return figure;
  }
  function showState(given) {
    const before = state;
    state = given;
    document.title = `${given.percent ? `${given.percent} · ` : ""}${document.querySelector("h1").textContent}`;
    here("standing").className = `standing ${given.status}${given.silent ? " silent" : ""}`;
    say("standing-text", given.standing);
    here("progress").hidden = !given.steps;
    here("bar").value = given.share;
    for (const id of ["percent", "epochs", "steps", "feed", "starved", "cores", "memory"]) say(id, given[id]);
    if (!before || before.alarms.join("\n") !== given.alarms.join("\n")) here("alarms").replaceChildren(...given.alarms.map((text) => element("p", text, { className: "alarm" })));
    say("score", given.score);
    here("chart-top1").setAttribute("aria-label", `Curve of the ${given.score}`);
    heroes(given.heroes);
    devices(given.devices);
    for (const key of document.querySelectorAll("#chart-cores-keys .key")) key.hidden = !seen("machine", key.firstChild.className.split(" ")[1].replace("own", "cpu"));
    if (!before || before.seconds !== given.seconds) redraw(); else later();
  }
  function showAccount(given) {
    timeline = given.timeline;
    say("wall", given.wall ? `${given.wall} in all` : "");
    here("accounts").replaceChildren(...given.rows.map((row) => {
      const [line, name] = [element("tr", ""), element("th", "", { scope: "row" })];
      const swatch = element("span", "", { className: "box" });
      swatch.style.background = told.buckets[row.name].colour;
      name.append(swatch, row.label);
      line.append(name, element("td", row.share), element("td", row.seconds));
      return line;
    }));
    showVerdict(given.verdict);
    say("missing", given.missing ? `Not measurable here: ${given.missing}.` : "");
    here("happened").replaceChildren(...given.happened.map((one) => {
      const line = element("tr", "", { className: one.tone });
      line.append(element("td", one.when), element("td", one.step), element("td", one.what));
      return line;
    }));
    stale.add("ledger");
    later();
  }
  function showVerdict(given) {
    here("verdict").hidden = !given;
    if (!given) return;
    say("sentence", given.sentence);
    here("change").replaceChildren(...(given.change ? ["Change: ", element(given.typed ? "code" : "b", given.change), element("small", given.saves)] : []));
    say("ceiling", given.ceiling);
    here("then").replaceChildren(...given.then.map((one) => element("li", one.sentence)));
    here("evidence").replaceChildren(...given.evidence.map((text) => element("li", text)));
  }

  // Events: while nobody looks at the page the connection is closed, and the server has nothing to do.
  let source = null;
  function open() {
    if (source || document.hidden) return;
    source = new EventSource(`/events?after=${encodeURIComponent(last)}`);
    const on = (kind, take) => source.addEventListener(kind, (event) => { if (event.lastEventId) last = event.lastEventId; here("lost").hidden = true; take(JSON.parse(event.data)); });
    on("reading", (share) => say("standing-text", `reading the events, ${Math.round(100 * share)} %`));
    on("all", (rows) => { series = {}; add(rows); redraw(); });
    on("more", (rows) => { add(rows); later(); });
    on("account", showAccount);
    on("state", (given) => { showState(given); document.body.dataset.ready = ""; });
    source.addEventListener("error", () => {
      here("lost").hidden = false;
      if (source && source.readyState === EventSource.CLOSED) { shut(); setTimeout(open, 5000); }  // too many pages are open
    });
  }
  function shut() {
    if (source) source.close();
    source = null;
  }
  document.addEventListener("visibilitychange", () => (document.hidden ? shut() : open()));
  addEventListener("pagehide", shut);
  addEventListener("pageshow", open);
  dark.addEventListener("change", redraw);
  addEventListener("resize", redraw);
  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => { axis = choice.value; redraw(); });
  }
  open();
})();
