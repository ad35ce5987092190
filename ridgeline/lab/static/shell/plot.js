// How do lines over time look? uPlot, in the colours of the page.
import { useEffect, useRef } from "preact/hooks";
import { html } from "./html.js";

/** @type {Promise<any> | null} */
let loading = null;

/** uPlot and its style, once they are needed. */
export function loadPlot() {
  loading ??= new Promise((done, fail) => {
    const style = document.createElement("link"), script = document.createElement("script");
    const base = new URL("../vendor/", import.meta.url);
    style.rel = "stylesheet"; style.href = new URL("uPlot.min.css", base).href;
    script.src = new URL("uPlot.iife.min.js", base).href;
    script.onload = () => done(/** @type {any} */ (window).uPlot);
    script.onerror = () => fail(new Error("uPlot could not be loaded"));
    document.head.append(style, script);
  });
  return loading;
}

/** What a colour of the style sheet is now. @param {string} name */
function colour(name) {
  const probe = document.createElement("i");
  probe.style.color = `var(--${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

/** Lines over one x. `lines`: names, colours by meaning, and how their values are written.
 * @param {{data: any[], lines: {name: string, colour: string, format?: (v: number) => string, dash?: number[]}[], width: number, height?: number,
 *   x?: (v: number) => string, isTime?: boolean, min?: number, label: string}} props */
export function Plot({ data, lines, width, height = 170, x = String, min = 0, label }) {
  const frame = useRef(/** @type {HTMLDivElement | null} */ (null)), plot = useRef(/** @type {any} */ (null));
  useEffect(() => {
    let isGone = false;
    loadPlot().then((uPlot) => {
      if (isGone || !frame.current) return;
      const ink = { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
      const format = lines[0].format ?? String;
      plot.current = new uPlot({
        width, height, cursor: { y: false, drag: { x: false, y: false } }, legend: { live: true },
        scales: { x: { time: false }, y: { range: (/** @type {any} */ _, /** @type {number} */ low, /** @type {number} */ high) => [Math.min(min, low ?? 0), (high || 1) * 1.08] } },
        axes: [
          { ...ink, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map(x) },
          { ...ink, size: 64, values: (/** @type {any} */ _, /** @type {number[]} */ at) => at.map(format) },
        ],
        series: [{ label: "", value: (/** @type {any} */ _, /** @type {number} */ v) => (v === null ? "" : x(v)) },
          ...lines.map((one) => ({ label: one.name, stroke: colour(one.colour), width: 2, dash: one.dash, spanGaps: true, points: { show: false },
            value: (/** @type {any} */ _, /** @type {number} */ v) => (v === null || v === undefined ? "–" : (one.format ?? String)(v)) }))],
      }, data, frame.current);
    });
    return () => { isGone = true; plot.current?.destroy(); plot.current = null; };
  }, [width, height, document.documentElement.dataset.theme, lines.map((one) => one.name).join()]);
  useEffect(() => plot.current?.setData(data), [data]);
  return html`<div ref=${frame} class="plot" role="img" aria-label=${label}></div>`;
}
