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

  // The points that none beats in both, from cheap to good, among those that are shown.
  const paretoFront = (traces) => {
    const points = traces.filter((trace) => trace.visible && trace.meta !== "front").map((t) => [value(t.x), value(t.y)]);
    points.sort((a, b) => a[0] - b[0] || a[1] - b[1]);
    const best = points.filter((point, i) => points.slice(0, i).every((other) => other[1] > point[1]));
    return { x: best.map((point) => point[0]), y: best.map((point) => point[1]) };
  };
  const value = (list) => Number(list[0]);

  // Curves of several runs have a legend of their own, under them; it names those that are shown.
  const legendBelow = (traces, layout, width) => {
    const curves = traces.filter((t) => t.visible && t.name && t.showlegend !== false && Number.isInteger(t.meta) && /lines/.test(t.mode));
    if (layout.showlegend || curves.length < 2) return {};
    const rows = Math.ceil(curves.reduce((sum, t) => sum + 7 * t.name.length + 55, 0) / Math.max(width - 70, 1));
    const legend = { orientation: "h", x: 0, y: 0, yref: "container", yanchor: "bottom", itemclick: false, itemdoubleclick: false, font: { size: 11 } };
    const room = 20 * rows + 8;
    return { showlegend: true, legend, height: layout.height + room, margin: { ...layout.margin, b: layout.margin.b + room } };
  };

  // A plot of one line a run has as many lines as there are runs shown; layout.meta is the height of one in pixels.
  const onlyShownLines = (traces, layout) => {
    if (!layout.meta) return {};
    const lines = (some) => new Set(some.filter((t) => Number.isInteger(t.meta)).map((t) => t.meta)).size;
    const count = Math.max(lines(traces.filter((t) => t.visible)), 1);
    const yaxis = layout.yaxis.range ? { ...layout.yaxis, range: [-0.6, count - 0.4] } : layout.yaxis;
    return { yaxis, height: layout.height - layout.meta * (lines(traces) - count) };
  };

  const table = document.getElementById("table");
  const hidden = new Set();
  const canvases = [...document.querySelectorAll(".canvas")];
  const figures = new Map(canvases.map((canvas) => [canvas, JSON.parse(canvas.querySelector("script").textContent)]));
  const shown = (canvas) => canvas.offsetParent !== null;
  const draw = (canvas) => {
    const { data, layout } = figures.get(canvas);
    const traces = data.map((trace) => ({ ...trace, visible: !hidden.has(trace.meta) }));
    for (const front of traces.filter((trace) => trace.meta === "front")) Object.assign(front, paretoFront(traces));
    const beside = { ...onlyShownLines(traces, layout), ...legendBelow(traces, layout, canvas.clientWidth) };
    if (beside.height) canvas.style.height = `${beside.height}px`;
    return Plotly.react(canvas, traces, { ...layout, ...beside, width: canvas.clientWidth, template: template() }, { displayModeBar: false });
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

  // A link to a part that is folded opens it.
  const openLinked = () => {
    const linked = document.getElementById(location.hash.slice(1));
    if (linked?.matches("details")) linked.open = true;
  };
  addEventListener("hashchange", openLinked);
  openLinked();
  document.querySelectorAll("details").forEach((details) => details.addEventListener("toggle", () => {
    if (details.open && window.Plotly) details.querySelectorAll(".canvas").forEach(draw);
  }));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => drawAll());
  // Paper does not scroll sideways: the results are printed as several tables of a few columns each.
  const splitTable = () => {
    const parts = [];  // [first column, last column, first group, last group]
    let column = 1;
    [...table.tHead.rows[0].cells].slice(1).forEach((group, index) => {
      const last = parts.at(-1);
      const end = column + group.colSpan - 1;
      if (last && end - last[0] < 8) [last[1], last[3]] = [end, index + 1];
      else parts.push([column, end, index + 1, index + 1]);
      column = end + 1;
    });
    for (const [low, high, first, final] of parts) {
      const copy = table.cloneNode(true);
      copy.removeAttribute("id");
      copy.classList.add("copy");
      [...copy.rows].forEach((row, number) => [...row.cells].forEach((cell, index) => {
        const [from, to] = number ? [low, high] : [first, final];
        if (index && (index < from || index > to)) cell.remove();
      }));
      table.parentElement.append(copy);
    }
  };
  addEventListener("beforeprint", () => {
    root.classList.add("printing");  // light colours and the width of paper
    document.querySelectorAll("details").forEach((details) => { details.open = true; });
    drawAll(false);
    splitTable();
    for (const wide of document.querySelectorAll(".scroll table")) {
      wide.style.zoom = Math.min(1, wide.parentElement.clientWidth / wide.scrollWidth || 1);
    }
  });
  addEventListener("afterprint", () => {
    root.classList.remove("printing");
    document.querySelectorAll(".copy").forEach((copy) => copy.remove());
    document.querySelectorAll(".scroll table").forEach((wide) => { wide.style.zoom = ""; });
    drawAll();
  });

  // Runs: a button hides or shows one run in every plot, table and card; another all of them.
  const runButtons = [...document.querySelectorAll("[data-toggle]")];
  const show = (button, wanted) => {
    const run = Number(button.dataset.toggle);
    wanted ? hidden.delete(run) : hidden.add(run);
    button.setAttribute("aria-pressed", String(wanted));
    document.querySelectorAll(`[data-run="${run}"]`).forEach((part) => part.classList.toggle("muted", !wanted));
  };
  runButtons.filter((button) => button.getAttribute("aria-pressed") === "false").forEach((button) => show(button, false));
  runButtons.forEach((button) => button.addEventListener("click", () => {
    show(button, hidden.has(Number(button.dataset.toggle)));
    drawAll();
  }));
  document.querySelector("[data-toggle-all]")?.addEventListener("click", () => {
    const wanted = hidden.size > 0;
    runButtons.forEach((button) => show(button, wanted));
    drawAll();
  });

  // Data sets: a button hides or shows all that is said of one.
  document.querySelectorAll("[data-toggle-set]").forEach((button) => button.addEventListener("click", () => {
    const wanted = button.getAttribute("aria-pressed") === "false";
    button.setAttribute("aria-pressed", String(wanted));
    document.querySelectorAll(`[data-set="${button.dataset.toggleSet}"]`).forEach((part) => part.classList.toggle("away", !wanted));
    drawAll();
  }));

  // Sorting: by the column's loss, best first; a second press turns it round. #sort=nll sorts on load.
  const heads = [...table.querySelectorAll("th[data-key]")];
  const sort = (head, descending) => {
    const column = head.cellIndex;
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
