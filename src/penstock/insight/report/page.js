// SPDX-License-Identifier: Apache-2.0
// Draws the charts in the colours of the theme, and anew when the theme changes or paper is wanted.
"use strict";
(() => {
  const root = document.documentElement;
  const button = document.getElementById("theme");
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const paperWidthPx = 660; // what A4 and Letter have between their margins, and a little less

  // A probe resolves a name of the palette, as style.css has it, to the colour of the theme.
  const probe = document.createElement("span");
  probe.hidden = true;
  document.body.append(probe);

  function colour(name) {
    const [token, opacity] = name.slice(1).split("/");
    probe.style.color = `var(--${token})`;
    const rgb = getComputedStyle(probe).color;
    return opacity ? rgb.replace("rgb(", "rgba(").replace(")", `, ${opacity})`) : rgb;
  }

  const colourKeys = new Set(["color", "fillcolor"]);

  // Only where Plotly takes a colour: a class may well be called "@read".
  function coloured(value, key) {
    if (typeof value === "string") {
      return colourKeys.has(key) && value.startsWith("@") ? colour(value) : value;
    }
    if (Array.isArray(value)) {
      return value.map((item) => (item && typeof item === "object" ? coloured(item) : item));
    }
    if (value && typeof value === "object") {
      return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, coloured(v, k)]));
    }
    return value;
  }

  function template() {
    const axis = {
      automargin: true,
      color: colour("@muted"),
      gridcolor: colour("@line"),
      linecolor: colour("@line"),
      zerolinecolor: colour("@line"),
      zeroline: false,
      tickfont: { size: 12 },
      title: { font: { size: 12 }, standoff: 10 },
      separatethousands: true,
    };
    return {
      layout: {
        paper_bgcolor: "rgba(0,0,0,0)",
        plot_bgcolor: "rgba(0,0,0,0)",
        font: { family: getComputedStyle(document.body).fontFamily, color: colour("@ink") },
        margin: { l: 8, r: 12, t: 22, b: 8 },
        showlegend: false,
        hovermode: "x unified",
        dragmode: isTouch ? false : "zoom", // a finger is to scroll the page
        hoverlabel: {
          bgcolor: colour("@surface"),
          bordercolor: colour("@line"),
          font: { size: 12, color: colour("@ink") },
          align: "left",
        },
        xaxis: { ...axis, showgrid: true, hoverformat: ",.4~g" },
        yaxis: { ...axis, showgrid: true, ticklabelstandoff: 6 },
      },
    };
  }

  const config = { displayModeBar: false, responsive: true, showTips: false };

  function draw() {
    const theme = template();
    const widthPx = root.classList.contains("paper") ? paperWidthPx : null;
    return Promise.all(
      charts.map(({ key, traces, layout }) => {
        const size = widthPx ? { width: widthPx, autosize: false } : { autosize: true };
        return Plotly.react(
          `plot-${key}`,
          traces.map((trace) => coloured(trace)),
          { ...coloured(layout), ...size, template: theme },
          config,
        );
      }),
    );
  }

  function isDark() {
    return root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches;
  }

  function showTheme() {
    button.setAttribute("aria-pressed", String(isDark()));
    return draw();
  }

  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  systemIsDark.addEventListener("change", showTheme);
  addEventListener("beforeprint", () => {
    root.classList.add("paper");
    draw();
  });
  addEventListener("afterprint", () => {
    root.classList.remove("paper");
    draw();
  });

  showTheme().then(() => {
    root.dataset.drawn = String(charts.length);
  });
})();
