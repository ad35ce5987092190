// Where do the operators of a step lie under the roof, and how far is the step from its ridge?
import { axisX, axisY, apart, log } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

const MIN_LABELLED = 0.035; // share of the step's time

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  return h`<div>
    ${roof(h, d, inputs, act, width)}
    ${bars(h, d, width)}
  </div>`;
}

/** @param {any} h @param {any} d @param {any} inputs @param {any} act @param {number} width */
function roof(h, d, inputs, act, width) {
  const height = Math.round(Math.max(280, Math.min(470, width * 0.52)));
  const left = 46, right = width - 12, top = 18, bottom = height - 40, isNarrow = width < 560;
  const spread = [...d.operators, ...d.trail].map((one) => one.intensity);
  const low = Math.min(0.5, ...spread) / 1.5, high = Math.max(d.ridge * 6, ...spread) * 1.5;
  const x = log([low, high], [left, right]);
  const lowest = Math.min(low * d.bandwidth, ...d.operators.map((/** @type {any} */ one) => one.rate));
  const y = log([lowest / 1.4, d.peak * 2.2], [bottom, top]);
  const at = (/** @type {any} */ one) => `${x(one.intensity)},${y(one.rate)}`;
  const corner = [x(d.ridge), y(d.peak)];
  const labels = apart(d.operators.filter((/** @type {any} */ one) => one.share > MIN_LABELLED).map((/** @type {any} */ one) => ({
    x: x(one.intensity) + radius(one) + 4, y: y(one.rate) + 4, text: one.name.replaceAll("_", " "), one,
  })));
  const below = Math.max(0, ...labels.map((/** @type {any} */ one) => one.y + 5 - bottom)); // they are moved up together
  const drag = (/** @type {PointerEvent} */ event) => {
    const svg = /** @type {SVGElement} */ (event.currentTarget).closest("svg");
    if (!event.buttons || !svg) return;
    /** @type {Element} */ (event.currentTarget).setPointerCapture(event.pointerId);
    const box = svg.getBoundingClientRect(), px = ((event.clientX - box.x) / box.width) * width;
    const best = d.trail.reduce((/** @type {any} */ a, /** @type {any} */ b) => (Math.abs(x(b.intensity) - px) < Math.abs(x(a.intensity) - px) ? b : a));
    act({ batch: best.batch });
  };
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-labelledby="mw-title mw-desc">
    <title id="mw-title">Roofline of ${d.device}</title>
    <desc id="mw-desc">Operations per second over operations per byte, both logarithmic. The whole step lies at ${number(d.step.intensity)} FLOP/B, the ridge at ${number(d.ridge)}.</desc>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(isNarrow ? 4 : 7), label: "FLOP for each byte of memory traffic", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(5), format: (v) => scaled(v, "").trim(), label: "" })}
    <text class="muted" x=${left + 6} y=${top + 2}>FLOP/s</text>
    <path d="M${x(low)},${bottom} L${x(low)},${y(low * d.bandwidth)} L${corner} L${right},${y(d.peak)} L${right},${bottom}Z" fill="var(--accent)" fill-opacity=".05" />
    <path d="M${x(low)},${y(low * d.bandwidth)} L${corner}" stroke="var(--waiting)" stroke-width="3" fill="none" />
    <path d="M${corner} L${right},${y(d.peak)}" stroke="var(--compute)" stroke-width="3" fill="none" />
    <line x1=${corner[0]} x2=${corner[0]} y1=${corner[1]} y2=${bottom} stroke="var(--muted)" stroke-dasharray="3 4" />
    <text class="halo" x=${corner[0]} y=${bottom - 8} text-anchor="middle">ridge ${number(d.ridge)}</text>
    <text class="halo" x=${right} y=${corner[1] - 8} text-anchor="end" fill="var(--compute)">${scaled(d.peak, "FLOP/s")}</text>
    ${slope(h, x, y, d, low, isNarrow)}
    <polyline points=${d.trail.map(at).join(" ")} fill="none" stroke="var(--accent)" stroke-width="1.5" stroke-dasharray="1 5" stroke-linecap="round" />
    ${d.operators.map((/** @type {any} */ one) => h`<circle key=${one.name} cx=${x(one.intensity)} cy=${y(one.rate)} r=${radius(one)} fill="var(--${one.holds})" fill-opacity=".82" stroke="var(--panel)">
      <title>${one.name}: ${seconds(one.seconds)}, ${number(100 * one.share)} % of the step, bound by ${one.bound}</title></circle>`)}
    ${labels.map((/** @type {any} */ one) => h`<text key=${one.one.name} class="halo" x=${one.x} y=${one.y - below} fill="var(--${one.one.holds})">${one.text}</text>`)}
    <g onPointerMove=${drag} onPointerDown=${drag} class="handle">
      <circle cx=${x(d.step.intensity)} cy=${y(d.step.rate)} r="22" fill="transparent" />
      <circle cx=${x(d.step.intensity)} cy=${y(d.step.rate)} r="9" fill="var(--accent)" fill-opacity=".25" stroke="var(--accent)" stroke-width="2.5" />
    </g>
    <text class="halo strong" x=${x(d.step.intensity) - 13} y=${y(d.step.rate) - 9 - below} text-anchor=${x(d.step.intensity) > 110 ? "end" : "start"} fill="var(--accent)">${inputs.batch} ${inputs.batch === 1 ? "request" : "requests"}</text>
  </svg>`;
}

/** The words along the slope. @param {any} h @param {any} x @param {any} y @param {any} d @param {number} low @param {boolean} isNarrow */
function slope(h, x, y, d, low, isNarrow) {
  const middle = Math.sqrt(low * d.ridge), isLow = d.step.intensity < middle;
  const from = isLow ? middle : low * 1.2, to = from * 10;
  const angle = (Math.atan2(y(to * d.bandwidth) - y(from * d.bandwidth), x(to) - x(from)) * 180) / Math.PI;
  const px = x(from), py = y(from * d.bandwidth) - 8;
  return h`<text class="halo muted" transform="translate(${px} ${py}) rotate(${angle})">${isNarrow ? "" : "memory: "}${scaled(d.bandwidth, "B/s")}</text>`;
}

/** @param {any} one */
const radius = (one) => 3 + 15 * Math.sqrt(one.share);

/** What one step needs of both, on one scale of time. @param {any} h @param {any} d @param {number} width */
function bars(h, d, width) {
  const whole = Math.max(d.memory_s, d.compute_s), left = 78, space = width - left - 4;
  const total = d.weights_bytes + d.kv_bytes + d.other_bytes, w = (/** @type {number} */ s) => Math.max(1, (space * s) / whole);
  const parts = [["weights", d.weights_bytes], ["kv", d.kv_bytes], ["activations", d.other_bytes]];
  let at = left;
  const pieces = parts.map(([name, size]) => { const piece = { name, x: at, width: (w(d.memory_s) * size) / total, share: size / total }; at += piece.width; return piece; });
  const names = /** @type {Record<string, string>} */ ({ weights: "weights", kv: "KV", activations: "activations" });
  const end = left + w(d.compute_s), idle = left + space - end;
  return h`<svg viewBox="0 0 ${width} 74" role="img" aria-label="One step: memory ${seconds(d.memory_s)}, arithmetic ${seconds(d.compute_s)}">
    <defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="2" height="6" fill="var(--waiting)" fill-opacity=".45" /></pattern></defs>
    <text x="0" y="22">memory</text><text x="0" y="56">arithmetic</text>
    ${pieces.map((one) => h`<g key=${one.name}><rect x=${one.x} y="6" width=${one.width} height="24" fill="var(--${one.name})" />
      ${one.width > 64 && h`<text x=${one.x + 7} y="22" class="on">${names[one.name]} ${number(100 * one.share)} %</text>`}</g>`)}
    <rect x=${left} y="40" width=${w(d.compute_s)} height="24" fill="var(--compute)" />
    ${idle > 1 && h`<rect x=${end} y="40" width=${idle} height="24" fill="url(#idle)" />`}
    ${idle > 150 ? h`<text class="halo" x=${end + 8} y="56">${seconds(d.compute_s)}, then it waits ${seconds(whole - d.compute_s)}</text>` : h`<text x=${left + 7} y="56" class="on">${seconds(d.compute_s)}</text>`}
  </svg>`;
}
