(async () => {
  let told = JSON.parse(document.getElementById("data").textContent);
  let axis = "epoch";
  let printing = false;
  let lit = null;

  function paint() {
    for (const swatch of document.querySelectorAll(".swatch")) {
      const run = told.runs[swatch.dataset.run];
      const line = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" }[run.dash];
      swatch.style.borderTop = `3px ${line} ${run.colour}`;
    }
  }
  const hidden = new Set([...document.querySelectorAll(".legend [aria-pressed=false]")].map((button) => told.runs[button.dataset.toggle].name));
  const press = () => {  // by names: a run's place may change
    for (const button of document.querySelectorAll(".legend [data-toggle]")) button.setAttribute("aria-pressed", !hidden.has(told.runs[button.dataset.toggle].name));
  };

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  let unit = null;

  function hover(figure, trace) {
    if (figure.x) return `${escaped(told.runs[trace.run].name)}<br><b>%{y:${figure.format}}</b> of %{x:.1f} %<extra></extra>`;
    const what = { train: "training ", val: "validation ", only: "" }[trace.role];
    const where = curves.where(axis === "epoch", unit);
    const within = trace.low ? "<br>95 %: %{customdata[1]:.1f} to %{customdata[2]:.1f} %" : "";
    const name = told.runs.length > 1 ? `${escaped(told.runs[trace.run].name)}<br>` : "";
    return `${name}${what}<b>%{y:${figure.format}}</b>${within}<br>${where}, step %{customdata[0]:,}<extra></extra>`;
  }

  function drawn(figure, trace) {
    const run = told.runs[trace.run];
    const train = trace.role === "train";
    const dense = trace.y.length > 1000;
    return {
      type: "scatter",
      mode: figure.x ? "lines" : (trace.role === "val" && trace.y.length <= 60) || trace.y.length === 1 ? "lines+markers" : "lines",
      x: trace.x ? trace.x.map(curves.percent) : axis === "epoch" ? trace.epoch : trace.seconds.map((s) => s / unit[1]),
      y: trace.y,
      customdata: trace.step.map((step, i) => (trace.low ? [step, curves.percent(trace.low[i]), curves.percent(trace.high[i])] : [step])),
      hovertemplate: hover(figure, trace),
      visible: !hidden.has(run.name),
      opacity: lit !== null && lit !== trace.run ? 0.12 : train ? 0.6 : dense ? 0.75 : 1,
      line: { color: run.colour, dash: run.dash, width: trace.role === "val" ? 2.25 : dense ? 0.8 : train ? 1.25 : 1.5 },
      marker: { color: run.colour, size: 6 },
      cliponaxis: false,
    };
  }

  function draw() {
    const longest = Math.max(0, ...told.figures.flatMap((f) => f.traces.map((t) => t.seconds.at(-1) ?? 0)));
    unit = curves.unit(longest);
    for (const figure of told.figures) {
      const here = document.getElementById(`chart-${figure.id}`);
      const wide = here.matches(".first figure:first-child .chart");
      const plan = curves.layout({
        light: printing,
        margin: { l: 8, r: figure.x ? 22 : 10, t: 6, b: 8 },
        width: printing ? (wide ? 670 : 320) : here.clientWidth,
        height: printing ? 200 : here.clientHeight,
        x: figure.x ? { range: [0, 100], dtick: 20, ticksuffix: " %", title: { text: figure.x, standoff: 8, font: { size: 12 } } } : { rangemode: "tozero", title: curves.title(axis === "epoch", unit) },
        y: { automargin: true, exponentformat: "power", rangemode: figure.zero ? "tozero" : "normal", tickformat: { top1: ".3~p", coverage: ".3~p", wait: ".2~%" }[figure.id] ?? "", ...(["top1", "coverage"].includes(figure.id) ? curves.share : {}) },
      });
      curves.draw(here, figure.traces.map((trace) => drawn(figure, trace)), plan, {
        displaylogo: false,
        showSendToCloud: false,
        modeBarButtonsToAdd: [{ name: "full", title: "Full screen", icon: Plotly.Icons.autoscale, click: (box) => (document.fullscreenElement ? document.exitFullscreen() : box.requestFullscreen()) }],
        modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud", "autoScale2d", "zoomIn2d", "zoomOut2d"],
        toImageButtonOptions: { filename: `steadytrain-${figure.id}`, scale: 2 },
      });
    }
  }

  async function load() {
    const library = document.getElementById("library");
    if (!library) return;  // a server's page has it as a file
    const packed = Uint8Array.from(atob(library.textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
    document.getElementById("no-curves").hidden = true;
  }

  curves.show = (given) => {
    told = given;
    const section = document.getElementById("curves");
    if (section) section.hidden = !told.figures.length;
    press();
    paint();
    draw();
  };
  paint();
  await load();
  curves.show(told);

  // The curves of the run at hand stand out: of a button of the legend, or of a row.
  function light(event) {
    const run = Number(event.target.closest?.("[data-lights]")?.dataset.lights ?? NaN);
    const next = Number.isNaN(run) ? null : run;
    if (next === lit) return;
    lit = next;
    for (const figure of told.figures) Plotly.restyle(`chart-${figure.id}`, { opacity: figure.traces.map((trace) => drawn(figure, trace).opacity) });
  }
  for (const kind of ["pointerover", "focusin"]) document.addEventListener(kind, light);
  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => { axis = choice.value; draw(); });
  }
  document.addEventListener("click", (event) => {
    const button = event.target.closest(".legend [data-toggle]");
    if (!button) return;
    const { name } = told.runs[button.dataset.toggle];
    if (!hidden.delete(name)) hidden.add(name);
    press();
    draw();
  });
  curves.dark.addEventListener("change", draw);
  let waiting = 0;
  addEventListener("resize", () => { cancelAnimationFrame(waiting); waiting = requestAnimationFrame(draw); });
  addEventListener("beforeprint", () => {
    printing = true;
    for (const part of document.querySelectorAll("details:not([open])")) { part.open = true; part.dataset.closed = ""; }
    draw();
  });
  addEventListener("afterprint", () => {
    printing = false;
    for (const part of document.querySelectorAll("details[data-closed]")) { part.open = false; delete part.dataset.closed; }
    draw();
  });
  document.body.dataset.ready = "";
})();
