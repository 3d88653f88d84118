(() => {
  const told = JSON.parse(document.getElementById("told").textContent);
  const here = (id) => document.getElementById(id);
  const column = (series, name) => told.columns[series.startsWith("device") ? "device" : series].indexOf(name);

  let series = {};
  let timeline = null;
  let state = null;
  let axis = "seconds";
  let last = "";
  const stale = new Set();

  // Points: everything once, then what is new; a long series is thinned to the least and the greatest of each stretch.
  function thinned(name, rows) {
    if (rows.length <= told.limit * 1.25) return rows;
    const at = told.thinned[name] ?? 1;
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
      (of[name] ?? [name]).forEach((chart) => stale.add(chart));
    }
  }
  // The charts of a series; a GPU's series has one of its own name.
  const of = { train: ["loss", "top1"], val: ["loss", "top1"] };
  for (const chart of told.charts) (of[chart.series] ??= []).push(chart.id);
  const all = ["loss", "top1", "ledger", ...told.charts.map((chart) => chart.id)];

  const unit = () => curves.unit(state ? state.seconds : 0);
  const rows = (name) => series[name] ?? [];
  const values = (name, what) => rows(name).map((row) => row[column(name, what)]);
  const times = (name) => values(name, "seconds").map((seconds) => seconds / unit()[1]);
  const hasEpochs = (name) => axis === "epoch" && column(name, "epoch") >= 0;
  const along = (name) => (hasEpochs(name) ? values(name, "epoch") : times(name));
  const where = (name) => curves.where(hasEpochs(name), unit());
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const seen = (name, what) => values(name, what).some((value) => value > 0.005);
  const present = (name, what) => values(name, what).some((value) => value !== null);

  function line(name, what, colour, { width = 1.75, ...more } = {}) {
    const y = values(name, what);
    return { type: "scatter", x: along(name), y, mode: y.length === 1 ? "lines+markers" : "lines", line: { color: colour, width }, marker: { color: colour, size: 6 }, ...more };
  }
  function learning(what, form) {
    const hover = (of, name) => ({ customdata: values(name, "step"), hovertemplate: `${of} <b>%{y:${form}}</b><br>${where(name)}, step %{customdata:,}<extra></extra>` });
    const train = line("train", what, colour("a"), { width: 1.4, opacity: 0.85, ...hover("training", "train") });
    const val = line("val", what, colour("b"), { width: 2.25, cliponaxis: false, ...hover("validation", "val") });
    if (val.y.length <= 60) val.mode = "lines+markers";
    const bars = values("val", "low");
    const high = values("val", "high");
    if (what === "top1" && val.y.length <= 60 && high.some((h) => h !== null)) {
      val.error_y = { type: "data", symmetric: false, array: high.map((h, i) => h - val.y[i]), arrayminus: bars.map((l, i) => val.y[i] - l), thickness: 1, width: 2, color: colour("b") };
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
  // A chart of the table: its curves as far as there are any, one upon the other or each for itself.
  function drawn(chart, name) {
    const several = chart.curves.filter((curve) => curve.look !== "limit").length > 1;
    return chart.curves.filter((curve) => (chart.stacked ? seen : present)(name, curve.column)).map((curve) => {
      const [own, label] = [colour(curve.colour), several ? `${curve.label}: ` : ""];
      if (chart.stacked) return { ...line(name, curve.column, own, { width: 0 }), mode: "lines", stackgroup: "one", fillcolor: own, hovertemplate: `${label}<b>%{y:${chart.hover}}</b> ${chart.unit}<extra></extra>` };
      if (curve.look === "limit") return line(name, curve.column, own, { line: { color: own, width: 1.25, dash: "dash" }, hoverinfo: "skip" });
      const fill = curve.look === "area" ? { fill: "tozeroy", fillcolor: `${own}29` } : {};
      return line(name, curve.column, own, { hovertemplate: `${label}<b>%{y:${chart.hover}}</b><br>${where(name)}<extra></extra>`, ...fill });
    });
  }
  const plans = {
    loss: () => [learning("loss", ".4f"), { epochs: true, title: true }],
    top1: () => [learning("top1", ".1%"), { epochs: true, ticks: ".3~p", title: true, share: true }],
    ledger: () => [stacked(), { ticks: ".0%", range: [0, 1], hovermode: "x unified", title: true }],
  };
  for (const chart of told.charts) plans[chart.id] = (name = chart.series) => [drawn(chart, name), { ...chart, title: false, epochs: column(chart.series, "epoch") >= 0, zero: true, hovermode: chart.stacked ? "x unified" : "closest" }];

  function layout(plan) {
    const onEpochs = plan.epochs && axis === "epoch";
    return curves.layout({
      margin: { l: 46, r: 10, t: 6, b: 8 }, hovermode: plan.hovermode ?? "closest", uirevision: axis,
      x: {
        nticks: 8, hoverformat: ".2f", unifiedhovertitle: { text: `%{x:.2f} ${unit()[2]}` }, title: plan.title ? curves.title(onEpochs, unit()) : undefined,
        ...(onEpochs ? { rangemode: "tozero" } : { range: [0, Math.max(state ? state.seconds / unit()[1] : 0, 1e-3)] }),
      },
      y: { tickformat: plan.ticks ?? "", ticksuffix: plan.suffix ?? "", rangemode: plan.zero ? "tozero" : "nonnegative", ...(plan.range ? { range: plan.range } : {}), ...(plan.share ? curves.share : {}) },
    });
  }
  function draw(name) {
    const box = here(`chart-${name}`);
    if (!box) return;
    const [traces, plan] = name.startsWith("device") ? plans.device(name) : plans[name]();
    const drawn = traces.filter((trace) => trace.y.length);
    box.classList.toggle("empty", !drawn.length);
    const isOver = state && !["waiting", "running"].includes(state.status);
    const isLearning = ["loss", "top1"].includes(name), isPoint = drawn.every((trace) => trace.y.length < 2);  // as of a probe
    box.closest("figure").hidden = isLearning ? isOver && isPoint : !drawn.length && Boolean(isOver || (state?.percent && !state.steps));
    if (isLearning) box.closest("section").hidden = !box.closest(".grid").querySelector("figure:not([hidden])");
    if (!drawn.length || box.closest("figure").hidden) return;
    const made = layout(plan);
    made.width = box.clientWidth;
    made.height = box.clientHeight;
    curves.draw(box, drawn, made, { displaylogo: false, showSendToCloud: false, displayModeBar: false });
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
    for (const curve of told.charts.find((chart) => chart.id === "device").curves) {
      if (!present(`device-${one.index}`, curve.column)) continue;
      const key = element("span", "", { className: "key" });
      key.append(element("span", "", { className: `line ${curve.colour}` }), curve.label);
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
    here("progress").hidden = !given.percent;
    here("bar").value = given.share;
    for (const id of ["percent", "epochs", "steps", "feed", "starved", "cores", "memory"]) say(id, given[id]);
    if (!before || before.alarms.join("\n") !== given.alarms.join("\n")) here("alarms").replaceChildren(...given.alarms.map((text) => element("p", text, { className: "alarm" })));
    say("score", given.score);
    here("chart-top1").setAttribute("aria-label", `Curve of the ${given.score}`);
    heroes(given.heroes);
    devices(given.devices);
    for (const key of document.querySelectorAll("[data-stacked]")) key.hidden = !seen(key.dataset.stacked, key.dataset.column);
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
    here("happened").replaceChildren(...given.happened.map((one, k) => {
      const line = element("tr", "", { className: one.tone });
      const day = given.happened[k - 1]?.day === one.day ? "" : one.day;  // said once, as in the report
      line.append(element("td", `${day} ${one.time}`.trim()), element("td", one.step), element("td", one.what));
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
    source = new EventSource(`events?after=${encodeURIComponent(last)}`);
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
  curves.dark.addEventListener("change", redraw);
  addEventListener("resize", redraw);
  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => { axis = choice.value; redraw(); });
  }
  open();
})();
