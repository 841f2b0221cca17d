"use strict";
(() => {
  const root = document.documentElement;
  const record = (message) => { root.dataset.errors = `${root.dataset.errors ?? ""}${message}\n`; };
  addEventListener("error", (event) => record(event.message));
  addEventListener("unhandledrejection", (event) => record(event.reason));
  addEventListener("securitypolicyviolation", (event) => record(`blocked: ${event.blockedURI}`));

  // Plots: plotly.js is unpacked, then each figure is drawn from the JSON inside its element.
  const unpack = async () => {
    const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const script = document.createElement("script");
    script.textContent = await new Response(stream).text();
    document.head.append(script);
  };

  const template = () => {
    const colour = (name) => getComputedStyle(root).getPropertyValue(`--${name}`).trim();
    const axis = {
      color: colour("quiet"), gridcolor: colour("line"), linecolor: colour("line"), zeroline: false, automargin: true,
      ticks: "outside", ticklen: 4, tickcolor: colour("line"), fixedrange: true, title: { standoff: 10, font: { size: 13 } },
    };
    return { layout: {
      font: { family: colour("font"), size: 12, color: colour("text") },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", dragmode: false, hovermode: "closest",
      hoverlabel: { bgcolor: colour("hover"), bordercolor: colour("line"), font: { color: colour("text") } },
      shapedefaults: { line: { color: colour("quiet") } }, xaxis: axis, yaxis: axis,
    } };
  };

  const hidden = new Set();
  const canvases = [...document.querySelectorAll(".canvas")];
  const figures = new Map(canvases.map((canvas) => [canvas, JSON.parse(canvas.querySelector("script").textContent)]));
  const shown = (canvas) => canvas.offsetParent !== null;
  const draw = (canvas) => {
    const { data, layout } = figures.get(canvas);
    const traces = data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
    return Plotly.react(canvas, traces, { ...layout, width: canvas.clientWidth, template: template() }, { displayModeBar: false });
  };
  const fit = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    const drawn = target.querySelector("svg");
    if (drawn && shown(target) && Number(drawn.getAttribute("width")) !== target.clientWidth) draw(target);
  }));
  canvases.forEach((canvas) => fit.observe(canvas));
  const drawAll = (onlyDrawn = true) => {
    if (!window.Plotly) return;
    canvases.filter((canvas) => shown(canvas) && (!onlyDrawn || canvas.querySelector("svg"))).forEach(draw);
  };

  const start = async () => {
    try {
      await unpack();
    } catch (error) {
      for (const canvas of canvases) {
        canvas.classList.add("failed");
        canvas.textContent = "This browser cannot unpack the plots; the tables hold the numbers.";
      }
      return;
    }
    for (const canvas of canvases.filter(shown)) {
      await draw(canvas);
      await new Promise((done) => setTimeout(done));  // lets the reader scroll meanwhile
    }
    root.dataset.ready = "true";
  };

  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => {
    if (details.open && window.Plotly) details.querySelectorAll(".canvas").forEach(draw);
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
  addEventListener("beforeprint", () => {
    root.classList.add("printing");  // light colours and the width of paper
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
    drawAll(false);
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    drawAll();
  });

  // Runs: a button hides or shows one run in every plot, table and card.
  document.querySelectorAll("[data-toggle]").forEach((button) => button.addEventListener("click", () => {
    const run = Number(button.dataset.toggle);
    if (!hidden.delete(run)) hidden.add(run);
    button.setAttribute("aria-pressed", String(!hidden.has(run)));
    document.querySelectorAll(`[data-run="${run}"]`).forEach((part) => part.classList.toggle("muted", hidden.has(run)));
    drawAll();
  }));

  // Sorting: by the column's loss, best first; a second press turns it round. #sort=nll sorts on load.
  const table = document.getElementById("table");
  const heads = [...table.querySelectorAll("th[data-key]")];
  const sort = (head, descending) => {
    const column = heads.indexOf(head) + 1;
    const loss = (row) => (row.cells[column].dataset.loss === "" ? Infinity : Number(row.cells[column].dataset.loss));
    const rows = [...table.tBodies[0].rows];
    rows.sort((one, other) => {
      const [a, b] = [loss(one), loss(other)];
      if (a === b) return 0;
      if (!isFinite(a) || !isFinite(b)) return isFinite(a) ? -1 : 1;  // unknown values stay last
      return descending ? b - a : a - b;
    });
    table.tBodies[0].append(...rows);
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", descending ? "descending" : "ascending");
  };
  for (const head of heads) {
    head.querySelector("button").addEventListener("click", () => sort(head, head.getAttribute("aria-sort") === "ascending"));
  }
  const sortByAddress = () => {
    const key = decodeURIComponent(location.hash.match(/^#sort=(.+)$/)?.[1] ?? "");
    const head = heads.find((one) => one.dataset.key === key);
    if (head) sort(head, false);
  };
  addEventListener("hashchange", sortByAddress);
  sortByAddress();
  start();
})();
