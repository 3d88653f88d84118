"use strict";
(async () => {
  const told = JSON.parse(document.getElementById("data").textContent);
  const themes = {
    light: { text: "#1b1d21", muted: "#5f6671", line: "#c9cdd3", grid: "#eceef1", page: "#ffffff" },
    dark: { text: "#e4e6e9", muted: "#98a0ab", line: "#454b53", grid: "#24282d", page: "#1b1e22" },
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 720px)");
  const shown = told.runs.map(() => true);
  let axis = "epoch";
  let printing = false;

  for (const swatch of document.querySelectorAll(".swatch")) {
    const run = told.runs[swatch.dataset.run];
    const line = { solid: "solid", dash: "dashed", dot: "dotted", dashdot: "dashed" }[run.dash];
    swatch.style.borderTop = `3px ${line} ${run.colour}`;
  }

  const escaped = (text) => text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  const longest = Math.max(0, ...told.figures.flatMap((f) => f.traces.map((t) => t.seconds.at(-1) ?? 0)));
  const unit = longest < 180 ? ["seconds", 1, "s"] : longest < 10800 ? ["minutes", 60, "min"] : ["hours", 3600, "h"];

  function hover(figure, trace) {
    const what = { train: "training ", val: "validation ", only: "" }[trace.role];
    const where = axis === "epoch" ? "epoch %{x:.2f}" : `%{x:.2f} ${unit[2]}`;
    const within = trace.low ? "<br>95 %: %{customdata[1]:.2%} to %{customdata[2]:.2%}" : "";
    const name = told.runs.length > 1 ? `${escaped(told.runs[trace.run].name)}<br>` : "";
    return `${name}${what}<b>%{y:${figure.format}}</b>${within}<br>${where}, step %{customdata[0]:,}<extra></extra>`;
  }

  function drawn(figure, trace) {
    const run = told.runs[trace.run];
    const train = trace.role === "train";
    const dense = trace.y.length > 1000;
    return {
      type: "scatter",
      mode: (trace.role === "val" && trace.y.length <= 60) || trace.y.length === 1 ? "lines+markers" : "lines",
      x: axis === "epoch" ? trace.epoch : trace.seconds.map((s) => s / unit[1]),
      y: trace.y,
      customdata: trace.step.map((step, i) => (trace.low ? [step, trace.low[i], trace.high[i]] : [step])),
      hovertemplate: hover(figure, trace),
      visible: shown[trace.run],
      opacity: train ? 0.6 : dense ? 0.75 : 1,
      line: { color: run.colour, dash: run.dash, width: trace.role === "val" ? 2.25 : dense ? 0.8 : train ? 1.25 : 1.5 },
      marker: { color: run.colour, size: 6 },
    };
  }

  function layout(theme) {
    const family = getComputedStyle(document.body).fontFamily;
    const lines = { zeroline: false, color: theme.muted, tickfont: { color: theme.muted }, fixedrange: narrow.matches };
    const title = axis === "epoch" ? "epoch" : `wall time, ${unit[0]}`;
    return {
      margin: { l: 8, r: 10, t: 6, b: 8 },
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family, size: 12, color: theme.muted },
      showlegend: false,
      hovermode: "closest",
      hoverdistance: 40,
      hoverlabel: { bgcolor: theme.page, bordercolor: theme.line, align: "left", font: { color: theme.text, family, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: theme.line, activecolor: theme.muted },
      xaxis: {
        ...lines, automargin: true, rangemode: "tozero", showgrid: false, showline: true, linecolor: theme.line, ticks: "outside",
        ticklen: 4, tickcolor: theme.line, title: { text: title, standoff: 8, font: { size: 12 } },
      },
      yaxis: { ...lines, automargin: true, gridcolor: theme.grid, nticks: 6 },
    };
  }

  function draw() {
    const theme = themes[dark.matches && !printing ? "dark" : "light"];
    for (const figure of told.figures) {
      const here = document.getElementById(`chart-${figure.id}`);
      const plan = layout(theme);
      plan.yaxis.rangemode = figure.zero ? "tozero" : "normal";
      plan.yaxis.tickformat = { top1: ".0%", wait: ".2~%" }[figure.id] ?? "";
      const wide = here.matches(".first figure:first-child .chart");
      plan.width = printing ? (wide ? 670 : 320) : here.clientWidth;
      plan.height = printing ? 200 : here.clientHeight;
      Plotly.react(here, figure.traces.map((trace) => drawn(figure, trace)), plan, {
        displaylogo: false,
        showSendToCloud: false,
        modeBarButtonsToRemove: ["select2d", "lasso2d", "sendChartToCloud", "autoScale2d", "zoomIn2d", "zoomOut2d"],
        toImageButtonOptions: { filename: `steadytrain-${figure.id}`, scale: 2 },
      });
    }
  }

  async function load() {
    const packed = Uint8Array.from(atob(document.getElementById("library").textContent), (c) => c.charCodeAt(0));
    const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(unpacked).text();
    document.head.append(script);
  }

  await load();
  document.getElementById("no-curves").hidden = true;
  draw();

  for (const choice of document.querySelectorAll("input[name=axis]")) {
    choice.addEventListener("change", () => { axis = choice.value; draw(); });
  }
  for (const button of document.querySelectorAll("[data-toggle]")) {
    button.addEventListener("click", () => {
      const run = button.dataset.toggle;
      shown[run] = !shown[run];
      button.setAttribute("aria-pressed", shown[run]);
      draw();
    });
  }
  dark.addEventListener("change", draw);
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
