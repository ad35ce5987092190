// Which numbers can these weights become, how far off is that, and which format is fastest when?
import { apart, axisX, axisY, linear, log } from "lab/svg.js";
import { number } from "lab/format.js";

const COLOURS = /** @type {Record<string, string>} */ ({ plain: "muted", fp8: "compute", int8: "communication", int4: "weights" });
const named = (/** @type {string} */ format) => (format === "plain" ? "bf16" : format);
const colour = (/** @type {string} */ format) => `var(--${COLOURS[format] ?? "weights"})`;

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>${line(h, d, inputs, act, width)}${speeds(h, d, inputs, width)}${sizes(h, d, width)}</div>`;
}

/** Weights above, the numbers that they can become below. @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function line(h, d, inputs, act, width) {
  const height = 250, left = 10, right = width - 10, top = 26, floor = 128, base = 196;
  const most = Math.max(...d.bins), limit = Math.max(Math.abs(d.low), Math.abs(d.high)) * 1.04;
  const x = linear([-limit, limit], [left, right]);
  const bin = (d.high - d.low) / d.bins.length, tall = (/** @type {number} */ n) => ((floor - top) * Math.sqrt(n / most));
  const place = d.weights[d.outlier], off = (/** @type {number} */ i) => Math.abs(d.weights[i] - d.rounded[i]);
  const worst = d.weights.reduce((/** @type {number} */ a, /** @type {number} */ _, /** @type {number} */ i) => (off(i) > off(a) ? i : a), 0);
  const many = d.weights.length > 300;
  const grab = (/** @type {PointerEvent} */ event) => {
    const handle = /** @type {SVGElement} */ (event.currentTarget);
    handle.setPointerCapture(event.pointerId);
    Object.assign(handle.dataset, { from: event.clientX, times: inputs.outlier });
  };
  const drag = (/** @type {PointerEvent} */ event) => { // outwards, however the axis follows
    const { from, times } = /** @type {SVGElement} */ (event.currentTarget).dataset;
    if (!event.buttons || !from) return;
    const outwards = (event.clientX - Number(from)) * Math.sign(place);
    act({ outlier: Math.round(10 * Math.max(1, Math.min(10, Number(times) * Math.exp(outwards / 160)))) / 10 });
  };
  const px = x(place), inward = px > width / 2 ? "end" : "start";
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-labelledby="q-title q-desc">
    <title id="q-title">${d.weights.length} weights and the ${d.levels.length} numbers that they can become in ${d.format}</title>
    <desc id="q-desc">Weights from ${number(Math.min(...d.weights))} to ${number(Math.max(...d.weights))}; the one that is furthest off goes from ${number(d.weights[worst])} to ${number(d.rounded[worst])}.</desc>
    <text class="muted" x=${left} y="13">${width < 560 ? "the whole matrix (root of counts)" : "how often each value occurs in the whole matrix (root of the counts)"}</text>
    ${d.bins.map((/** @type {number} */ n, /** @type {number} */ i) => n > 0 && h`<rect key=${i} x=${x(d.low + i * bin)} width=${Math.max(0.6, x(bin) - x(0) - 0.7)} y=${floor - tall(n)} height=${tall(n)} fill="var(--activations)" fill-opacity=".38" />`)}
    <line x1=${left} x2=${right} y1=${floor} y2=${floor} stroke="var(--line)" />
    ${d.weights.map((/** @type {number} */ w, /** @type {number} */ i) => h`<line key=${i} x1=${x(w)} x2=${x(d.rounded[i])} y1=${floor + 6} y2=${base - 10} stroke="var(--weights)" stroke-opacity=${many ? 0.22 : 0.5} stroke-width="1" />`)}
    ${d.weights.map((/** @type {number} */ w, /** @type {number} */ i) => h`<circle key=${i} cx=${x(w)} cy=${floor + 5} r=${many ? 1.4 : 2.2} fill="var(--weights)" />`)}
    ${d.levels.map((/** @type {number} */ level) => h`<line key=${level} x1=${x(level)} x2=${x(level)} y1=${base - 10} y2=${base + 8} stroke="var(--text)" stroke-width=${d.levels.length > 60 ? 0.8 : 2} />`)}
    <line x1=${left} x2=${right} y1=${base} y2=${base} stroke="var(--muted)" />
    ${[-limit / 1.04, 0, limit / 1.04].map((v, i) => h`<text key=${i} class="muted" x=${x(v)} y=${base + 24} text-anchor=${["start", "middle", "end"][i]}>${number(v)}</text>`)}
    <text class="muted" x=${left} y=${height - 8}>${d.weights.length} weights${width < 560 ? `, 1 scale, ${d.levels.length} levels in range` : ` that share a scale, and the ${d.levels.length} levels of ${d.format} in their range`}</text>
    <g onPointerDown=${grab} onPointerMove=${drag} class="handle">
      <circle cx=${px} cy=${floor + 5} r="22" fill="transparent" />
      <circle cx=${px} cy=${floor + 5} r="8" fill="var(--accent)" fill-opacity=".25" stroke="var(--accent)" stroke-width="2.5" />
    </g>
    <text class="halo strong" x=${px} y=${floor - 9} text-anchor=${inward} fill="var(--accent)">${inputs.outlier > 1 ? `largest x ${number(inputs.outlier)}` : "drag the largest"}</text>
  </svg>`;
}

/** @param {any} h @param {any} d @param {any} inputs @param {number} width */
function speeds(h, d, inputs, width) {
  const isNarrow = width < 560, height = Math.round(Math.max(240, Math.min(330, width * 0.36)));
  const left = 54, right = width - 62, top = 30, bottom = height - 40;
  const plain = d.curves[0].tokens_per_s;
  const times = (/** @type {any} */ one) => one.tokens_per_s.map((/** @type {number} */ v, /** @type {number} */ i) => v / plain[i]);
  const x = log([1, d.batches[d.batches.length - 1]], [left, right]);
  const y = linear([0, Math.max(...d.curves.flatMap(times)) * (isNarrow ? 1.3 : 1.1)], [bottom, top]);
  const at = (/** @type {any} */ one) => times(one).map((/** @type {number} */ v, /** @type {number} */ i) => `${x(d.batches[i])},${y(v)}`).join(" ");
  const four = d.curves.find((/** @type {any} */ one) => one.format === d.four);
  const labels = apart(d.curves.map((/** @type {any} */ one) => ({ x: right + 6, y: y(times(one)[plain.length - 1]) + 4, text: named(one.format), one })));
  const cross = d.crossover > 0 && four ? between(d.batches, times(four), d.crossover) : 0;
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-labelledby="qs-title">
    <title id="qs-title">Tokens a second by requests at once${d.crossover > 0 ? `; fp8 beats ${d.four} from ${d.crossover} on` : ""}</title>
    ${axisX({ scale: x, y: bottom, top, ticks: isNarrow ? [1, 8, 64, 512] : [1, 2, 4, 8, 16, 32, 64, 128, 256, 512], label: isNarrow ? "requests at once" : `requests at once, ${inputs.model} on ${inputs.device}`, end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(4) })}
    <text class="muted" x=${left + 4} y="16">times the speed of 16-bit weights</text>
    ${cross > 0 && h`<g><line x1=${x(d.crossover)} x2=${x(d.crossover)} y1=${top} y2=${bottom} stroke="var(--accent)" stroke-dasharray="4 4" stroke-width="1.5" />
      <rect x=${x(d.crossover)} y=${top} width=${right - x(d.crossover)} height=${bottom - top} fill="var(--compute)" fill-opacity=".07" /></g>`}
    ${d.curves.map((/** @type {any} */ one) => h`<polyline key=${one.format} points=${at(one)} fill="none" stroke=${colour(one.format)} stroke-width=${one.format === d.format ? 3.5 : 1.8} stroke-dasharray=${one.format === "plain" ? "5 4" : "none"} />`)}
    ${labels.map((/** @type {any} */ one) => h`<text key=${one.one.format} class=${`halo ${one.one.format === d.format ? "strong" : ""}`} x=${one.x} y=${one.y} fill=${colour(one.one.format)}>${one.text}</text>`)}
    ${cross > 0 && h`<g><circle cx=${x(d.crossover)} cy=${y(cross)} r="6" fill="none" stroke="var(--accent)" stroke-width="2.5" />
      <text class="halo strong" x=${x(d.crossover) + (x(d.crossover) > width / 2 ? -8 : 8)} y=${top + 16} text-anchor=${x(d.crossover) > width / 2 ? "end" : "start"} fill="var(--accent)">${isNarrow ? `fp8 wins from ${d.crossover}` : `from ${d.crossover} on fp8 beats ${d.four}`}</text></g>`}
  </svg>`;
}

/** Where a line passes between two of its points. @param {number[]} xs @param {number[]} ys @param {number} at */
function between(xs, ys, at) {
  const i = Math.max(1, xs.findIndex((x) => x >= at));
  const share = (at - xs[i - 1]) / (xs[i] - xs[i - 1]);
  return ys[i - 1] + share * (ys[i] - ys[i - 1]);
}

/** Bytes of the model and error of the matrix, by format. @param {any} h @param {any} d @param {number} width */
function sizes(h, d, width) {
  const left = 96, right = width - 140, row = 26, height = d.curves.length * row + 24;
  const x = linear([0, d.sizes[0]], [left, Math.max(left + 40, right)]);
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Bytes and rounding error by format">
    <text class="muted" x="0" y="12">bytes of the model, and error of the matrix</text>
    ${d.curves.map((/** @type {any} */ one, /** @type {number} */ i) => h`<g key=${one.format}>
      <text x="0" y=${38 + i * row} class=${one.format === d.format ? "strong" : ""}>${named(one.format)}</text>
      <rect x=${left} y=${22 + i * row} width=${Math.max(1, x(d.sizes[i]) - left)} height="21" fill=${colour(one.format)} fill-opacity=${one.format === d.format ? 0.95 : 0.55} />
      <text class="halo" x=${x(d.sizes[i]) + 8} y=${38 + i * row}>${number(d.sizes[i])} GB, ${d.errors[i] > 0 ? `off by ${number(100 * d.errors[i])} %` : "exact"}</text></g>`)}
  </svg>`;
}
