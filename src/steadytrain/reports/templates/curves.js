"use strict";
// What the curves of the report and of the live page have in common.
const curves = (() => {
  const themes = {
    light: { text: "#1b1d21", muted: "#5f6671", line: "#c9cdd3", grid: "#eceef1", page: "#ffffff" },
    dark: { text: "#e4e6e9", muted: "#98a0ab", line: "#454b53", grid: "#24282d", page: "#1b1e22" },
  };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const narrow = matchMedia("(max-width: 720px)");

  // Time runs in the unit that suits the whole run: its name, its seconds, and its short name.
  const unit = (seconds) => (seconds < 180 ? ["seconds", 1, "s"] : seconds < 10800 ? ["minutes", 60, "min"] : ["hours", 3600, "h"]);
  const where = (onEpochs, time) => (onEpochs ? "epoch %{x:.2f}" : `%{x:.2f} ${time[2]}`);
  const title = (onEpochs, time) => ({ text: onEpochs ? "epoch" : `wall time, ${time[0]}`, standoff: 8, font: { size: 12 } });

  function layout({ light = false, x, y, ...more }) {
    const family = getComputedStyle(document.body).fontFamily;
    const now = themes[dark.matches && !light ? "dark" : "light"];
    const lines = { zeroline: false, color: now.muted, tickfont: { color: now.muted }, fixedrange: narrow.matches };
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest", hoverdistance: 40,
      font: { family, size: 12, color: now.muted },
      hoverlabel: { bgcolor: now.page, bordercolor: now.line, align: "left", font: { color: now.text, family, size: 12 } },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: now.line, activecolor: now.muted },
      xaxis: { ...lines, automargin: true, showgrid: false, showline: true, linecolor: now.line, ticks: "outside", ticklen: 4, tickcolor: now.line, ...x },
      yaxis: { ...lines, gridcolor: now.grid, nticks: 6, ...y },
      ...more,
    };
  }
  // The axis of an accuracy: never far beyond 0 and 100 %, where plotly would go around a flat curve.
  const share = { autorangeoptions: { clipmin: -0.02, clipmax: 1.02 } };
  const percent = (value) => (value === null ? null : 100 * value - ((100 * value) % 1 === 0.25) * 1e-9);  // 66.2 of 66.25, as elsewhere on the page

  // Draw a chart; shares are drawn in percent, and written as elsewhere on the page: 85.0 %.
  function draw(box, traces, plan, config) {
    const y = plan.yaxis, clip = y.autorangeoptions;
    if (!/[%p]$/.test(y.tickformat)) return Plotly.react(box, traces, plan, config);
    const bars = ({ array, arrayminus, ...more }) => ({ ...more, array: array.map(percent), arrayminus: arrayminus.map(percent) });
    const shares = traces.map((trace) => ({
      ...trace, y: trace.y.map(percent), hovertemplate: trace.hovertemplate?.replace(/%\{y:(\.\d)%\}/g, "%{y:$1f} %"),
      ...(trace.error_y ? { error_y: bars(trace.error_y) } : {}),
    }));
    const yaxis = {
      ...y, tickformat: y.tickformat.replace(/\.3~p$/, ".4~r").replace(/p$/, "r").replace(/%$/, "f"), ticksuffix: " %", ...(y.range ? { range: y.range.map(percent) } : {}),
      ...(clip ? { autorangeoptions: { clipmin: percent(clip.clipmin), clipmax: percent(clip.clipmax) } } : {}),
    };
    return Plotly.react(box, shares, { ...plan, yaxis }, config);
  }
  return { dark, unit, where, title, layout, share, percent, draw };
})();
