// How many tokens a second does each way make, how near is it to what memory gives, and what does each token take?
import { apart, axisX, axisY, linear, log } from "lab/svg.js";
import { number, scaled, seconds } from "lab/format.js";

const COLOURS = ["var(--waiting)", "var(--kv)", "var(--weights)", "var(--compute)"];

/** @param {any} h @param {any} answer @param {any} inputs @param {(changes: any) => void} act @param {number} width */
export function draw(h, answer, inputs, act, width) {
  const d = answer.drawing;
  const colour = (/** @type {number} */ i) => (i === d.ways.length - 1 ? COLOURS[3] : COLOURS[i]);
  return h`<div>${reach(h, d, width, colour)}${tokens(h, d, width, colour)}${split(h, d, width, colour)}</div>`;
}

/** Weights read a second, in each way, against what a pass over as many bytes gets.
 * @param {any} h @param {any} d @param {number} width @param {(way: number) => string} colour */
function reach(h, d, width, colour) {
  const isNarrow = width < 520, left = isNarrow ? 0 : 86, row = isNarrow ? 48 : 38, top = 58;
  const least = Math.min(...d.ways.map((/** @type {any} */ one) => one.bytes_per_s)) / 2, most = Math.max(d.near, d.far, ...d.ways.map((/** @type {any} */ one) => one.bytes_per_s)) * 1.15;
  const x = log([least, most], [left, width - 8]), bottom = top + d.ways.length * row;
  const limit = (/** @type {number} */ rate, /** @type {string} */ text, /** @type {number} */ y) => h`<g><line x1=${x(rate)} x2=${x(rate)} y1=${y + 5} y2=${bottom} stroke="var(--text)" stroke-width="1.5" stroke-dasharray="5 4" /><text class="halo" x=${Math.min(width, x(rate) + 4)} y=${y} text-anchor="end">${text}: ${scaled(rate, "B/s")}</text></g>`;
  return h`<svg viewBox="0 0 ${width} ${bottom + 34}" role="img" aria-label="Weights read a second by each way">
    <text class="strong" x="0" y="13">Weights read a second${isNarrow ? "" : " (each step of the axis is ten times)"}</text>
    ${limit(d.near, isNarrow ? "as many bytes" : "reading as many bytes", 32)}${limit(d.far, isNarrow ? "a large buffer" : "reading a large buffer", 50)}
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(5), format: (v) => scaled(v, "B/s") })}
    ${d.ways.map((/** @type {any} */ one, /** @type {number} */ i) => { const y = top + i * row + (isNarrow ? 18 : 4), end = x(one.bytes_per_s), inside = end - left > 150;
      return h`<g key=${one.name}><title>${one.does}</title><text class="strong" x=${isNarrow ? 0 : left - 10} y=${isNarrow ? y - 4 : y + 19} text-anchor=${isNarrow ? "start" : "end"}>${one.name}</text>
        <rect x=${left} y=${y} width=${Math.max(2, end - left)} height="26" fill=${colour(i)} />
        <text class=${inside ? "on" : "halo"} x=${inside ? end - 8 : end + 8} y=${y + 18} text-anchor=${inside ? "end" : "start"}>${number(1 / one.typical_s)} tok/s, ${scaled(one.bytes_per_s, "B/s")}</text></g>`; })}
  </svg>`;
}

/** Milliseconds of each token. @param {any} h @param {any} d @param {number} width @param {(way: number) => string} colour */
function tokens(h, d, width, colour) {
  const height = width < 520 ? 230 : 260, left = 58, right = width - (width < 520 ? 12 : 82), top = 30, bottom = height - 38;
  const all = d.ways.flatMap((/** @type {any} */ one) => one.token_s), count = Math.max(...d.ways.map((/** @type {any} */ one) => one.token_s.length));
  const x = linear([2, count + 1], [left, right]), y = log([Math.min(...all) / 1.5, Math.max(...all) * 1.5], [bottom, top]);
  const names = apart(d.ways.map((/** @type {any} */ one, /** @type {number} */ i) => ({ x: right, y: y(one.token_s[one.token_s.length - 1]) + (width < 520 ? -6 : 4), text: one.name, i })));
  return h`<svg viewBox="0 0 ${width} ${height}" role="img" aria-label="Time of each token by each way">
    <text class="strong" x="0" y="14">Time of each token</text>
    ${axisX({ scale: x, y: bottom, top, ticks: x.ticks(6).filter((/** @type {number} */ v) => Number.isInteger(v)), label: "token of the answer", end: right })}
    ${axisY({ scale: y, x: left, right, ticks: y.ticks(4), format: seconds })}
    ${d.ways.map((/** @type {any} */ one, /** @type {number} */ i) => h`<g key=${one.name}><polyline points=${one.token_s.map((/** @type {number} */ s, /** @type {number} */ t) => `${x(t + 2)},${y(s)}`).join(" ")} fill="none" stroke=${colour(i)} stroke-width="2.5" /></g>`)}
    ${names.map((/** @type {any} */ one) => h`<text key=${one.text} class="halo" x=${width < 520 ? right : right + 6} y=${one.y} text-anchor=${width < 520 ? "end" : "start"} fill=${colour(one.i)}>${one.text}</text>`)}
  </svg>`;
}

/** The prompt's share of the whole answer. @param {any} h @param {any} d @param {number} width @param {(way: number) => string} colour */
function split(h, d, width, colour) {
  const left = 86, row = 28, most = 100, count = Math.max(...d.ways.map((/** @type {any} */ one) => one.token_s.length));
  return h`<svg viewBox="0 0 ${width} ${52 + d.ways.length * row}" role="img" aria-label="Shares of the prompt and of the answer's tokens">
    <text class="strong" x="0" y="14">Of the whole time</text>
    <rect x="0" y="24" width="10" height="10" fill="var(--activations)" /><text class="muted" x="15" y="33">the prompt and its first token</text>
    ${d.ways.map((/** @type {any} */ one, /** @type {number} */ i) => { const rest = one.token_s.reduce((/** @type {number} */ a, /** @type {number} */ b) => a + b, 0), whole = one.prompt_s + rest, w = ((width - left) * one.prompt_s) / whole, y = 44 + i * row;
      return h`<g key=${one.name}><text x=${left - 10} y=${y + 15} text-anchor="end">${one.name}</text><rect x=${left} y=${y} width=${w} height="20" fill="var(--activations)" /><rect x=${left + w} y=${y} width=${width - left - w} height="20" fill=${colour(i)} />
        <text class="on" x=${width - 8} y=${y + 14} text-anchor="end">${seconds(whole)}${one.token_s.length < count && width >= 520 ? ` for ${one.token_s.length + 1} tokens` : ""}, prompt ${number((most * one.prompt_s) / whole)} %</text></g>`; })}
  </svg>`;
}
