// Where on the drawing does a value lie? Scales, their ticks, and axes.
import { html } from "./html.js";
import { number } from "./format.js";

/** @param {[number, number]} domain @param {[number, number]} range */
export function linear([low, high], [from, to]) {
  const scale = (/** @type {number} */ value) => from + ((value - low) / (high - low || 1)) * (to - from);
  scale.invert = (/** @type {number} */ at) => low + ((at - from) / (to - from || 1)) * (high - low);
  scale.ticks = (count = 5) => {
    const rough = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough) ?? rough;
    const first = Math.ceil(low / step);
    return Array.from({ length: Math.max(0, Math.floor(high / step + 1e-9) - first + 1) }, (_, i) => (first + i) * step);
  };
  return scale;
}

/** @param {[number, number]} domain @param {[number, number]} range */
export function log([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  const scale = (/** @type {number} */ value) => inner(Math.log10(Math.max(value, Number.MIN_VALUE)));
  scale.invert = (/** @type {number} */ at) => 10 ** inner.invert(at);
  scale.ticks = (count = 6) => {
    const first = Math.ceil(Math.log10(low) - 1e-9), last = Math.floor(Math.log10(high) + 1e-9);
    const every = Math.max(1, Math.ceil((last - first + 1) / count));
    return Array.from({ length: Math.floor((last - first) / every) + 1 }, (_, i) => 10 ** (first + i * every));
  };
  return scale;
}

/** A horizontal axis at `y` with a line up to `top` for each tick.
 * @param {{scale: any, y: number, top: number, ticks?: number[], format?: (value: number) => string, label?: string, end?: number}} how */
export function axisX({ scale, y, top, ticks = scale.ticks(), format = number, label, end }) {
  return html`<g class="axis" aria-hidden="true">
    ${ticks.map((tick) => html`<g key=${tick}>
      <line x1=${scale(tick)} x2=${scale(tick)} y1=${y} y2=${top} />
      <text x=${scale(tick)} y=${y + 16} text-anchor="middle">${format(tick)}</text>
    </g>`)}
    ${label && html`<text class="label" x=${end ?? scale(ticks[ticks.length - 1])} y=${y + 33} text-anchor="end">${label}</text>`}
  </g>`;
}

/** A vertical axis at `x` with a line to `right` for each tick.
 * @param {{scale: any, x: number, right: number, ticks?: number[], format?: (value: number) => string, label?: string, top?: number}} how */
export function axisY({ scale, x, right, ticks = scale.ticks(), format = number, label, top = 0 }) {
  return html`<g class="axis" aria-hidden="true">
    ${ticks.map((tick) => html`<g key=${tick}>
      <line x1=${x} x2=${right} y1=${scale(tick)} y2=${scale(tick)} />
      <text x=${x - 6} y=${scale(tick) + 4} text-anchor="end">${format(tick)}</text>
    </g>`)}
    ${label && html`<text class="label" x=${x - 6} y=${top + 4} text-anchor="start">${label}</text>`}
  </g>`;
}

/** Texts that would lie over each other are moved apart, downwards.
 * @template {{x: number, y: number, text: string}} T @param {T[]} labels @param {number} [size] @returns {T[]} */
export function apart(labels, size = 12) {
  /** @type {T[]} */
  const placed = [];
  for (const label of [...labels].sort((a, b) => a.y - b.y)) {
    let y = label.y;
    const width = (/** @type {T} */ one) => one.text.length * size * 0.56;
    for (const other of placed)
      if (Math.abs(other.x - label.x) < Math.max(width(other), width(label)) && y < other.y + size * 1.15)
        y = other.y + size * 1.15;
    placed.push({ ...label, y });
  }
  return placed;
}

/** Makes a part of a drawing a handle: where it is dragged to, in the drawing's own units.
 * @param {number} width @param {(x: number, y: number) => void} moved */
export function dragged(width, moved) {
  const move = (/** @type {PointerEvent} */ event) => {
    const part = /** @type {SVGElement} */ (event.currentTarget), svg = part.closest("svg");
    if (!event.buttons || !svg) return;
    part.setPointerCapture(event.pointerId);
    const box = svg.getBoundingClientRect(), unit = width / box.width;
    moved((event.clientX - box.x) * unit, (event.clientY - box.y) * unit);
  };
  return { onPointerDown: move, onPointerMove: move, class: "handle" };
}
